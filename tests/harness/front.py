"""A front before the store that can hold, delay, lose or cut what passes, in the loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field
from typing import Self

from harness.server import RedisServer
from harness.waiting import free_port, scaled

PIECE_BYTES = 65536


@dataclass(eq=False, slots=True)
class _Pair:
    """One client's connection and ours to the server. `losing`: the next reply ends it instead of passing."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    far_reader: asyncio.StreamReader
    far_writer: asyncio.StreamWriter
    losing: bool = False
    replied_bytes: int = 0

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        if sock is not None and not self.writer.is_closing():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        self.far_writer.transport.abort()


@dataclass(slots=True)
class StoreProxy:
    """TCP to a `RedisServer`. Every switch may be changed at any time and holds for standing connections too.

    `delay_s`: before each piece of a reply passes (scaled). `drop_replies`: commands are applied, replies vanish.
    `black_hole`: commands vanish too; the connection stands. `cut_after_bytes`: a connection is reset once so many
    bytes of replies have passed. `connections`: how many were accepted. `commands`: bytes the clients wrote.
    """

    server: RedisServer
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    delay_s: float = 0.0
    drop_replies: bool = False
    black_hole: bool = False
    cut_after_bytes: int | None = None
    connections: int = 0
    commands: bytearray = field(default_factory=bytearray)
    lost: int = 0
    _patterns: list[bytes] = field(default_factory=list)
    _open: dict[_Pair, set[asyncio.Task[None]]] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def start(cls, server: RedisServer) -> Self:
        """Listen on a free port."""
        proxy = cls(server)
        proxy._flowing.set()
        await proxy.accept()
        return proxy

    @property
    def url(self) -> str:
        """For `store.url`."""
        return f"redis://{self.host}:{self.port}/0"

    def lose_reply(self, pattern: bytes, times: int = 1) -> None:
        """The next `times` commands that contain `pattern` are applied, and their reply is a reset instead.

        `lost` counts how often that happened.
        """
        self._patterns.extend([pattern] * times)

    def freeze(self) -> None:
        """Hold everything in both directions; `thaw` delivers it."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Deliver what was held, and go on."""
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection that stands."""
        for pair in list(self._open):
            pair.reset()

    async def refuse(self) -> None:
        """Close the port and reset every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def accept(self) -> None:
        """Listen (again) on the same port."""
        self._server = await asyncio.start_server(self._connected, self.host, self.port, backlog=1024)

    async def stop(self) -> None:
        """Close everything. May be called twice."""
        await self.refuse()
        self.thaw()
        tasks = [task for group in self._open.values() for task in group]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far = await asyncio.open_connection(self.server.host, self.server.port)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(reader, writer, *far)
        ways = {asyncio.create_task(self._there(pair)), asyncio.create_task(self._back(pair))}
        self._open[pair] = ways
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            del self._open[pair]
            writer.close()
            far[1].close()

    async def _there(self, pair: _Pair) -> None:
        while piece := await pair.reader.read(PIECE_BYTES):
            await self._flowing.wait()
            self.commands += piece
            found = next((pattern for pattern in self._patterns if pattern in piece), None)
            if found is not None:
                self._patterns.remove(found)
                pair.losing = True
            if not self.black_hole:
                pair.far_writer.write(piece)
                await pair.far_writer.drain()

    async def _back(self, pair: _Pair) -> None:
        while piece := await pair.far_reader.read(PIECE_BYTES):
            if self.delay_s:
                await asyncio.sleep(scaled(self.delay_s))
            await self._flowing.wait()
            if pair.losing:
                self.lost += 1
                pair.reset()
                return
            if self.drop_replies or self.black_hole:
                continue
            if self.cut_after_bytes is not None:
                piece = piece[: max(0, self.cut_after_bytes - pair.replied_bytes)]
            pair.replied_bytes += len(piece)
            pair.writer.write(piece)
            await pair.writer.drain()
            if self.cut_after_bytes is not None and pair.replied_bytes >= self.cut_after_bytes:
                pair.writer.close()
                return
