"""The sockets a listener needs: one per address family, or a unix socket. Binds; serves nothing."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Callable

from sidecar.config import Address
from sidecar.errors import StartError

BACKLOG = 1024


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
