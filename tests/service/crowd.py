"""Many connections at once: opened, held, and what others feel meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import Client, scaled
from pair import Pair, post

AT_ONCE = 100


@contextlib.asynccontextmanager
async def connected(
    pair: Pair, count: int, first: Callable[[int], bytes] = lambda _: b""
) -> AsyncIterator[list[Client]]:
    """`count` connections, on each of which `first(number)` was written; all left at the end."""
    clients: list[Client] = []
    try:
        while len(clients) < count:
            more = min(AT_ONCE, count - len(clients))
            opened = await asyncio.gather(*(pair.client() for _ in range(more)))
            for number, client in enumerate(opened, len(clients)):
                client.writer.write(first(number))
            clients += opened
        yield clients
    finally:
        for client in clients:
            client.writer.transport.abort()


async def each(count: int, work: Callable[[int], Awaitable[None]], workers: int) -> None:
    """`work` for the numbers below `count`, by so many workers at once. Raises: the first failure as it is."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


@dataclass(slots=True)
class Felt:
    """How long ordinary sends took, in seconds."""

    took_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.took_s)

    @property
    def longest_s(self) -> float:
        return max(self.took_s)

    def quick(self, *, median_s: float, longest_s: float) -> None:
        """Assert both, scaled."""
        assert self.median_s < scaled(median_s), (self.median_s, self.longest_s)
        assert self.longest_s < scaled(longest_s), (self.median_s, self.longest_s)


async def ordinary(pair: Pair, name: str, count: int) -> Felt:
    """So many ordinary sends, one after the other, each on a connection of its own; all must be answered 200."""
    felt = Felt()
    for number in range(count):
        begin_s = time.monotonic()
        got = await pair.ask(post(f"{name} {number}"))
        felt.took_s.append(time.monotonic() - begin_s)
        assert (got.status, got.replayed) == (200, False)
    return felt


@contextlib.asynccontextmanager
async def meanwhile(pair: Pair, name: str) -> AsyncIterator[Felt]:
    """Ordinary sends, one after the other, for as long as the block runs; all must be answered 200."""
    felt = Felt()
    over = False

    async def go_on() -> None:
        while not over:
            felt.took_s += (await ordinary(pair, f"{name} {len(felt.took_s)}", 1)).took_s

    going = asyncio.create_task(go_on())
    try:
        yield felt
    finally:
        over = True
        await going


def descriptors(pid: int) -> int:
    """How many files and sockets a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
