"""The canonical digest of `multipart/form-data` (RFC 7578, RFC 2046 section 5.1) that arrives in pieces.

Parts are compared by name, file name, type and bytes, whatever the boundary; the order of the parts of one name
counts, that of different names does not. Preamble and epilogue are no content (RFC 2046 section 5.1.1), and
fields of a part other than its disposition, type and transfer encoding must be ignored (RFC 7578 section 4.8).
Irregular, so that the bytes count: whatever two parsers could read in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from sidecar.framing import INLINE_BYTES, IrregularError, Names, Sealer, framed, seal

MAX_HEADER_BYTES = 16 * 1024
# States passed between two yields; a part takes three and some 20 us.
STEPS = 150

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# RFC 9110 section 5.6.4; bytes above 0x7F are UTF-8 (RFC 7578 section 5.1.2).
_QUOTED = rb'"(?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\[\t\x20-\x7e\x80-\xff])*"'
# Boundaries stand without quotes where the RFC wants them (`=`, `/`); no parser reads them otherwise.
_BARE = rb'[^\x00-\x20\x7f;"\\]+'
_parameter = re.compile(rb"[ \t]*;[ \t]*(%b)[ \t]*=[ \t]*(%b|%b)[ \t]*" % (_TOKEN, _BARE, _QUOTED)).match
_field = re.compile(rb"(%b)[ \t]*:[ \t]*([^\x00\r\n]*)" % _TOKEN).fullmatch
_pair = re.compile(rb"\\(.)", re.DOTALL)
# RFC 2046 section 5.1.1: boundary := 0*69<bchars> bcharsnospace
_boundary = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]").fullmatch
# "transport-padding" and the end of the line, or what may still become that
_line_ends = re.compile(rb"[ \t]{0,1000}\r\n").match
_line_may_end = re.compile(rb"[ \t]{0,1000}\r?").fullmatch

_COUNTED = (b"content-disposition", b"content-type", b"content-transfer-encoding")
# RFC 2045 section 6.2: these say that nothing was encoded.
_UNENCODED = (b"7bit", b"8bit", b"binary")


def boundary(content_type: bytes) -> bytes | None:
    """The boundary named in a Content-Type, or None where there is none that RFC 2046 allows."""
    try:
        found = _parameters(content_type)[1].get(b"boundary", b"")
    except IrregularError:
        return None
    return found if _boundary(found) else None


def _parameters(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The part of a field value before its first semicolon, in lower case, and its parameters.

    Raises: IrregularError where one is repeated or cannot be read.
    """
    head = value.partition(b";")[0]
    at = len(head)
    parameters: dict[bytes, bytes] = {}
    while at < len(value):
        found = _parameter(value, at)
        if found is None or found[1].lower() in parameters:
            raise IrregularError
        # A percent sign stands for itself: senders escape by it, parsers disagree on undoing it.
        text = _pair.sub(rb"\1", found[2][1:-1]) if found[2].startswith(b'"') else found[2]
        parameters[found[1].lower()] = text
        at = found.end()
    return head.strip(b" \t").lower(), parameters


class _Part:
    """One part: its name, and what else of its header counts."""

    __slots__ = ("described", "file", "name")

    def __init__(self, header: bytes, delimiter: bytes) -> None:
        """Raises: IrregularError."""
        fields: dict[bytes, bytes] = {}
        for line in header.split(b"\r\n"):
            found = _field(line)
            if found is None or line.startswith(delimiter):
                raise IrregularError
            name = found[1].lower()
            if name in fields and name in _COUNTED:
                raise IrregularError
            fields[name] = found[2].rstrip(b" \t")
        kind, parameters = _parameters(fields.get(b"content-disposition", b""))
        # RFC 7578 section 4.2: the disposition is form-data and has a name; filename* is not meant to be, but is.
        if (
            kind != b"form-data"
            or b"name" not in parameters
            or parameters.keys() - {b"name", b"filename", b"filename*"}
        ):
            raise IrregularError
        self.name = seal(b"s", parameters[b"name"])
        self.file = len(parameters) > 1
        encoding = fields.get(b"content-transfer-encoding", b"binary").lower()
        self.described = seal(
            b"h",
            framed(
                (
                    parameters.get(b"filename"),
                    parameters.get(b"filename*"),
                    _media(fields.get(b"content-type")),
                    b"" if encoding in _UNENCODED else encoding,
                )
            ),
        )


