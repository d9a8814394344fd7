"""What must be equal for two requests to be the same: route, method, path, query, and the content as it is meant.

JSON is compared by its values, forms and multipart forms by their pairs and parts, everything else, content
without a media type included, by its bytes; the media type counts, and so do the fields the route names. Content
codings are undone for this. Content that is not what its fields say counts by its bytes. Nothing here touches
what is forwarded, and no content is held: it is digested as it streams past.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NewType, Protocol

from sidecar.coding import CodingError, Unfolding, codings
from sidecar.config import FingerprintRules
from sidecar.form_scan import FormScanner
from sidecar.framing import Names, framed, seal
from sidecar.json_frames import Node
from sidecar.json_scan import JsonScanner
from sidecar.message import Fields, media_type, values
from sidecar.multipart_scan import MultipartScanner, boundary

Fingerprint = NewType("Fingerprint", bytes)

# Named in the record: whatever changes the digest of any request changes this, or honest retries are refused.
ALGORITHM = b"1"

# At most this much is worked on before the caller may do something else: some 50 us of text.
_WINDOW_BYTES = 16 * 1024
_OFF = Fingerprint(hashlib.sha256(b"fingerprint: off").digest())


class _Scanner(Protocol):
    """Reads content of one media type."""

    irregular: bool

    @property
    def found(self) -> dict[str, bytes]:
        """The watched values."""

    def feed(self, piece: bytes) -> Iterator[None]:
        """Read on."""

    def finish(self) -> bytes | None:
        """The encoding of the content, None where it is not what its type says."""


class _Plan:
    """What rules and watched names come to; made once for each route."""

    __slots__ = ("fields", "ignored", "root", "watched", "watches")

    def __init__(self, rules: FingerprintRules, watch: tuple[str, ...]) -> None:
        self.watches = bool(watch)
        self.fields = sorted({name.lower().encode() for name in rules.fields})
        self.ignored = frozenset(_sealed(name) for name in rules.ignore if not name.startswith("/"))
        self.watched = {_sealed(name): name for name in watch if not name.startswith("/")}
        self.root: Node | None = None
        ignored = [name for name in rules.ignore if name.startswith("/")]
        watched = [name for name in watch if name.startswith("/")]
        if ignored or watched:
            self.root = Node()
            for pointer in ignored:
                self.root.at(pointer).ignored = True
            for pointer in watched:
                self.root.at(pointer).watched = pointer

    def scanner(self, media: bytes, content_type: bytes) -> _Scanner | None:
        """For content of the type `media`; None where only its bytes can be compared."""
        if media == b"application/json" or media.endswith(b"+json"):
            return JsonScanner(self.root)
        if media == b"application/x-www-form-urlencoded":
            return FormScanner(Names(self.ignored, self.watched))
        if media == b"multipart/form-data":
            names = Names(self.ignored, self.watched)
            return MultipartScanner(names, boundary(content_type))
        return None


_plan = lru_cache(maxsize=256)(_Plan)


def _sealed(name: str) -> bytes:
    return seal(b"s", name.encode("utf-8", "surrogatepass"))


class Fingerprinter:
    """The fingerprint of one request, from its head and, piece by piece, its content."""

    def __init__(
        self,
        rules: FingerprintRules,
        *,
        route: str,
        method: bytes,
        path: bytes,
        query: bytes | None,
        fields: Fields,
        watch: Iterable[str] = (),
        limit_bytes: int,
    ) -> None:
        """`path`: the copy that routes are matched on. `query`: None where the target has no `?`.

        `fields`: those of the request. `watch`: JSON pointers (leading `/`) or names of form fields whose values
        `watched` is to give. `limit_bytes`: how far content codings may unfold the content.
        """
        plan = _plan(rules, tuple(watch))
        self._enabled = rules.enabled
        self._codings = codings(fields)
        # Two lines of it are two opinions about the content: only its bytes are sure.
        types = values(fields, b"content-type")
        media = media_type(fields) if len(types) < 2 else b", ".join(types)
        readable = len(types) == 1 and (rules.enabled or plan.watches)
        self._scanner = plan.scanner(media, types[0]) if readable else None
        self._unfolding: Unfolding | None = None
        self._broken = False
        self._bytes = hashlib.sha256()  # of the content as it came
        self._plain = self._bytes  # of the content without its codings
        if self._codings:
            self._plain = hashlib.sha256()
            try:
                self._unfolding = Unfolding(self._codings, limit_bytes)
            except CodingError:
                self._broken = True
        self._head = (ALGORITHM, route.encode(), method, path, query, media, *_counted(fields, plan.fields))
        self._found: dict[str, bytes] = {}

    def feed(self, piece: bytes) -> Iterator[None]:
        """Read on; `piece` may have any size and be cut anywhere.

        Yields after each bounded amount of work (some 16 KiB of content without its codings, 2 ms at most), so
        that the caller can let others run. Must be driven to its end before the next call.
        """
        if not self._enabled and self._scanner is None:
            return
        for at in range(0, len(piece), _WINDOW_BYTES):
            if at:
                yield
            window = piece[at : at + _WINDOW_BYTES]
            self._bytes.update(window)
            if not self._codings:
                if self._scanner is not None:
                    yield from self._scanner.feed(window)
            elif not self._broken:
                yield from self._unfold(window)

    def _unfold(self, window: bytes) -> Iterator[None]:
        assert self._unfolding is not None
        try:
            for step in self._unfolding.feed(window):
                self._plain.update(step)
                if self._scanner is not None:
                    yield from self._scanner.feed(step)
                yield
        except CodingError:
            self._broken = True

    def finish(self) -> Fingerprint:
        """The fingerprint of what was fed. To be called once; takes no time worth a yield."""
        content = self._content()
        if not self._enabled:
            return _OFF
        return Fingerprint(hashlib.sha256(framed((*self._head, *content))).digest())

    def _content(self) -> tuple[bytes, ...]:
        """How the content was compared, and its digest."""
        if self._unfolding is not None and not self._broken:
            try:
                self._unfolding.finish()
            except CodingError:
                self._broken = True
        if self._broken:
            return b"coded", b",".join(self._codings), self._bytes.digest()
        scanned = None if self._scanner is None else self._scanner.finish()
        if self._scanner is None or scanned is None:
            return b"bytes", self._plain.digest()
        self._found = self._scanner.found
        return b"scanned", scanned

    def watched(self) -> Mapping[str, bytes]:
        """After `finish`: the values found under the watched names, none of them empty.

        JSON strings as UTF-8, numbers, true and false as written; null, objects and arrays count as absent. Form
        values decoded, those of a repeated name joined by commas. A value above 4 KiB is cut there, with a digest
        behind it. Nothing at all where the content is not what its fields say.
        """
        return self._found


def _counted(fields: Fields, names: list[bytes]) -> Iterator[bytes | None]:
    """Each of `names` with all its values, so framed that absent, empty and repeated differ."""
    for name in names:
        yield name
        yield from (value.strip(b" \t") for value in values(fields, name))
        yield None
