"""Content of a message that is kept whole: in memory while small, in an unlinked file above that.

Knows how many bytes the process holds in memory for contents and refuses to hold more than its bound.
Spooled content is a file without a name, readable by nobody else. Where no directory is writable (a
read-only file system) everything stays in memory, within the same bound.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import IO

# Below this a content never touches the disk: most mails are smaller, and a file costs four system calls.
SPOOL_ABOVE_BYTES = 256 * 1024
PIECE_BYTES = 64 * 1024


class MemoryFullError(Exception):
    """The bound of `Memory` is reached: the caller answers 503 `overloaded`, nothing was sent."""


class Memory:
    """How many bytes of content this process may hold in memory (`limits.memory`), and holds."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: at least 1."""
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, amount: int) -> None:
        """Count `amount` more bytes as held.

        Raises: MemoryFullError, and then nothing is counted.
        """
        if self.held_bytes + amount > self.limit_bytes:
            raise MemoryFullError
        self.held_bytes += amount

    def give(self, amount: int) -> None:
        """Count `amount` bytes as held no more."""
        self.held_bytes -= amount


class Content:
    """Bytes that arrive in pieces and are read again as often as needed. `close()` frees them."""

    __slots__ = ("_file", "_held", "_memory", "_parts", "_spools", "size")

    def __init__(self, memory: Memory) -> None:
        """`memory`: the process's account, which this content is counted in."""
        self.size = 0
        self._memory = memory
        self._parts: list[bytes] = []
        self._held = 0
        self._file: IO[bytes] | None = None
        self._spools = True

    def write(self, piece: bytes) -> None:
        """Append `piece`.

        Raises: MemoryFullError when neither memory nor a directory has room for it.
        """
        if self._file is None and self._spools and self.size + len(piece) > SPOOL_ABOVE_BYTES:
            self._spools = self._spool()
        if self._file is None:
            self._memory.take(len(piece))
            self._held += len(piece)
            self._parts.append(piece)
        else:
            try:
                written = self._file.write(piece)
            except OSError as exc:
                raise MemoryFullError from exc
            if written != len(piece):  # a disk that fills up takes a part, without a word
                raise MemoryFullError
        self.size += len(piece)

    def _spool(self) -> bool:
        """Move what is here to a file; False where none can be had, which is not tried again."""
        try:
            # buffering=0: what was written is what is read, and no second copy stays in memory.
            spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it lives as long as this content
        except OSError:
            return False  # nothing is writable here: memory, within its bound
        try:
            whole = all(spool.write(part) == len(part) for part in self._parts)
        except OSError:
            whole = False
        if not whole:
            spool.close()
            return False
        self._file = spool
        self._parts = []
        self._memory.give(self._held)
        self._held = 0
        return True

    @property
    def spooled(self) -> bool:
        """Whether the content lies in a file."""
        return self._file is not None

    def pieces(self) -> Iterator[bytes]:
        """The content from its start, in pieces of at most 64 KiB where it is spooled."""
        if self._file is None:
            yield from self._parts
            return
        descriptor = self._file.fileno()
        at = 0
        while piece := os.pread(descriptor, PIECE_BYTES, at):
            at += len(piece)
            yield piece

    def whole(self) -> bytes:
        """The content as one value; for contents that are known to be small."""
        return b"".join(self.pieces())

    def close(self) -> None:
        """Free memory and file. May be called twice."""
        self._memory.give(self._held)
        self._held = 0
        self._parts = []
        if self._file is not None:
            self._file.close()
            self._file = None
