"""Content codings (RFC 9110 section 8.4): undone in small steps, within a bound; which one a client accepts.

Knows gzip and deflate; br and zstd where a module that can bound its output is installed anyway. Nothing here
touches what is forwarded.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Protocol

from sidecar.message import Field, Fields, values

# One step of unfolding: 16 KiB of content takes some 50 us.
STEP_BYTES = 16 * 1024
# Nobody sends more than two; each one more may unfold a thousandfold again.
MAX_CODINGS = 4
# Members of one gzip content: block-wise writers make one for each 64 KiB.
MAX_MEMBERS = 10_000

# What speaks of the coded bytes (RFC 9110 section 8.4, RFC 9530, RFC 1864), or counts them.
_OF_CODED = frozenset(
    (b"content-encoding", b"content-md5", b"digest", b"content-digest", b"repr-digest", b"content-length")
)
# RFC 9110 sections 8.4.1.1 and 8.4.1.3: x-compress and x-gzip are the same as compress and gzip.
_ALIASES = {b"x-gzip": b"gzip", b"x-compress": b"compress"}


class CodingError(Exception):
    """The content cannot be undone: unknown coding, broken, cut, or larger than allowed."""


class _Decoder(Protocol):
    """Undoes one coding. `feed` gives the content in pieces of some STEP_BYTES, empty ones included."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Undo `piece`. Raises: CodingError."""

    def finish(self) -> None:
        """Raises: CodingError where content lacks."""


