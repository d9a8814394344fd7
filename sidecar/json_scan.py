"""The canonical digest of a JSON text (RFC 8259) that arrives in pieces, in bounded memory and small steps.

Members are compared whatever their order, strings by the text they stand for, arrays in order, numbers exactly
as written: `1`, `1.0`, `1e0`, `"1"` and null all differ, and no large integer is rounded. A value becomes a
sealed encoding (`framing.py`), containers one over those of their values. Nothing of the text is kept but the
encodings of what is open.

Irregular, so that the bytes count: whatever RFC 8259 forbids (a byte order mark too), members of one object with
equal names (section 4: what they mean is unpredictable), more than MAX_DEPTH levels, more than MAX_RETAINED
members waiting to be sorted, more than MAX_VALUES values, a number longer than MAX_NUMBER. A lone surrogate escape
is legal (section 8.2).
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterator

from sidecar.framing import INLINE_BYTES, MAX_VALUES, WATCHED_BYTES, IrregularError, Sealer, clipped, seal
from sidecar.json_frames import RUN, Node, OpenArray, OpenObject

MAX_DEPTH = 256
MAX_RETAINED = 100_000
MAX_NUMBER = 1024
# Tokens between two yields: one costs between half a microsecond and three.
STEPS = 800

# What a state gives instead of a place: it needs more text, or, _REST less the place, it has worked long enough.
_MORE = -1
_REST = -2

_SPACE = r"[ \t\n\r]*+"
# No group is possessive: Python 3.11.0 to 3.11.4 match those wrongly. What follows leaves them nothing to give back.
_STRING = r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*'
# A number has ended only where something stands that cannot continue it.
_SCALAR = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?(?=[,\]} \t\n\r])|true|false|null"
_VALUE = rf'(?:(?:"({_STRING})"|({_SCALAR})){_SPACE}([,%s])|([{{\[]))'
# The whole of `"name": value,` in one match, and of `value,`: nearly everything in an ordinary mail.
_member = re.compile(rf'{_SPACE}"({_STRING})"{_SPACE}:{_SPACE}{_VALUE % "}"}').match
_element = re.compile(_SPACE + _VALUE % r"\]").match
_space = re.compile(_SPACE).match
_token = re.compile(rf'{_SPACE}(?:([{{}}\[\],:"])|({_SCALAR}))').match
_string = re.compile(_STRING).match
_half_escape = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?").fullmatch
_high_surrogate = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}").fullmatch
_number_so_far = re.compile(rf"[-+.0-9eE]{{1,{MAX_NUMBER}}}").fullmatch

_LITERALS = {"true": b"t", "false": b"f", "null": b"n"}
_CONTROLS = bytes(range(0x20))
# One run of one string, checked before and at most a window long, so that the loop is not stalled.
_unescape: Callable[[str], tuple[str, int]] = json.JSONDecoder().raw_decode


def _plain(run: str) -> bytes:
    if "\\" in run:
        return _unescape(f'"{run}"')[0].encode("utf-8", "surrogatepass")
    return run.encode()


def _before_pair(text: str, at: int, end: int) -> int:
    """`end`, or the place before a high surrogate there: the low one may follow, and the two are one character."""
    start = end - 6
    if start < at or not _high_surrogate(text, start, end):
        return end
    # Behind an odd number of backslashes more, its own is only the second half of an escaped one.
    before = text[at:start]
    odd = (len(before) - len(before.rstrip("\\"))) % 2
    return end if odd else start


class JsonScanner:
    """Reads one JSON text. `irregular` once it cannot be compared as JSON; `found`: the watched values."""

    def __init__(self, root: Node | None) -> None:
        """`root`: the pointers to ignore and to watch, None where there are none."""
        self.irregular = False
        self.found: dict[str, bytes] = {}
        self._undecoded = b""
        self._text = ""
        self._left = MAX_VALUES
        self._retained = 0
        self._root = OpenArray(None)
        self._root.pending = root
        self._frame: OpenArray | OpenObject = self._root
        self._open: list[OpenArray | OpenObject] = []
        self._sealer = Sealer()
        self._merge: Iterator[bytes] = iter(())
        self._state: Callable[[int], int] = self._value

    def feed(self, piece: bytes) -> Iterator[None]:
        """Read on; `piece`: at most some 16 KiB, cut anywhere. Yields only where it holds much work."""
        if self.irregular:
            return
        try:
            data = self._undecoded + piece if self._undecoded else piece
            text, used = utf_8_decode(data, "strict", False)
            self._undecoded = data[used:]
            self._text = self._text + text if self._text else text
            at = 0
            while at != _MORE:
                for _ in range(STEPS):
                    at = self._state(at)
                    if at < 0:
                        break
                if at != _MORE:
                    at = _REST - at if at < 0 else at
                    yield
        except (IrregularError, UnicodeDecodeError):
            self._give_up()

    def finish(self) -> bytes | None:
        """The encoding of the value, or None if the text was irregular."""
        # A number may end with the text; white space behind anything else changes nothing.
        for _ in self.feed(b" "):
            pass
        if self._state != self._end or self._undecoded:
            self._give_up()
        return None if self.irregular else self._root.seal()

    def _give_up(self) -> None:
        self.irregular = True
        self.found = {}
        self._text = ""
        self._frame = self._root
        self._open = []
        self._merge = iter(())

    # Values go into the frame that is open

    def _take(self, string: str | None, scalar: str) -> None:
        if string is not None:
            text = _plain(string)
            self._deliver(seal(b"s", text), text if len(text) <= WATCHED_BYTES else clipped(text))
        else:
            self._take_scalar(scalar)

    def _take_scalar(self, scalar: str) -> None:
        text = scalar.encode()
        sealed = _LITERALS.get(scalar)
        if sealed is None:
            if len(text) > MAX_NUMBER:
                raise IrregularError
            sealed = seal(b"d", text)
        self._deliver(sealed, b"" if scalar == "null" else text)

    def _deliver(self, sealed: bytes, text: bytes) -> None:
        """Put a value where it belongs. `text`: what a watcher of it would get, empty for nothing."""
        self._left -= 1
        if self._left < 0:
            raise IrregularError
        frame = self._frame
        node = frame.pending
        if node is not None:
            if node.watched and text:
                self.found[node.watched] = text
            if node.ignored:
                frame.drop()
                return
        if frame.put(sealed):
            frame.spill()
            self._retained += RUN
            if self._retained > MAX_RETAINED:
                raise IrregularError

    # States: what may come next. Each reads one token from `at` on and gives the place behind it.

    def _mark(self, at: int) -> tuple[int, str]:
        """The place of the next character that is not white space, and the character, empty at the end."""
        mark = self._text[at : at + 1]
        if mark in " \t\n\r":
            found = _space(self._text, at)
            at = at if found is None else found.end()
            mark = self._text[at : at + 1]
        return at, mark

    def _value(self, at: int) -> int:
        found = _token(self._text, at)
        if found is None:
            return self._starve(at, value=True)
        mark, scalar = found.groups()
        if mark is None:
            self._take_scalar(scalar)
            self._state = self._after
        elif mark == '"':
            node = self._frame.pending
            self._sealer = Sealer(WATCHED_BYTES if node is not None and node.watched else INLINE_BYTES)
            self._state = self._in_string
        elif mark in "{[":
            return self._opening(mark, found.end())
        else:
            raise IrregularError
        return found.end()

    def _first_element(self, at: int) -> int:
        start, mark = self._mark(at)
        if mark == "]":
            return self._closing(start + 1)
        return self._next_element(start) if mark else self._starve(start)

    def _next_element(self, at: int) -> int:
        self._frame.begin(b"")
        found = _element(self._text, at)
        if found is None:
            self._state = self._value
            return self._value(at)
        string, scalar, after, opener = found.groups()
        end = found.end()
        if opener is not None:
            return self._opening(opener, end)
        self._take(string, scalar)
        if after == ",":
            self._state = self._next_element
            return end
        return self._closing(end)

    def _first_member(self, at: int) -> int:
        start, mark = self._mark(at)
        return self._closing(start + 1) if mark == "}" else self._next_member(start)

    def _next_member(self, at: int) -> int:
        found = _member(self._text, at)
        if found is None:
            return self._name(at)
        name, string, scalar, after, opener = found.groups()
        end = found.end()
        self._frame.begin(seal(b"s", _plain(name)))
        if opener is not None:
            return self._opening(opener, end)
        self._take(string, scalar)
        if after == ",":
            self._state = self._next_member
            return end
        return self._closing(end)

    def _name(self, at: int) -> int:
        start, mark = self._mark(at)
        if not mark:
            return self._starve(start)
        if mark != '"':
            raise IrregularError
        self._sealer = Sealer()
        self._state = self._in_name
        return start + 1

    def _in_name(self, at: int) -> int:
        end = self._characters(at)
        if end >= 0:
            self._frame.begin(self._sealer.seal(b"s"))
            self._state = self._colon
        return end

    def _colon(self, at: int) -> int:
        start, mark = self._mark(at)
        if not mark:
            return self._starve(start)
        if mark != ":":
            raise IrregularError
        self._state = self._value
        return start + 1

    def _in_string(self, at: int) -> int:
        end = self._characters(at)
        if end >= 0:
            self._deliver(self._sealer.seal(b"s"), self._sealer.text())
            self._state = self._after
        return end

    def _opening(self, mark: str, at: int) -> int:
        self._open.append(self._frame)
        if len(self._open) > MAX_DEPTH:
            raise IrregularError
        node = self._frame.pending
        if mark == "{":
            self._frame = OpenObject(node)
            self._state = self._first_member
        else:
            self._frame = OpenArray(node)
            self._state = self._first_element
        return at

    def _closing(self, at: int) -> int:
        frame = self._frame
        if frame.runs:
            self._retained -= RUN * len(frame.runs)
            self._merge = frame.merged()
            self._state = self._merging
            return at
        return self._closed(frame.seal(), at)

    def _merging(self, at: int) -> int:
        sealed = next(self._merge)
        return self._closed(sealed, at) if sealed else _REST - at

    def _closed(self, sealed: bytes, at: int) -> int:
        self._frame = self._open.pop()
        self._deliver(sealed, b"")
        self._state = self._after
        return at

    def _after(self, at: int) -> int:
        if not self._open:
            self._state = self._end
            return at
        start, mark = self._mark(at)
        if mark == ",":
            self._state = self._next_member if self._frame.closer == "}" else self._next_element
            return start + 1
        if mark == self._frame.closer:
            return self._closing(start + 1)
        if mark:
            raise IrregularError
        return self._starve(start)

    def _end(self, at: int) -> int:
        start, mark = self._mark(at)
        if mark:
            raise IrregularError
        return self._starve(start)

    # Text that goes on in the next piece

    def _starve(self, at: int, *, value: bool = False) -> int:
        """Keep what cannot be understood yet; refuse what no more text could make a value."""
        rest = self._text[at:].lstrip(" \t\n\r") if value else self._text[at:]
        if value and rest and not _number_so_far(rest) and not any(word.startswith(rest) for word in _LITERALS):
            raise IrregularError
        self._text = rest
        return _MORE

    def _characters(self, at: int) -> int:
        """Add the string's next run to its sealer; gives the place behind the closing quote, or _MORE."""
        text = self._text
        if text.find('"', at) < 0 and text.find("\\", at) < 0:
            # The middle of an attachment: this is six times as fast as the expression.
            data = text[at:].encode()
            if len(data.translate(None, _CONTROLS)) != len(data):
                raise IrregularError
            self._sealer.add(data)
            return self._starve(len(text))
        found = _string(text, at)
        end = at if found is None else found.end()
        if text.startswith('"', end):
            self._sealer.add(_plain(text[at:end]))
            return end + 1
        if end < len(text) and not _half_escape(text[end:]):
            raise IrregularError
        end = _before_pair(text, at, end)
        self._sealer.add(_plain(text[at:end]))
        return self._starve(end)
