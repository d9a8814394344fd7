"""Opens connections to one origin: every address, TLS with verification, within one time limit.

Everything that fails here is *not sent*, with the reason in the words of RFC 9209 section 2.3.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress

from aiohappyeyeballs import AddrInfoType, start_connection

from sidecar.config import Origin
from sidecar.connection import Connection
from sidecar.errors import NotSentError
from sidecar.pool import Pool
from sidecar.resolve import Resolver
from sidecar.tls import Tls, client_context

# RFC 8305 section 5: how long the first address is waited for before the next is tried beside it.
ATTEMPT_DELAY_S = 0.25

REASONS = {
    errno.ECONNREFUSED: "connection_refused",
    errno.ETIMEDOUT: "connection_timeout",
    errno.ECONNRESET: "connection_terminated",
    errno.ECONNABORTED: "connection_terminated",
    errno.EPIPE: "connection_terminated",
    errno.ENETUNREACH: "destination_ip_unroutable",
    errno.EHOSTUNREACH: "destination_ip_unroutable",
    errno.ENETDOWN: "destination_ip_unroutable",
    errno.EHOSTDOWN: "destination_ip_unroutable",
    errno.EADDRNOTAVAIL: "destination_ip_unroutable",
    errno.EAFNOSUPPORT: "destination_ip_unroutable",
    # No descriptor left: our own fault, and not to be looked for at the provider.
    errno.EMFILE: "proxy_internal_error",
    errno.ENFILE: "proxy_internal_error",
}


class Dialer:
    """Opens connections to one origin and hands them to one pool."""

    def __init__(self, origin: Origin, *, ca: str, resolver: Resolver, pool: Pool) -> None:
        """`ca`: file of the authorities to trust instead of the system's, or empty.

        Raises: OSError where `ca` cannot be read as certificates.
        """
        self._host = origin.host
        self._port = origin.port
        self._tls = client_context(ca) if origin.scheme == "https" else None
        # RFC 6066 section 3: the name in SNI has no trailing dot.
        self._server_name = origin.host.rstrip(".")
        self._resolver = resolver
        self._pool = pool

    async def open(self, deadline: float) -> Connection:
        """A new connection, nothing written on it, and fit for it until the next loop turn.

        `deadline`: loop time; names, TCP and TLS together have until then.

        Raises: NotSentError.
        """
        reason = "dns_timeout"
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._resolver.resolve(self._host, self._port)
                reason = "connection_timeout"
                return await self._connect(addresses, deadline)
        except TimeoutError as exc:
            raise NotSentError(reason) from exc
        except UnicodeError as exc:  # a host no name can have, such as a label above 63 characters
            raise NotSentError("dns_error") from exc
        except (OSError, RuntimeError) as exc:  # uvloop raises RuntimeError for some failed sockets
            raise NotSentError(_reason(exc)) from exc

    async def _connect(self, addresses: Sequence[AddrInfoType], deadline: float) -> Connection:
        """Try all addresses; where one accepts, and hangs up or fails in TLS, go on with the others."""
        untried = list(addresses)
        failed: Exception | None = None
        while untried:
            tried: dict[socket.socket, AddrInfoType] = {}
            try:
                sock = await start_connection(
                    untried,
                    happy_eyeballs_delay=ATTEMPT_DELAY_S,
                    interleave=1,
                    socket_factory=functools.partial(_socket, tried),
                )
            except (OSError, RuntimeError) as exc:
                if failed is None:
                    raise
                raise failed from exc  # a failed handshake tells more than an address that refuses
            untried.remove(tried[sock])
            try:
                return await self._secure(sock, deadline, others=len(untried))
            except OSError as exc:
                failed = exc
        raise failed or OSError(errno.EHOSTUNREACH, "no address")

    async def _secure(self, sock: socket.socket, deadline: float, *, others: int) -> Connection:
        """Make a connection of a connected socket, under TLS if the origin asks for it."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = None if self._tls is None else Tls(self._tls, self._server_name)
        try:
            _, connection = await loop.create_connection(lambda: Connection(self._pool, sock, tls), sock=sock)
        except BaseException:
            sock.close()
            raise
        if connection.gone:
            # Reset within the first loop turns: uvloop 0.23 has closed the descriptor and takes hold of the socket
            # only now. Left alone, the socket's end would close the same number again, somebody else's by then.
            sock.detach()
        try:
            # An address that accepts and then says nothing has its share of the time, not all of it.
            async with asyncio.timeout((deadline - loop.time()) / (others + 1)):
                await connection.ready()
            if not connection.fit_when_new():
                raise ConnectionResetError
        except BaseException:
            connection.close()
            raise
        return connection


def _socket(tried: dict[socket.socket, AddrInfoType], address: AddrInfoType) -> socket.socket:
    """A socket for `address`, noted in `tried`: once it is reset, it no longer knows its peer itself."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    tried[sock] = address
    return sock


def _reason(exc: Exception) -> str:
    match exc:
        case ssl.SSLCertVerificationError():
            return "tls_certificate_error"
        case ssl.SSLError():
            return "tls_protocol_error"
        case socket.gaierror():
            return "dns_error"
        case OSError(errno=int(number)):
            return REASONS.get(number, "destination_unavailable")
        case ConnectionError():  # the loop's own, without a number: closed before we wrote anything
            return "connection_terminated"
        case _:  # several addresses, each with a failure of its own
            return "destination_unavailable"