def _inflated(inflater: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    try:
        while not inflater.eof:
            step = inflater.decompress(data, STEP_BYTES)
            data = inflater.unconsumed_tail
            if not step and not data:
                return
            yield step
    except zlib.error as exc:
        raise CodingError from exc


class _Gzip:
    """RFC 1952, any number of members one behind the other (section 2.2)."""

    def __init__(self) -> None:
        self._inflater: zlib._Decompress | None = None
        self._members = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            inflater = self._inflater
            if inflater is None:
                self._members += 1
                if self._members > MAX_MEMBERS:
                    raise CodingError
                self._inflater = inflater = zlib.decompressobj(wbits=31)
            yield from _inflated(inflater, piece)
            piece = inflater.unused_data
            if inflater.eof:
                self._inflater = None
                yield b""  # thousands of empty members are work, too

    def finish(self) -> None:
        if self._inflater is not None or not self._members:
            raise CodingError


class _Deflate:
    """The zlib format (RFC 1950); also without its wrapper, as some send it (RFC 9110 section 8.4.1.2, the note)."""

    def __init__(self) -> None:
        self._head = b""
        self._inflater: zlib._Decompress | None = None

    def feed(self, piece: bytes) -> Iterator[bytes]:
        inflater = self._inflater
        if inflater is None:
            self._head += piece
            if len(self._head) < 2:
                return
            piece = self._head
            # RFC 1950 section 2.2: method 8, and the two bytes together are a multiple of 31.
            wrapped = piece[0] & 15 == 8 and int.from_bytes(piece[:2], "big") % 31 == 0
            self._inflater = inflater = zlib.decompressobj(wbits=15 if wrapped else -15)
        elif inflater.eof and piece:
            raise CodingError
        yield from _inflated(inflater, piece)
        if inflater.unused_data:
            raise CodingError

    def finish(self) -> None:
        if self._inflater is None or not self._inflater.eof:
            raise CodingError


class _Brotli:
    """RFC 7932, where the `brotli` module (1.2 or newer: its output can be bounded) is there."""

    def __init__(self) -> None:
        self._module = importlib.import_module("brotli")
        self._decompressor = self._module.Decompressor()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        try:
            step = piece
            while piece or (step and not self._decompressor.is_finished()):
                # The module's blocks are 32 KiB, so a step may be twice as long as asked for.
                step = self._decompressor.process(piece, output_buffer_limit=STEP_BYTES)
                piece = b""
                yield step
        except self._module.error as exc:
            raise CodingError from exc

    def finish(self) -> None:
        if not self._decompressor.is_finished():
            raise CodingError


class _Zstandard:
    """RFC 8878, any number of frames, where Python (3.14) or `backports.zstd` knows it."""

    def __init__(self) -> None:
        self._module = _importable("compression.zstd", "backports.zstd")
        self._decompressor = self._fresh()
        self._inside = False
        self._some = False

    def _fresh(self) -> Any:
        assert self._module is not None
        # RFC 9659 section 3: the window of this coding is 8 MB at most.
        return self._module.ZstdDecompressor(options={self._module.DecompressionParameter.window_log_max: 23})

    def feed(self, piece: bytes) -> Iterator[bytes]:
        assert self._module is not None
        try:
            while piece or (self._inside and not self._decompressor.needs_input):
                step: bytes = self._decompressor.decompress(piece, STEP_BYTES)
                piece = b""
                self._inside = self._some = True
                if self._decompressor.eof:
                    piece = self._decompressor.unused_data
                    self._decompressor = self._fresh()
                    self._inside = False
                yield step
        except self._module.ZstdError as exc:
            raise CodingError from exc

    def finish(self) -> None:
        if self._inside or not self._some:
            raise CodingError


def _importable(*names: str) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _known() -> dict[bytes, Callable[[], _Decoder]]:
    known: dict[bytes, Callable[[], _Decoder]] = {b"gzip": _Gzip, b"deflate": _Deflate}
    brotli = _importable("brotli")
    if brotli is not None and hasattr(brotli.Decompressor, "can_accept_more_data"):
        known[b"br"] = _Brotli
    if _importable("compression.zstd", "backports.zstd") is not None:
        known[b"zstd"] = _Zstandard
    return known


KNOWN = _known()


def codings(fields: Iterable[Field]) -> tuple[bytes, ...]:
    """The content codings in the order they were applied (RFC 9110 section 8.4), in lower case, without identity."""
    return _listed(b",".join(values(fields, b"content-encoding")))


def _listed(value: bytes) -> tuple[bytes, ...]:
    names = (name.strip(b" \t").lower() for name in value.split(b","))
    return tuple(_ALIASES.get(name, name) for name in names if name not in (b"", b"identity"))


class Unfolding:
    """Undoes `names`, the last one first, in steps and within `limit_bytes` at each stage."""

    def __init__(self, names: tuple[bytes, ...], limit_bytes: int) -> None:
        """`names`: what `codings` gives. Raises: CodingError where one is unknown, or above MAX_CODINGS."""
        if len(names) > MAX_CODINGS or not all(name in KNOWN for name in names):
            raise CodingError
        self._decoders = [KNOWN[name]() for name in reversed(names)]
        self._left = [limit_bytes] * len(names)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The content in pieces of some STEP_BYTES, or empty, one for each bounded amount of work.

        `piece`: STEP_BYTES at most. Raises: CodingError.
        """
        yield from self._stage(0, piece)

    def _stage(self, number: int, piece: bytes) -> Iterator[bytes]:
        if number == len(self._decoders):
            yield piece
            return
        for step in self._decoders[number].feed(piece):
            self._left[number] -= len(step)
            if self._left[number] < 0:
                raise CodingError
            yield from self._stage(number + 1, step)

    def finish(self) -> None:
        """Raises: CodingError where the content was cut."""
        for decoder in self._decoders:
            decoder.finish()


def acceptable(accept_encoding: bytes | None, coding: bytes) -> bool:
    """Whether a client with this Accept-Encoding takes `coding`, a value of Content-Encoding (RFC 9110 section 12.5.3).

    `accept_encoding`: all its lines joined by commas. None excludes all but identity: the RFC lets a server send
    anything then, but clients that name no coding undo none.
    """
    if accept_encoding is None:
        return not _listed(coding)
    weights = _weights(accept_encoding)
    other = weights.get(b"*", 0.0)
    # "If the representation has no content coding, then it is acceptable by default unless specifically excluded".
    named = _listed(coding)
    if not named:
        return weights.get(b"identity", weights.get(b"*", 1.0)) > 0
    return all(weights.get(name, other) > 0 for name in named)


def _weights(accept_encoding: bytes) -> dict[bytes, float]:
    weights: dict[bytes, float] = {}
    for element in accept_encoding.split(b","):
        name, _, parameter = element.partition(b";")
        name = name.strip(b" \t").lower()
        if name:
            weights[_ALIASES.get(name, name)] = _weight(parameter.strip(b" \t"))
    return weights


def _weight(parameter: bytes) -> float:
    if not parameter:
        return 1.0
    # RFC 9110 section 12.4.2. What cannot be read is no acceptance.
    found = re.fullmatch(rb"[qQ]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)", parameter)
    return 0.0 if found is None else float(found[1])


def decoded(answer_fields: Fields, content: bytes, limit_bytes: int) -> tuple[Fields, bytes] | None:
    """The answer without its content codings, for a client that takes none of them; None where that cannot be done.

    The fields that speak of the coded bytes are gone, Content-Length too, and a strong ETag is weak (RFC 9110
    section 8.8.1: what a coding is added to or taken from has another strong validator). Without any coding, and
    for empty content (an answer to HEAD), fields and content are as they were. `limit_bytes`: of the content undone.
    """
    names = codings(answer_fields)
    if not names or not content:
        return answer_fields, content
    plain: list[bytes] = []
    try:
        unfolding = Unfolding(names, limit_bytes)
        for at in range(0, len(content), STEP_BYTES):
            plain += unfolding.feed(content[at : at + STEP_BYTES])
        unfolding.finish()
    except CodingError:
        return None
    kept = tuple(_weakened(field) for field in answer_fields if field[0].lower() not in _OF_CODED)
    return kept, b"".join(plain)


def _weakened(field: Field) -> Field:
    name, value = field
    strong = name.lower() == b"etag" and value.lstrip(b" \t").startswith(b'"')
    return (name, b"W/" + value.lstrip(b" \t")) if strong else field
