"""The sockets a listener needs: one per address family, or a unix socket. Binds; serves nothing.

Workers have them from their supervisor, which binds each address once and keeps every socket open: a client that is
queued where a worker ended is let in by another worker, or by its successor, instead of being reset.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from sidecar.config import Address, Config
from sidecar.errors import StartError

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Place:
    """An address of the data plane and what listens there: for each family one socket, or one for each worker.

    `own`: it is a route's own.
    """

    address: Address
    own: bool
    sockets: tuple[tuple[socket.socket, ...], ...]


class Listening:
    """Binds the addresses of one process, and knows which files it leaves behind."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """`report` takes one sentence for the log."""
        self._report = report
        self._unix: list[str] = []

    def bind(self, address: Address) -> list[socket.socket]:
        """See `bind`. Raises: StartError naming the address."""
        made = bind(address, self._report)
        if address.unix:
            self._unix.append(address.unix)
        return made

    def places(self, config: Config, workers: int = 1) -> Iterator[Place]:
        """Everything the data plane listens at, bound. Raises: StartError naming the address."""
        told = [(address, False) for address in config.listen]
        told += [(address, True) for route in config.routes for address in route.listen]
        for address, own in told:
            yield Place(address, own, tuple(tuple(spread(made, workers)) for made in self.bind(address)))

    def remove(self) -> None:
        """Remove the files of the unix sockets that were bound here."""
        for path in self._unix:
            with suppress(OSError):
                os.unlink(path)
        self._unix = []


def spread(made: socket.socket, workers: int) -> list[socket.socket]:
    """Sockets at the address of `made`, itself the first, one for each worker: the kernel deals the clients out.

    With one socket for all, whoever wakes first takes most of a burst, and keeps it for as long as clients keep their
    connections. Where the kernel does not deal (unix sockets, and elsewhere than on Linux) `made` alone serves all.
    """
    if workers == 1 or made.family == socket.AF_UNIX or sys.platform != "linux":
        return [made]
    group = [made]
    name = made.getsockname()
    try:
        # Only now that it listens: who binds the address later, another sidecar say, must not join unasked, and finds
        # it in use.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(workers - 1):
            more = socket.socket(made.family, socket.SOCK_STREAM)
            group.append(more)
            more.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            more.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if made.family == socket.AF_INET6:
                more.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            more.bind(name)
            more.listen(BACKLOG)
            more.setblocking(False)
    except OSError:
        for more in group[1:]:
            more.close()
        return [made]
    return group


def bind(address: Address, report: Callable[[str], None]) -> list[socket.socket]:
    """Listening sockets for an address; `localhost` gives one for IPv4 and, where the host has it, one for IPv6.

    `report` takes one sentence for the log. Raises: StartError naming the address.
    """
    if address.unix:
        return [_bind_unix(address)]
    if address.host == "localhost":
        sockets = [_bind(socket.AF_INET, "127.0.0.1", address.port, address)]
        # A port of 0 means any: both families take the same one.
        port = sockets[0].getsockname()[1]
        try:
            sockets.append(_bind(socket.AF_INET6, "::1", port, address))
        except _NoFamilyError:
            report(f"listen {address}: no IPv6 loopback here, serving 127.0.0.1 alone")
        except StartError:
            sockets[0].close()
            raise
        return sockets
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise StartError(f"listen {address}: the host cannot be resolved: {exc.strerror}") from exc
    family, name = next(((row[0], row[4][0]) for row in found if row[0] == family), (found[0][0], found[0][4][0]))
    return [_bind(family, str(name), address.port, address)]


class _NoFamilyError(StartError):
    """This host has no such addresses at all."""


def _bind(family: socket.AddressFamily, host: str, port: int, address: Address) -> socket.socket:
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise _NoFamilyError(f"listen {address}: {exc.strerror}") from exc
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as exc:
        made.close()
        kind = _NoFamilyError if exc.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) else StartError
        raise kind(f"listen {address}: {exc.strerror}") from exc
    return made


def _bind_unix(address: Address) -> socket.socket:
    """A unix socket; one that an ended process left behind is removed, one that is in use is not."""
    path = address.unix
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and not _in_use(path):
            os.unlink(path)
        made.bind(path)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as exc:
        made.close()
        raise StartError(f"listen {address}: {exc.strerror or exc}") from exc
    return made


def _in_use(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a frozen owner with a full queue would hold up the start
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def is_loopback(address: Address) -> bool:
    """Whether only this host (or pod) can reach the address."""
    if address.unix or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False  # a name may lead anywhere
