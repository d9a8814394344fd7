"""Addresses of an upstream's name: kept for seconds only, and never asked for twice at a time.

Knows nothing of connections. How long a connection may live on an address is decided in `connection.py`;
both bounds together make a name be resolved again within a minute.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohappyeyeballs import AddrInfoType

Lookup = Callable[[str, int], Awaitable[Sequence[AddrInfoType]]]

# Providers fail over by DNS with times-to-live of 60 s and less; getaddrinfo does not tell them.
KEEP_S = 15.0


async def system_lookup(host: str, port: int) -> Sequence[AddrInfoType]:
    """Ask the system's resolver, outside the loop's thread.

    Raises: OSError (`socket.gaierror`) where the name has no address.
    """
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class Resolver:
    """Names to addresses, for one event loop; several upstreams may share one."""

    def __init__(self, lookup: Lookup = system_lookup, *, keep_s: float = KEEP_S) -> None:
        """`lookup`: how a name is asked for; `keep_s`: how long its addresses are used, from the asking."""
        self._lookup = lookup
        self._keep_s = keep_s
        self._known: dict[tuple[str, int], tuple[float, Sequence[AddrInfoType]]] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[Sequence[AddrInfoType]]] = {}

    async def resolve(self, host: str, port: int) -> Sequence[AddrInfoType]:
        """All addresses of `host`, at least one, in the system's order of preference.

        A caller that is cancelled does not disturb the others that wait for the same name.

        Raises: OSError or UnicodeError where there is no address.
        """
        loop = asyncio.get_running_loop()
        name = (host, port)
        until, addresses = self._known.get(name, (0.0, ()))
        if loop.time() < until:
            return addresses
        asking = self._asking.get(name)
        if asking is None:
            asking = loop.create_task(self._ask(name, loop.time() + self._keep_s))
            self._asking[name] = asking
            asking.add_done_callback(lambda task: self._asked(name, task))
        return await asyncio.shield(asking)

    async def _ask(self, name: tuple[str, int], until: float) -> Sequence[AddrInfoType]:
        host, port = name
        addresses = _literal(host, port) or await self._lookup(host, port)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        self._known[name] = (until, addresses)
        return addresses

    def _asked(self, name: tuple[str, int], task: asyncio.Task[Sequence[AddrInfoType]]) -> None:
        del self._asking[name]
        if not task.cancelled():
            task.exception()  # every waiter may have left; an error nobody reads is logged as a fault


def _literal(host: str, port: int) -> Sequence[AddrInfoType]:
    """The address that `host` itself is; nothing where it is a name. Needs no resolver and no thread."""
    try:
        return socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError):
        return ()
