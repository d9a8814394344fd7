"""Reading HTTP/1.1 messages from a stream without losing a byte; shared by the upstream and the raw client.

Knows Content-Length and chunked. Judges nothing: what arrives is what is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Field = tuple[bytes, bytes]
Text = str | bytes
Pairs = Sequence[tuple[Text, Text]]

# Far above every head of a test: a head that does not end is the fault of the one who wrote it.
HEAD_LIMIT_BYTES = 4 * 1024 * 1024


def to_bytes(text: Text) -> bytes:
    """Bytes as they are, text as Latin-1: the field bytes of RFC 9110 section 5.5."""
    return text if isinstance(text, bytes) else text.encode("latin-1")


def to_fields(pairs: Pairs) -> list[Field]:
    """Pairs of text or bytes as fields."""
    return [(to_bytes(name), to_bytes(value)) for name, value in pairs]


def first(fields: Iterable[Field], name: Text) -> bytes | None:
    """The first value of the field `name`, whatever its case, or None."""
    wanted = to_bytes(name).lower()
    return next((value for field, value in fields if field.lower() == wanted), None)


def every(fields: Iterable[Field], name: Text) -> list[bytes]:
    """All values of the field `name`, whatever its case, in order."""
    wanted = to_bytes(name).lower()
    return [value for field, value in fields if field.lower() == wanted]


@dataclass(frozen=True, slots=True)
class Head:
    """A start line and fields, and the bytes they were read from (blank line included)."""

    start: bytes
    fields: tuple[Field, ...]
    raw: bytes


def split_head(raw: bytes) -> Head:
    """The start line and fields of a raw head; one blank before a value is taken off, no more."""
    start, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return Head(start, tuple((name, value.removeprefix(b" ")) for name, _, value in pairs), raw)


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None where the stream ends before its first byte.

    Raises: asyncio.IncompleteReadError when the stream ends within it.
    """
    try:
        return split_head(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError as exc:
        if exc.partial:
            raise
        return None


def is_chunked(fields: Iterable[Field]) -> bool:
    """Whether the content comes in chunks."""
    return b"chunked" in (first(fields, b"transfer-encoding") or b"").lower()


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Content in chunks, the last one and the trailer included.

    Raises: asyncio.IncompleteReadError when the stream ends within it.
    """
    parts: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return b"".join(parts)


async def read_content(reader: asyncio.StreamReader, fields: Iterable[Field], *, to_end: bool) -> bytes:
    """The content that `fields` announce; without length and chunking empty, or all there is with `to_end`.

    Raises: asyncio.IncompleteReadError when the stream ends within it.
    """
    if is_chunked(fields):
        return await read_chunks(reader)
    length = first(fields, b"content-length")
    if length is not None:
        return await reader.readexactly(int(length))
    return await reader.read() if to_end else b""
