"""The connections to one primary: for arrivals, for owners, for the operator, and for its replicas' word.

No flood of arrivals delays an owner, the operator never delays a mail, and whoever waits for replicas delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, RedisError

from sidecar.config import Address
from sidecar.errors import StoreError
from sidecar.link import Link
from sidecar.reach import Reach
from sidecar.replicas import Replicas


class Line(StrEnum):
    """Whose commands go over a connection."""

    ASKING = "asking"  # arrivals
    SETTLING = "settling"  # owners renew and settle
    OPERATING = "operating"  # the operator; made when first asked for
    CONFIRMING = "confirming"  # replicas; only where they are waited for


class Node:
    """One server that takes writes, or a reason why it does not."""

    def __init__(
        self,
        reach: Reach,
        find: Callable[[], Awaitable[Address]],
        *,
        scripts: Mapping[str, str],
        replicas: int = 0,
        strict: bool = False,
    ) -> None:
        """`find`: where it is, asked for each connection anew. `scripts`: texts by name, loaded on each connection.

        `strict`: a server that does not tell its role is not used.
        """
        self.refused = ""  # why it does not take writes, of its own last word
        self._reach = reach
        self._find = find
        self._scripts = scripts
        self._strict = strict
        self._leads_to: dict[Line, Address] = {}
        self._links = {line: self._link(line) for line in (Line.ASKING, Line.SETTLING)}
        self._replicas: Replicas | None = None
        if replicas:
            self._links[Line.CONFIRMING] = self._link(Line.CONFIRMING)
            self._replicas = Replicas(self._links[Line.CONFIRMING], replicas)

    @property
    def trouble(self) -> str:
        """Empty while it serves, else one clause why not."""
        told = (link.trouble for line, link in self._links.items() if line is not Line.OPERATING)
        return next(filter(None, told), "") or self.refused

    def start(self) -> None:
        """Begin to connect; returns at once."""
        for link in self._links.values():
            link.start()

    async def close(self) -> None:
        """Drop the connections."""
        if self._replicas is not None:
            await self._replicas.close()
        for link in self._links.values():
            await link.close()

    def link(self, line: Line) -> Link:
        """The connection for these commands."""
        link = self._links.get(line)
        if link is None:
            link = self._links[line] = self._link(line)
            link.start()
        return link

    async def confirm(self, *command: bytes | str | int, deadline: float, asking: bool) -> object:
        """See `Replicas.confirm`."""
        assert self._replicas is not None
        return await self._replicas.confirm(command, deadline=deadline, asking=asking)

    def move(self, primary: Address) -> None:
        """Leave every connection that leads elsewhere."""
        for line, where in self._leads_to.items():
            if where != primary:
                self._links[line].reconnect("another server is the primary now")

    async def look(self, probe: str) -> None:
        """Whether it still answers, also where nobody asks; after a refusal, whether it takes writes again.

        `probe`: the name of a key for that.
        """
        try:
            for line, link in tuple(self._links.items()):
                if not link.trouble and not (line is Line.CONFIRMING and self._replicas and self._replicas.busy):
                    await link.call("PING")
            if self.refused:
                reply = await self._links[Line.SETTLING].call("SET", probe, "1", "PX", 1000)
                self.refused = "" if not isinstance(reply, RedisError) else self.refused
        except StoreError:
            pass  # the link says why, and comes back by itself

    # Making a connection, and making it ready.

    def _link(self, line: Line) -> Link:
        async def connect() -> AbstractConnection:
            where = await self._find()
            self._leads_to[line] = where
            return await self._reach.server(where)

        return Link(connect, timeout_s=self._reach.timeout_s, ready=self._ready)

    async def _ready(self, link: Link) -> None:
        pong, role, *loaded = await asyncio.gather(
            link.call("PING", now=True),
            link.call("ROLE", now=True),
            *(link.call("SCRIPT", "LOAD", text, now=True) for text in self._scripts.values()),
        )
        if isinstance(pong, RedisError):
            raise StoreError(str(pong), applied=False)
        if not isinstance(role, RedisError):
            if role[0] != b"master":
                raise StoreError("READONLY: the server is a replica", applied=False)
        elif self._strict:
            raise StoreError(f"ROLE: {role}", applied=False)
        for name, reply in zip(self._scripts, loaded, strict=True):
            # Without the right to load, EVAL alone may still be allowed: the check at start finds out.
            if isinstance(reply, RedisError) and not isinstance(reply, NoPermissionError):
                raise StoreError(f"script {name}: {reply}", applied=False)
