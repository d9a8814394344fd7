"""Where nothing may be written: a read-only file system, no directory for files without a name, no rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RedisServer, Sidecar, Upstream, default_config, duration, until
from harness.program import ROOT
from pair import Pair, post

MIB = 1024 * 1024
USER = "10001"
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
# Every mount of a namespace of its own becomes read-only, then the program takes our place.
SEAL = """
mount --make-rprivate / || exit 70
while read -r _ _ _ _ place _; do
    case "$place" in /proc*|/sys*|/dev|/dev/pts) continue;; esac
    mount -o remount,bind,ro "$place" 2>/dev/null || [ "$place" != / ] || exit 71
done < /proc/self/mountinfo
exec "$@"
"""


def confinement() -> list[str]:
    """The words before a command that take away every right and every writable place."""
    space = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-r", "-m"]
    drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    user = [*drop, f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    trial = [sys.executable, "-c", "import sidecar.assembly, sidecar.embedded"]
    may = subprocess.run([*user, *trial], capture_output=True, cwd="/", env=ENVIRONMENT)
    # The interpreter may lie where that user may not look; root without capabilities is as powerless.
    return [*space, "sh", "-c", SEAL, "sh", *(user if may.returncode == 0 else drop)]


class Confined(Sidecar):
    """A sidecar that can write nothing but its standard output and error."""

    async def run(self, *, ready: bool = True) -> None:
        """Start the program inside its confinement."""
        for tool in ("unshare", "setpriv"):
            assert shutil.which(tool), f"{tool} of util-linux is needed"
        self.file.chmod(0o644)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond
                [*confinement(), sys.executable, "-m", "sidecar", "serve", "-c", str(self.file)],
                cwd=self.directory,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if ready:
            await self.ready()


# A network of its own where loopback has no IPv6: lo goes up, ::1 goes away (SIOCSIFFLAGS, SIOCDIFADDR).
WITHOUT_IPV6 = """
import fcntl, os, socket, struct, sys
four = socket.socket()
fcntl.ioctl(four, 0x8914, struct.pack("16sh14x", b"lo", 1 | 64))
try:
    six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    fcntl.ioctl(six, 0x8936, socket.inet_pton(socket.AF_INET6, "::1") + struct.pack("II", 128, 1))
except OSError:
    pass  # there is none
os.execvp(sys.argv[1], sys.argv[1:])
"""


class WithoutIpv6(Sidecar):
    """A sidecar on a host that has no IPv6; it can be asked from within its network alone."""

    async def run(self, *, ready: bool = True) -> None:
        """Start the program in a network of its own; `ready` is not waited for."""
        space = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-r", "-n"]
        program = [sys.executable, "-m", "sidecar", "serve", "-c", str(self.file)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond
                [*space, sys.executable, "-c", WITHOUT_IPV6, *program],
                cwd=self.directory,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def healthcheck(self, address: str) -> int:
        """The exit code of `sidecar healthcheck`, run in the same network against another address."""
        file = self.directory / "check.yaml"
        file.write_text(self.file.read_text().replace("localhost:8026", f"'{address}'"))
        enter = ["nsenter", "-t", str(self.pid), *([] if os.geteuid() == 0 else ["-U"]), "-n"]
        command = [*enter, sys.executable, "-m", "sidecar", "healthcheck", "-c", str(file)]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True).returncode


@pytest.mark.case("C273")
async def test_localhost_without_ipv6_is_served_on_ipv4_with_one_warning(
    tmp_path: Path, store: RedisServer, upstream: Upstream
) -> None:
    parts = {"listen": "localhost:8025", "admin": {"listen": "localhost:8026"}}
    one = WithoutIpv6(tmp_path / "one", {**default_config(upstream, store.unix_url), **parts})
    try:
        await one.run()
        await until(lambda: one.log_lines(event="serving"), 10)
        assert one.healthcheck("127.0.0.1:8026") == 0
        assert one.healthcheck("[::1]:8026") == 1
        told = [str(line["message"]) for line in one.log_lines(event="listen", level="warning")]
        assert [line for line in told if "8025" in line] == told[:1]
        assert all("IPv6" in line for line in told)
        assert await one.stop() == 0
    finally:
        await one.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that others may look into; pytest's own may be entered by its owner alone."""
    made = Path(tempfile.mkdtemp(prefix="confined-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.case("C267")
async def test_nothing_needs_to_be_writable_with_a_store_elsewhere(
    place: Path, store: RedisServer, upstream: Upstream
) -> None:
    times = {"receive": duration(20), "connect": duration(1), "total": duration(20)}
    one = Confined(place / "confined", default_config(upstream, store.url, timeout=times))
    try:
        await one.run()
        before = sorted(one.directory.rglob("*"))
        pair = Pair(one, upstream)
        content = b'{"a":"' + b"x" * 20 * MIB + b'"}'
        first, second = [await pair.ask(post("read-only", content), deadline_s=20) for _ in range(2)]
        assert (first.status, second.replayed, second.content) == (200, True, first.content)
        assert upstream.requests[0].content == content
        status = Path(f"/proc/{one.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert await one.metric("sidecar_content_bytes") == 0
        assert (await one.stop(), upstream.count) == (0, 1)
        assert sorted(one.directory.rglob("*")) == before
    finally:
        await one.close()


@pytest.mark.case("C267")
async def test_embedded_store_without_a_writable_directory_is_an_error_of_one_line(
    place: Path, upstream: Upstream
) -> None:
    one = Confined(place / "confined", default_config(upstream, f"embedded:{place / 'data'}"))
    try:
        await one.run(ready=False)
        assert await one.wait_exit() == 1
        told = [line for line in one.log().splitlines() if not line.startswith("{")]
        assert len(told) == 1
        assert str(place / "data") in told[0]
        assert "Traceback" not in one.log()
    finally:
        await one.close()
