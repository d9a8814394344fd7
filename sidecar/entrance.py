"""The data plane's way in at one address: lets clients in, and stops without turning away who has connected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Set

from aiohttp import web

from sidecar.listeners import BACKLOG, Place
from sidecar.server import Server


class Entrance:
    """The sockets of one place, with the server behind them.

    A socket may be another worker's too: only those of the slots that were asked for are served, and closing ours
    closes none of theirs.
    """

    def __init__(self, server: Server, place: Place) -> None:
        """Serves nobody yet."""
        self._server = server
        self._runner = web.ServerRunner(server)
        self._sockets = [
            (slot if len(family) > 1 else None, one) for family in place.sockets for slot, one in enumerate(family)
        ]
        self._sites: dict[socket.socket, web.SockSite] = {}
        self._closed = False
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        """Make the server ready."""
        await self._runner.setup()

    async def accept(self, slots: Set[int]) -> None:
        """Let in the clients of these slots, and no more those of others; a socket that all share is in every slot."""
        async with self._changing:
            if not self._closed:
                await self._accept(slots)

    async def _accept(self, slots: Set[int]) -> None:
        for slot, one in self._sockets:
            wanted = slot is None or slot in slots
            if wanted and one not in self._sites:
                # A duplicate, so that ours stands when the site closes its own.
                site = self._sites[one] = web.SockSite(self._runner, one.dup(), backlog=BACKLOG)
                await site.start()
            elif not wanted and one in self._sites:
                await self._sites.pop(one).stop()

    async def close(self) -> None:
        """Listen no more; who has connected by now is let in, where a plain close would reset him."""
        async with self._changing:
            self._closed = True
            while self._sites:
                await self._sites.popitem()[1].stop()
        for _, one in self._sockets:
            await self._let_in(one)
            one.close()
        self._sockets.clear()

    async def _let_in(self, last: socket.socket) -> None:
        """Whoever stands in the queue of a socket, in other workers' queues too: the last to close lets in the last."""
        loop = asyncio.get_running_loop()
        for _ in range(BACKLOG):
            try:
                connected, _ = last.accept()
            except OSError:
                return
            connected.setblocking(False)
            await loop.connect_accepted_socket(self._server, connected)

    async def cleanup(self) -> None:
        """Drop everything."""
        await self._runner.cleanup()
        for _, one in self._sockets:
            one.close()
