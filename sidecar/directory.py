"""Owns the directory of the embedded store server: its two locks, the orphan in it, a short way to its socket.

Never two servers on one directory. A second one would start without complaint, take the socket away and append to
the same file, so ownership stands in two locks of the kernel: `owner.lock`, held by the sidecar alone, and
`server.lock`, inherited by the server and by whatever the server forks. Owner taken: another sidecar lives. Owner
free and server taken: a sidecar was killed and its server was not; that orphan is ended before another one starts.

The lock files stay behind. Were they removed, somebody could hold a lock on a file that nobody else can see.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

from sidecar.errors import StartError

SOCKET = "store.sock"
# sun_path has 108 bytes on Linux and 104 on macOS, the final NUL included.
SOCKET_PATH_BYTES = 103

# A killed sidecar's child holds `owner.lock` too until it has become the server: well under this.
OWNER_WAIT_S = 0.3
# With every write synced, SIGKILL costs nothing that was acknowledged; the time is for removing the socket.
TERM_S = 2.0
KILL_S = 2.0
LOOK_S = 0.01

# Linux; elsewhere there is none.
PROC = "/proc"


class Directory:
    """One directory and its locks, this process's alone from `occupy` to `release`."""

    def __init__(self, path: str) -> None:
        """`path` may be relative, of any length, and not there yet."""
        self.path = os.path.abspath(path)
        self.socket_path = os.path.join(self.path, SOCKET)
        self.server_lock = -1
        # In the order in which they were opened.
        self._descriptors: list[int] = []
        self._short = ""

    def occupy(self) -> list[int]:
        """Take both locks; returns the processes of an orphan that had to be ended for it.

        Takes well under a millisecond, 0.1 s with an orphan, and at most `TERM_S + KILL_S` with one that hangs.

        Raises: StartError, one sentence for the operator. `release` is due then too.
        """
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._shorten()
            self._own()
            self.server_lock = self._open("server.lock", os.O_RDWR | os.O_CREAT)
            return self._end_orphan()
        except OSError as exc:
            raise StartError(
                f"the embedded store cannot use the directory {self.path} ({exc.strerror}): put it on a local "
                "volume that this user may write, or set `store.url: redis://...`"
            ) from exc

    def tidy(self) -> None:
        """Make it ready for a server: see that it is still ours, remove what a killed server left half written.

        Raises: OSError.
        """
        # Moved or made anew by now, our locks would guard another directory than the server's.
        if not os.path.samestat(os.fstat(self.server_lock), os.stat(os.path.join(self.path, "server.lock"))):
            raise OSError(errno.ESTALE, "another directory has taken its place")
        for rest in glob.iglob(os.path.join(glob.escape(self.path), "temp-rewriteaof-*")):
            with suppress(OSError):
                os.unlink(rest)

    def full(self) -> bool:
        """Whether nothing more can be written here."""
        try:
            disk = os.statvfs(self.path)
        except OSError:
            return False
        # The server takes a short write back when it ends, so that a full disk has a few pages to spare by now.
        return disk.f_bavail * disk.f_frsize < 256 * 1024

    def release(self) -> None:
        """Give it free. The server is gone, or keeps `server.lock` to itself."""
        # Not the socket of an orphan that does not end: it is the way to find it.
        if self.server_lock >= 0 and _lock(self.server_lock):
            with suppress(OSError):
                os.unlink(os.path.join(self.path, SOCKET))
        if self._short:
            shutil.rmtree(self._short, ignore_errors=True)
            self._short = ""
        # The owner's lock last: who takes it next looks for holders of the server's, and must not find us.
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.server_lock = -1

    def _open(self, name: str, flags: int) -> int:
        descriptor = os.open(os.path.join(self.path, name), flags | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        return descriptor

    def _shorten(self) -> None:
        """Find a short way to the socket for clients. The server needs none: it runs inside the directory."""
        if len(os.fsencode(self.socket_path)) <= SOCKET_PATH_BYTES:
            return
        # Nothing to write and nothing to clean up, and good for other processes of this user too.
        way = f"{PROC}/{os.getpid()}/fd/{self._open('', os.O_RDONLY | os.O_DIRECTORY)}"
        try:
            if not os.path.isdir(way):
                self._short = tempfile.mkdtemp(prefix="sidecar-")
                way = os.path.join(self._short, "d")
                os.symlink(self.path, way)
        except OSError as exc:
            raise StartError(
                f"the path of the directory {self.path} is too long for a socket, and there is no temporary "
                "directory for a shorter one: use a shorter path"
            ) from exc
        self.socket_path = os.path.join(way, SOCKET)

    def _own(self) -> None:
        owner = self._open("owner.lock", os.O_RDWR | os.O_CREAT)
        end_s = time.monotonic() + OWNER_WAIT_S
        while not _lock(owner):
            if time.monotonic() > end_s:
                note = os.pread(owner, 20, 0).decode("ascii", "replace").strip()
                process = f" (process {note})" if note.isdigit() else ""
                raise StartError(
                    f"another sidecar{process} uses the directory {self.path}: "
                    "stop it, or give this one a directory of its own"
                )
            _pause()
        # The note is a courtesy, and a full disk is no reason to refuse what is already stored.
        with suppress(OSError):
            os.pwrite(owner, b"%-19d\n" % os.getpid(), 0)

    def _end_orphan(self) -> list[int]:
        """End whoever holds `server.lock`. No sidecar does, since we are the owner now.

        The other sidecar may have been killed at any step: its server may be about to open its socket, may load, may
        hang, or may be gone itself with a fork of it still rewriting the file. So the holders are looked up anew
        until the lock is free.
        """
        begun_s = time.monotonic()
        told: set[tuple[int, int]] = set()
        while not _lock(self.server_lock):
            waited_s = time.monotonic() - begun_s
            number = signal.SIGTERM if waited_s < TERM_S else signal.SIGKILL
            for process in self._holders():
                if (process, number) not in told:
                    signal_server(process, number)
                    told.add((process, number))
            if waited_s > TERM_S + KILL_S:
                known = ", ".join(str(process) for process in _processes(told)) or "unknown here"
                raise StartError(
                    f"the store server of a killed sidecar is left in the directory {self.path} and does not end "
                    f"(process {known}): end it, then start again"
                )
            _pause()
        return _processes(told)

    def _holders(self) -> set[int]:
        listener = _listener(self.socket_path)
        return {listener} if listener else set(_lock_holders(os.fstat(self.server_lock)))


def signal_server(process: int, number: int) -> bool:
    """Signal a server; SIGKILL goes to its group, since a fork of it would not notice. False: gone, or not ours."""
    try:
        if number == signal.SIGKILL and os.getpgid(process) == process:
            os.killpg(process, number)
        else:
            os.kill(process, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _processes(told: set[tuple[int, int]]) -> list[int]:
    return sorted({process for process, _ in told})


def _pause() -> None:
    time.sleep(LOOK_S)  # noqa: TID251 - there is no loop yet


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _listener(path: str) -> int:
    """The process that listens on the socket at `path`, 0 for none. The kernel says so, for a hung server too."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
            return _peer(probe)
        except OSError:
            return 0


def _peer(connected: socket.socket) -> int:
    if sys.platform == "darwin":
        # SOL_LOCAL and LOCAL_PEERPID of <sys/un.h>
        return connected.getsockopt(0, 2)
    else:  # noqa: RET505 - the type checker sees only the branch of its platform
        process: int = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return process


def _lock_holders(lock: os.stat_result) -> Iterator[int]:
    """The processes that hold a lock on this file, where /proc tells; to have it open is not enough."""
    for way in glob.iglob(f"{PROC}/[0-9]*/fd/*"):
        # Gone by now, or another user's.
        with suppress(OSError):
            # The name first: to ask for the state of any file could mean to wait for a dead file server.
            if not os.readlink(way).endswith("/server.lock") or not os.path.samestat(os.stat(way), lock):
                continue
            process, _, descriptor = way.split("/")[-3:]
            with open(f"{PROC}/{process}/fdinfo/{descriptor}", encoding="ascii") as info:
                if "FLOCK" in info.read():
                    yield int(process)
