"""The servers of a store, and which of them serves which record: one, or the primaries of a cluster."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.address import Kind
from sidecar.config import Address
from sidecar.errors import StoreError
from sidecar.link import Argument, Link, Reply
from sidecar.node import Line, Node
from sidecar.reach import TAGS, Reach, Sentinels

# How often the servers are looked at, so that /readyz knows of a silent or full one that nobody asks.
LOOK_S = 1.0
# With less time left than this a command is not repeated.
LEAST_S = 0.005


@dataclass(slots=True)  # not frozen: one is made for each command
class Answered:
    """A reply, error replies included, and who gave it.

    `asking`: by a redirection for this one command. `doubtful`: an earlier writing of the same command got no reply, so
    it may have been applied, or may yet be.
    """

    reply: Reply
    node: Node
    link: Link
    asking: bool = False
    doubtful: bool = False


class Nodes(ABC):
    """What a store's servers have in common, however many they are."""

    def __init__(self, *, probe: Callable[[str], str], report: Callable[[str], None]) -> None:
        """`probe`: the name of a key to try a write with, by tag. `report` takes one sentence for the log."""
        self._probe = probe
        self._report = report
        self._tasks: list[asyncio.Task[None]] = []

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Empty while all records are served, else one clause why not."""

    @abstractmethod
    def primaries(self) -> Sequence[tuple[str, Node]]:
        """Every server that takes writes now, and its name for people (empty where it is the only one)."""

    @abstractmethod
    async def call(self, line: Line, tag: str, deadline: float, *command: Argument) -> Answered:
        """One command about what has this tag, repeated on a new connection or elsewhere while there is time.

        `deadline`: of the loop's clock. Every script recognises its own effect, so repeating is safe.

        Raises: StoreError; with `applied` None where a writing of it may have been, or may yet be, applied.
        """

    def start(self) -> None:
        """Begin to connect; the servers may still be away."""
        self._hold(self._look())

    async def close(self) -> None:
        """Drop the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _look(self) -> None:
        told = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_once()
            except Exception as exc:  # noqa: BLE001 - who looks after the store must not end at one odd look
                self._report(f"could not be looked at: {type(exc).__name__}")
            trouble = self.trouble
            if bool(trouble) != bool(told):
                self._report(f"away: {trouble}" if trouble else "serves again")
            told = trouble

    async def _look_once(self) -> None:
        await asyncio.gather(*(node.look(self._probe(TAGS[0])) for _, node in self.primaries()))


class OneNode(Nodes):
    """One primary: a server of its own, or the one that sentinels name."""

    def __init__(
        self,
        reach: Reach,
        *,
        scripts: Mapping[str, str],
        replicas: int,
        probe: Callable[[str], str],
        report: Callable[[str], None],
    ) -> None:
        """See `Node` and `Nodes`."""
        super().__init__(probe=probe, report=report)
        self._sentinels = Sentinels(reach) if reach.address.kind is Kind.SENTINEL else None
        self._where = reach.address.hosts[0]
        self._node = Node(reach, self._find, scripts=scripts, replicas=replicas, strict=self._sentinels is not None)

    async def _find(self) -> Address:
        return self._where if self._sentinels is None else await self._sentinels.primary()

    @property
    def trouble(self) -> str:
        """See `Nodes`."""
        return self._node.trouble

    def primaries(self) -> Sequence[tuple[str, Node]]:
        """See `Nodes`."""
        return (("", self._node),)

    def start(self) -> None:
        """See `Nodes`."""
        self._node.start()
        super().start()

    async def close(self) -> None:
        """See `Nodes`."""
        await super().close()
        await self._node.close()
        if self._sentinels is not None:
            await self._sentinels.close()

    async def call(self, line: Line, tag: str, deadline: float, *command: Argument) -> Answered:  # noqa: ARG002
        """See `Nodes`."""
        loop = asyncio.get_running_loop()
        node = self._node
        link = node.link(line)
        doubtful = False
        while True:
            try:
                reply = await link.call(*command, timeout_s=deadline - loop.time())
            except StoreError as exc:
                doubtful = doubtful or exc.applied is None
                if exc.applied is None and deadline - loop.time() > LEAST_S:
                    continue
                raise StoreError(exc.reason, applied=None if doubtful else False) from exc
            return Answered(reply, node, link, doubtful=doubtful)

    async def _look_once(self) -> None:
        await super()._look_once()
        if self._sentinels is None:
            return
        try:
            # A primary that was replaced while it slept goes on answering until somebody tells it.
            self._node.move(await self._sentinels.primary())
        except StoreError:
            pass  # nothing better is known
