"""Has replicas confirm what was written: one WAIT for all that came while the one before it ran.

A command is written once more over a connection of this purpose alone, with a WAIT behind it. A primary's replicas get
its writes in order, so who holds the repeat holds what it repeats; a primary that was replaced and does not know it yet
has none. Arrivals that need no replica's word, and owners, are on other connections and wait for nothing of this.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from redis.exceptions import RedisError

from sidecar.errors import StoreError
from sidecar.link import Argument, Link, Reply, unheeded

# The part of the time left that the server may wait; the rest is for the way there and back.
SERVERS_PART = 0.9
# How much longer than its callers the connection waits: a WAIT in vain that comes back late ends no connection.
GRACE_S = 0.25
# Less is not worth asking for.
LEAST_S = 0.005


@dataclass(slots=True)
class _Wanted:
    command: tuple[Argument, ...]
    asking: bool
    deadline: float
    reply: asyncio.Future[Reply]


class Replicas:
    """The word of `count` replicas of one primary."""

    def __init__(self, link: Link, count: int) -> None:
        """`link`: a connection for nothing else."""
        self._link = link
        self._count = count
        self._wanted: list[_Wanted] = []
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ask no more; whoever waits gets StoreError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(self._wanted, "the sidecar closes")

    @property
    def busy(self) -> bool:
        """Whether a WAIT runs: nothing that follows it on its connection is answered before it ends."""
        return self._task is not None and not self._task.done()

    async def confirm(self, command: tuple[Argument, ...], *, deadline: float, asking: bool = False) -> Reply:
        """Repeat a command that recognises its own effect; its reply, once enough replicas hold what it wrote.

        `deadline`: of the loop's clock. `asking`: as an ASK of a cluster has it.

        Raises: StoreError with `applied` None: what was repeated stands on the primary, perhaps there alone.
        """
        loop = asyncio.get_running_loop()
        wanted = _Wanted(command, asking, deadline, loop.create_future())
        self._wanted.append(wanted)
        if not self.busy:
            self._task = loop.create_task(self._run())
        try:
            async with asyncio.timeout_at(deadline):
                return await wanted.reply
        except TimeoutError:
            raise StoreError(self._link.trouble or self._too_few(), applied=None) from None

    def _too_few(self) -> str:
        return f"fewer than {self._count} replicas confirm what is written (store.replicas)"

    async def _run(self) -> None:
        """One WAIT after another, until nobody wants one."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # all of this turn of the loop
        while self._wanted:
            now = loop.time()
            batch = [one for one in self._wanted if not one.reply.done() and one.deadline - now > LEAST_S]
            self._wanted = []
            if batch:
                await self._wait(batch, max(one.deadline for one in batch) - now)

    async def _wait(self, batch: list[_Wanted], left_s: float) -> None:
        replies = [self._repeat(one, left_s) for one in batch]
        try:
            # All of it leaves in one write, so WAIT speaks of just these: on another connection it would say nothing.
            wait_ms = round(left_s * SERVERS_PART * 1000)
            held = await self._link.call("WAIT", self._count, wait_ms, timeout_s=left_s + GRACE_S)
            got = await asyncio.gather(*replies)
        except StoreError:
            # The connection was lost, and with it what this WAIT spoke of. While there is time: again on the next one.
            self._wanted[:0] = batch
            return None
        except asyncio.CancelledError:
            self._fail(batch, "the sidecar closes")
            raise
        if isinstance(held, RedisError):
            return self._fail(batch, f"WAIT: {held}")
        if held < self._count:
            return self._fail(batch, self._too_few())
        for one, reply in zip(batch, got, strict=True):
            if not one.reply.done():
                one.reply.set_result(reply)
        return None

    def _repeat(self, one: _Wanted, left_s: float) -> asyncio.Future[Reply]:
        if one.asking:
            unheeded(self._link.call("ASKING", timeout_s=left_s + GRACE_S))
        reply = self._link.call(*one.command, timeout_s=left_s + GRACE_S)
        unheeded(reply)
        return reply

    @staticmethod
    def _fail(batch: list[_Wanted], reason: str) -> None:
        for one in batch:
            if not one.reply.done():
                one.reply.set_exception(StoreError(reason, applied=None))
