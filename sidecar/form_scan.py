"""The canonical digest of a form (`application/x-www-form-urlencoded`, WHATWG URL section 5) that arrives in pieces.

Pairs are compared decoded, the values of one name in order, the names in any. `a` and `a=` differ, empty pairs
(`a=1&&b=2`) do not count, and an escape that is none (`%zz`) stands for itself, as every parser reads it.
Irregular, so that the bytes count: more distinct names than MAX_NAMES, or more pairs than MAX_VALUES.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from sidecar.framing import IrregularError, Names, Sealer

# Pairs between two yields; one costs some 4 us.
STEPS = 300


class FormScanner:
    """Reads one form. `irregular` once it cannot be compared as one; `names.found`: the watched values."""

    def __init__(self, names: Names) -> None:
        """`names`: empty, with what is ignored and watched."""
        self.irregular = False
        self._names = names
        self._rest = b""
        self._name: bytes | None = None  # sealed, once its `=` was read
        self._sealer = Sealer()

    @property
    def found(self) -> dict[str, bytes]:
        """The watched values, decoded."""
        return {} if self.irregular else self._names.found

    def feed(self, piece: bytes) -> Iterator[None]:
        """Read on; `piece`: at most some 16 KiB, cut anywhere. Yields only where it holds much work."""
        if self.irregular:
            return
        try:
            *pairs, rest = (self._rest + piece).split(b"&")
            self._names.count(len(pairs))
            for number, pair in enumerate(pairs, 1):
                self._part(pair)
                self._pair_ends()
                if number % STEPS == 0:
                    yield
            # The last two bytes may be the beginning of an escape.
            cut = rest.find(b"%", max(len(rest) - 2, 0))
            self._rest = rest[cut:] if cut >= 0 else b""
            self._part(rest[:cut] if cut >= 0 else rest)
        except IrregularError:
            self.irregular = True

    def finish(self) -> bytes | None:
        """The encoding of the form, or None if it was irregular."""
        if not self.irregular:
            try:
                self._part(self._rest)
                self._rest = b""
                self._pair_ends()
            except IrregularError:
                self.irregular = True
        return None if self.irregular else self._names.seal(b"p")

    def _part(self, part: bytes) -> None:
        """A run of one pair, with no `&` in it."""
        if self._name is None:
            name, equals, part = part.partition(b"=")
            self._sealer.add(_plain(name))
            if not equals:
                return
            self._name = self._sealer.seal(b"s")
            self._sealer = Sealer(self._names.keep_bytes(self._name))
        self._sealer.add(_plain(part))

    def _pair_ends(self) -> None:
        name, sealer = self._name, self._sealer
        self._name, self._sealer = None, Sealer()
        if name is not None:
            self._names.add(name, sealer.seal(b"v"))
            self._names.note(name, sealer.text())
        elif sealer.size:
            self._names.add(sealer.seal(b"s"), b"n")


def _plain(run: bytes) -> bytes:
    return unquote_to_bytes(run.replace(b"+", b" ")) if run else b""
