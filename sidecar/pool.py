"""The connections of one upstream: which are idle and fit for the next request, and which are open at all.

Knows when a connection is too old to be used; whether it still stands, the connection tells.
"""

from __future__ import annotations

import asyncio

from sidecar.connection import Connection


class Pool:
    """The connections of one upstream: which ones are idle, which are open at all."""

    def __init__(self, *, keepalive_s: float) -> None:
        """`keepalive_s`: how long a connection may be idle; 0 keeps none."""
        self.keepalive_s = keepalive_s
        self._idle: list[Connection] = []  # the one used last is the last: those no longer needed grow old
        self._open: set[Connection] = set()
        self._closed = False
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    def opened(self, connection: Connection) -> None:
        """A connection has been opened; it is counted until it is lost."""
        self._open.add(connection)

    def take(self, now: float) -> Connection | None:
        """An idle connection that is fit at `now` (loop time), or None; unfit ones are closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.fit(now):
                return connection
            connection.close()
        return None

    def give(self, connection: Connection, now: float) -> None:
        """Take `connection` back for the next request, as long as it stays fit."""
        if self._closed or self.keepalive_s <= 0:
            connection.close()
            return
        self._idle.append(connection)
        if self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_at(now + self.keepalive_s, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what has been idle for too long; again after a while, as long as anything is idle."""
        now = loop.time()
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.fit(now):
                self._idle.append(connection)
            else:
                connection.close()
        self._sweeper = None
        if self._idle:
            soonest = min(connection.idle_until for connection in self._idle)
            self._sweeper = loop.call_at(soonest, self._sweep, loop)

    def lost(self, connection: Connection) -> None:
        """A connection is gone, idle or not."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._emptied is not None and not self._open and not self._emptied.done():
            self._emptied.set_result(None)

    async def close(self) -> None:
        """Close the idle ones, keep none from now on, and wait for those in use; cancelled: end these at once."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if not self._open:
            return
        self._emptied = asyncio.get_running_loop().create_future()
        try:
            await self._emptied
        except asyncio.CancelledError:
            for connection in tuple(self._open):
                connection.drop()
            raise
        finally:
            self._emptied = None
