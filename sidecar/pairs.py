"""Whether a pair of a form stands in bytes, however its characters are escaped and whatever its neighbours are. Pure.

Servers read forms more freely than any one parser: pairs divided by `;`, the first or the last of two equal
names, a content of no or another type. A send that is told by a pair must not get past by such a spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# What may stand before and behind a pair.
BORDER = rb"[&;?\s]"


def _spelt(text: bytes) -> bytes:
    """A pattern for every way to write a text in a form."""
    return b"".join(b"(?:%b|%%(?i:%02x)%b)" % (re.escape(b"%c" % c), c, rb"|\+" if c == 0x20 else b"") for c in text)


class Pair:
    """One `name=value` to look for."""

    def __init__(self, name: bytes, value: bytes) -> None:
        """Both decoded."""
        self._pattern = re.compile(BORDER + _spelt(name) + b"=" + _spelt(value) + b"(?=" + BORDER + b")")
        self._longest = 3 * (len(name) + len(value)) + 3

    def stands_in(self, pieces: Iterable[bytes]) -> Iterator[bool]:
        """Look piece by piece: True once it was found, False after each piece without it."""
        rest = b"&"
        for piece in pieces:
            window = rest + piece
            found = self._pattern.search(window) is not None
            yield found
            if found:
                return
            rest = window[-self._longest :]
        yield self._pattern.search(rest + b"&") is not None
