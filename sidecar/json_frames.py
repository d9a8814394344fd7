"""The open containers of a JSON text: what they hold of their values, and the encoding they end as."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from typing import ClassVar

from sidecar.framing import IrregularError, opened, seal

# Members sorted in one step (a fifth of a millisecond); larger objects are merged from sorted runs.
RUN = 512
_BATCH = 300
_PARTS = 256


class Node:
    """One step of the JSON pointers (RFC 6901) that are ignored or watched."""

    __slots__ = ("children", "ignored", "watched")

    def __init__(self) -> None:
        self.children: dict[bytes, Node] = {}
        self.ignored = False
        self.watched = ""

    def at(self, pointer: str) -> Node:
        """The node for `pointer`, which begins with `/`; made where there is none."""
        node = self
        for token in pointer[1:].split("/"):
            # RFC 6901 section 4: first ~1, then ~0, so that ~01 is ~1.
            name = token.replace("~1", "/").replace("~0", "~").encode("utf-8", "surrogatepass")
            node = node.children.setdefault(seal(b"s", name), Node())
        return node


class OpenArray:
    """An open array, or the place the whole text goes to. `pending`: the node of the value being read."""

    __slots__ = ("_hash", "_index", "_node", "_parts", "pending")
    closer = "]"
    runs: ClassVar[list[list[bytes]]] = []

    def __init__(self, node: Node | None) -> None:
        self.pending: Node | None = None
        self._node = node
        self._index = 0
        self._parts: list[bytes] = []
        self._hash: hashlib._Hash | None = None

    def begin(self, _name: bytes) -> None:
        """A further element follows."""
        if self._node is not None:
            self.pending = self._node.children.get(seal(b"s", b"%d" % self._index))
            self._index += 1

    def put(self, sealed: bytes) -> bool:
        """Append the element's encoding. Never asks for `spill`."""
        self._parts.append(sealed)
        if len(self._parts) == _PARTS:
            self._flush()
        return False

    def drop(self) -> None:
        """An ignored element counts as absent."""

    def spill(self) -> None:
        """Nothing gathers here."""

    def _flush(self) -> hashlib._Hash:
        if self._hash is None:
            self._hash = hashlib.sha256()
        self._hash.update(b"".join(self._parts))
        self._parts.clear()
        return self._hash

    def seal(self) -> bytes:
        """The array's encoding."""
        # What was flushed once is longer than INLINE_BYTES, so this is what `seal` gives for the whole.
        if self._hash is None:
            return seal(b"a", b"".join(self._parts))
        return b"A" + self._flush().digest()

    def merged(self) -> Iterator[bytes]:
        """The array's encoding, in one go."""
        yield self.seal()


class OpenObject:
    """An open object: its members, and sorted runs of earlier ones where there are many (`runs`)."""

    __slots__ = ("_dropped", "_members", "_name", "_node", "pending", "runs")
    closer = "}"

    def __init__(self, node: Node | None) -> None:
        self.pending: Node | None = None
        self.runs: list[list[bytes]] = []
        self._node = node
        self._members: dict[bytes, bytes] = {}
        self._dropped: frozenset[bytes] = frozenset()
        self._name = b""

    def begin(self, name: bytes) -> None:
        """The sealed `name` of the member that follows.

        Raises: IrregularError where an earlier one is known to have that name; `merged` finds the rest.
        """
        if name in self._members or name in self._dropped:
            raise IrregularError
        self._name = name
        if self._node is not None:
            self.pending = self._node.children.get(name)

    def put(self, sealed: bytes) -> bool:
        """Keep the encoding of the member begun. True: `spill` is due."""
        self._members[self._name] = sealed
        return len(self._members) == RUN

    def drop(self) -> None:
        """An ignored member counts as absent, but its name may not come again."""
        self._dropped |= {self._name}

    def spill(self) -> None:
        """Sort what has gathered, downwards, so that a merge can free it from the end."""
        self.runs.append(sorted([name + value for name, value in self._members.items()], reverse=True))
        self._members = {}

    def seal(self) -> bytes:
        """The encoding of an object that never spilled."""
        return seal(b"o", b"".join(sorted([name + value for name, value in self._members.items()])))

    def merged(self) -> Iterator[bytes]:
        """The encoding of one that did, after an empty value for every batch of members merged.

        Raises: IrregularError where two members have one name.
        """
        self.spill()
        digest = hashlib.sha256()
        batch: list[bytes] = []
        earlier = b""
        for member in heapq.merge(*map(_drained, self.runs)):
            name = member[: opened(member)]
            if name == earlier:
                raise IrregularError
            earlier = name
            batch.append(member)
            if len(batch) == _BATCH:
                digest.update(b"".join(batch))
                batch.clear()
                yield b""
        digest.update(b"".join(batch))
        yield b"O" + digest.digest()


def _drained(run: list[bytes]) -> Iterator[bytes]:
    while run:
        yield run.pop()
