"""Content in memory and in a file, within its bound."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sidecar.content import SPOOL_ABOVE_BYTES, Content, Memory, MemoryFullError

PIECE = bytes(range(256)) * 256


def filled(memory: Memory, size: int) -> Content:
    content = Content(memory)
    for _ in range(size // len(PIECE)):
        content.write(PIECE)
    return content


def test_small_content_stays_in_memory_and_is_counted() -> None:
    memory = Memory(1_000_000)
    content = filled(memory, 2 * len(PIECE))
    assert not content.spooled
    assert memory.held_bytes == content.size == 2 * len(PIECE)
    assert content.whole() == content.whole() == PIECE * 2
    content.close()
    content.close()
    assert memory.held_bytes == 0


def test_large_content_goes_to_a_file_and_comes_back_in_pieces() -> None:
    memory = Memory(SPOOL_ABOVE_BYTES)
    content = filled(memory, 4 * SPOOL_ABOVE_BYTES)
    assert content.spooled
    assert memory.held_bytes == 0
    pieces = list(content.pieces())
    assert max(map(len, pieces)) <= 65536
    assert b"".join(pieces) == b"".join(content.pieces()) == PIECE * (content.size // len(PIECE))
    content.close()


def test_without_a_writable_directory_content_stays_in_memory_within_its_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    memory = Memory(2 * SPOOL_ABOVE_BYTES)
    content = filled(memory, 2 * SPOOL_ABOVE_BYTES)
    assert not content.spooled
    assert memory.held_bytes == content.size
    with pytest.raises(MemoryFullError):
        content.write(b"x")
    content.close()
    assert memory.held_bytes == 0


def test_memory_that_is_full_refuses_and_counts_nothing() -> None:
    memory = Memory(10)
    content = Content(memory)
    with pytest.raises(MemoryFullError):
        content.write(b"x" * 11)
    assert (memory.held_bytes, content.size) == (0, 0)
    content.write(b"x" * 10)
    content.close()
