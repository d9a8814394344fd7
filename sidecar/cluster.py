"""The primaries of a cluster: the map of who serves which tag, and where a command goes while it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, TryAgainError

from sidecar.config import Address
from sidecar.errors import StoreError
from sidecar.link import Argument, Reply, unheeded
from sidecar.node import Line, Node
from sidecar.nodes import LEAST_S, LOOK_S, Answered, Nodes
from sidecar.reach import TAG_SLOTS, TAGS, Cluster, Reach, named

# The map is asked for when something is wrong with it, never more often than this; and now and then in any case.
PAUSE_S = 0.05
CALM_S = 5.0
# How long after TRYAGAIN and CLUSTERDOWN a command is tried again: as long as a small move of a slot lasts.
AGAIN_S = 0.02
# A node that is in the map no more, and was not asked for so long, is let go.
KEPT_S = 10.0


class ClusterNodes(Nodes):
    """A cluster. Each tag's record and lists lie in one slot, so a script never needs more than one node."""

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
        self._reach = reach
        self._scripts = scripts
        self._replicas = replicas
        self._cluster = Cluster(reach)
        self._map: dict[str, Address] = {}
        self._fault = "the cluster was not asked for its map yet"
        self._nodes: dict[Address, Node] = {}
        self._used_at: dict[Address, float] = {}
        self._wanted = asyncio.Event()
        self._asked = asyncio.Event()

    @property
    def trouble(self) -> str:
        """See `Nodes`."""
        if not self._map:
            return self._fault
        missing = next((tag for tag in TAGS if tag not in self._map), None)
        if missing is not None:
            return _uncovered(missing)
        return next((f"{name}: {node.trouble}" for name, node in self.primaries() if node.trouble), "")

    def primaries(self) -> Sequence[tuple[str, Node]]:
        """See `Nodes`."""
        return [(str(where), self._nodes[where]) for where in dict.fromkeys(self._map.values())]

    def start(self) -> None:
        """See `Nodes`."""
        self._hold(self._keep_map())
        super().start()

    async def close(self) -> None:
        """See `Nodes`."""
        await super().close()
        await asyncio.gather(*(node.close() for node in self._nodes.values()))
        await self._cluster.close()

    # The map.

    async def _keep_map(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            try:
                self._take(await self._cluster.owners(list(self._nodes)))
            except StoreError as exc:
                self._fault = exc.reason
            asked, self._asked = self._asked, asyncio.Event()
            asked.set()
            for where in self._left_behind(loop.time()):
                del self._used_at[where]
                await self._nodes.pop(where).close()
            await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(LOOK_S if self.trouble else CALM_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def _take(self, owners: dict[str, Address]) -> None:
        self._map = owners
        for where in owners.values():
            self._node(where)

    def _node(self, where: Address) -> Node:
        """The node at an address, known or new."""
        self._used_at[where] = asyncio.get_running_loop().time()
        node = self._nodes.get(where)
        if node is None:

            async def here() -> Address:
                return where

            node = Node(self._reach, here, scripts=self._scripts, replicas=self._replicas)
            self._nodes[where] = node
            node.start()
        return node

    def _left_behind(self, now: float) -> list[Address]:
        mapped = set(self._map.values())
        return [where for where, at in self._used_at.items() if where not in mapped and now - at > KEPT_S]

    async def _owner(self, tag: str, deadline: float) -> Node:
        """Who serves a tag. Raises: StoreError where nobody is known to, in time."""
        while (where := self._map.get(tag)) is None:
            self._wanted.set()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._asked.wait()
            except TimeoutError:
                raise StoreError(_uncovered(tag) if self._map else self._fault, applied=False) from None
        return self._node(where)

    # Where a command goes.

    async def call(self, line: Line, tag: str, deadline: float, *command: Argument) -> Answered:
        """See `Nodes`."""
        loop = asyncio.get_running_loop()
        doubtful = False
        told: Node | None = None  # where an ASK sends this command, once
        while True:
            try:
                node = told or await self._owner(tag, deadline)
                link = node.link(line)
                left_s = deadline - loop.time()
                if told is not None:
                    # Right before the command, in the same write: it holds for the next one alone.
                    unheeded(link.call("ASKING", timeout_s=left_s))
                reply = await link.call(*command, timeout_s=left_s)
            except StoreError as exc:
                self._wanted.set()
                doubtful = doubtful or exc.applied is None
                if exc.applied is None and deadline - loop.time() > LEAST_S:
                    told = None
                    continue
                raise StoreError(exc.reason, applied=None if doubtful else False) from exc
            if not isinstance(reply, RedisError) or deadline - loop.time() < AGAIN_S:
                return Answered(reply, node, link, told is not None, doubtful)
            again, told = await self._redirected(tag, node, told, reply)
            if not again:
                return Answered(reply, node, link, doubtful=doubtful)

    async def _redirected(self, tag: str, node: Node, told: Node | None, reply: Reply) -> tuple[bool, Node | None]:
        """Whether an error reply means "elsewhere" or "later", and whom to ask once where it was an ASK."""
        if isinstance(reply, AskError):  # MOVED too is one
            where = named(reply.host, reply.port, self._address(node))
            if not isinstance(reply, MovedError):
                return True, self._node(where)
            self._wanted.set()
            if self._map.get(tag) == where:
                await asyncio.sleep(AGAIN_S)  # two nodes send us to and fro
            self._map[tag] = where
            self._node(where)
            return True, None
        if isinstance(reply, TryAgainError | ClusterDownError):
            self._wanted.set()
            await asyncio.sleep(AGAIN_S)
            return True, told if isinstance(reply, TryAgainError) else None
        return False, None

    def _address(self, node: Node) -> Address:
        return next(where for where, known in self._nodes.items() if known is node)

    async def _look_once(self) -> None:
        tags = {where: tag for tag, where in self._map.items()}
        await asyncio.gather(*(self._nodes[where].look(self._probe(tag)) for where, tag in tags.items()))


def _uncovered(tag: str) -> str:
    return f"CLUSTERDOWN: no node serves slot {TAG_SLOTS[tag]}"