def _media(value: bytes | None) -> bytes | None:
    """A part's type with its name in lower case, its parameters as they were written."""
    if value is None:
        return None
    name, semicolon, rest = value.partition(b";")
    return name.strip(b" \t").lower() + semicolon + rest.strip(b" \t")


class MultipartScanner:
    """Reads one form. `irregular` once it cannot be compared as one."""

    def __init__(self, names: Names, boundary: bytes | None) -> None:
        """`names`: empty, with what is ignored and watched. `boundary`: what the function of that name gives."""
        self.irregular = boundary is None
        self._names = names
        self._delimiter = b"\r\n--" + (boundary or b"")
        # The first delimiter may stand at the very beginning.
        self._buffer = b"\r\n"
        self._part: _Part | None = None
        self._sealer = Sealer()
        self._blank = 0  # bytes at the start of the buffer that end the part's header and are no content
        self._state: Callable[[], bool] = self._preamble

    @property
    def found(self) -> dict[str, bytes]:
        """The watched values, of parts without a file name."""
        return {} if self.irregular else self._names.found

    def feed(self, piece: bytes) -> Iterator[None]:
        """Read on; `piece`: at most some 16 KiB, cut anywhere. Yields only where it holds much work."""
        if self.irregular:
            return
        self._buffer += piece
        steps = 0
        try:
            while self._state():
                steps += 1
                if steps % STEPS == 0:
                    yield
        except IrregularError:
            self.irregular = True
            self._buffer = b""

    def finish(self) -> bytes | None:
        """The encoding of the form, or None if it was irregular."""
        ended = self._state == self._epilogue or (self._state == self._closed and not self._buffer.strip(b" \t"))
        if self.irregular or not ended:
            self.irregular = True
            return None
        return self._names.seal(b"p")

    # States: each takes what it can from the buffer and says whether there may be more to take.

    def _preamble(self) -> bool:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            self._buffer = self._buffer[1 - len(self._delimiter) :]
            return False
        self._buffer = self._buffer[at + len(self._delimiter) :]
        self._state = self._delimited
        return True

    def _delimited(self) -> bool:
        if self._buffer.startswith(b"--"):
            self._buffer = self._buffer[2:]
            self._state = self._closed
            return True
        return self._buffer != b"-" and self._line_end(self._header)

    def _closed(self) -> bool:
        return self._line_end(self._epilogue)

    def _line_end(self, then: Callable[[], bool]) -> bool:
        found = _line_ends(self._buffer)
        if found is None:
            # RFC 2046 lets a line that only begins with the delimiter count; not every parser does.
            if not _line_may_end(self._buffer):
                raise IrregularError
            return False
        self._buffer = self._buffer[found.end() :]
        self._state = then
        return True

    def _header(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEADER_BYTES + 3:
                raise IrregularError
            return False
        if end > MAX_HEADER_BYTES:
            raise IrregularError
        self._part = _Part(self._buffer[:end], self._delimiter[2:])
        keep = INLINE_BYTES if self._part.file else self._names.keep_bytes(self._part.name)
        self._sealer = Sealer(keep)
        # The blank line's own end stays: a delimiter that needs it would leave the part without content.
        self._buffer = self._buffer[end + 2 :]
        self._blank = 2
        self._state = self._content
        return True

    def _content(self) -> bool:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            safe = len(self._buffer) - len(self._delimiter) + 1
            if safe > self._blank:
                self._sealer.add(self._buffer[self._blank : safe])
                self._buffer = self._buffer[safe:]
                self._blank = 0
            return False
        if at < self._blank:
            raise IrregularError
        self._sealer.add(self._buffer[self._blank : at])
        self._part_ends()
        self._buffer = self._buffer[at + len(self._delimiter) :]
        self._state = self._delimited
        return True

    def _part_ends(self) -> None:
        part = self._part
        assert part is not None
        self._names.count()
        self._names.add(part.name, part.described + self._sealer.seal(b"v"), file=part.file)
        if not part.file:
            self._names.note(part.name, self._sealer.text())

    def _epilogue(self) -> bool:
        self._buffer = b""
        return False
