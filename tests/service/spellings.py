"""Ways to write the path of a send, and what servers make of a path: the judge of what may pass unprotected."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl, unquote_to_bytes

DOTS = (b".", b"%2e", b"%2E")
SLASHES = (b"/", b"//", b"/./", b"%2f", b"%2F", b"\\", b"%5c", b"/x/../", b"/%2e/", b"/x%2f..%2f", b"/x/%2e%2e\\")
AROUND = (
    *(b"/..", b"/%2e%2e", b"/..%2f..", b"/.", b"//", b"/x", b"%2f..", b"\\..", b"/x/y", b"/emails"),
    *(b"/a\\b", b"/a%5cb", b"/a%2fb", b"/a\\b/..", b"/a%2fb/..", b"/a\\..", b"/a%2f/..", b"/a%252fb"),
)
BEHIND = (
    b"",
    b"",
    b"?",
    b"?a=b",
    b"?/../x",
    b"/",
    b"//",
    b"/.",
    b"/x/..",
    b"%2f",
    b"\\",
    b"/%2e%2e%2f",
    b";p=1",
    b"%00",
    b"%20",
)

Read = Callable[[bytes], bytes | None]


def spelling(rng: random.Random, prefix: bytes, path: bytes) -> bytes:
    """One more way to write `prefix + path`, or nearly."""
    segments = [_escaped(rng, segment) for segment in path.split(b"/")[1:]]
    made = prefix
    while rng.random() < 0.5:
        made += rng.choice(AROUND)
    for segment in segments:
        made += (rng.choice(SLASHES) if rng.random() < 0.4 else b"/") + segment
    return made + rng.choice(BEHIND)


def _escaped(rng: random.Random, segment: bytes) -> bytes:
    if rng.random() < 0.6:
        return segment
    form = rng.choice((b"%%%02x", b"%%%02X"))
    return b"".join(form % code if rng.random() < 0.3 else bytes((code,)) for code in segment)


# Servers. Each takes the path as it comes, without its query, and gives what it matches on; None: it refuses.


def _fold(segments: Iterable[bytes], *, merge: bool, strict: bool) -> bytes | None:
    kept: list[bytes] = []
    for segment in segments:
        if segment == b"..":
            if not kept and strict:
                return None
            del kept[-1:]
        elif segment != b"." and (segment or not merge):
            kept.append(segment)
    return b"/" + b"/".join(kept)


def as_it_comes(path: bytes) -> bytes | None:
    """A router that compares bytes."""
    return path


def decoded(path: bytes) -> bytes | None:
    """WSGI and most frameworks: escapes decoded, nothing folded."""
    return unquote_to_bytes(path)


def folded_then_decoded(path: bytes) -> bytes | None:
    """RFC 3986 section 5.2.4, then the router of a framework."""
    folded = _fold(path[1:].split(b"/"), merge=False, strict=False)
    return None if folded is None else unquote_to_bytes(folded)


def nginx(path: bytes) -> bytes | None:
    """Escapes decoded first, slashes merged, dots folded; above the root is refused, and so is NUL."""
    plain = unquote_to_bytes(path)
    return None if b"\0" in plain else _fold(plain[1:].split(b"/"), merge=True, strict=True)


def lenient(path: bytes) -> bytes | None:
    """As nginx, but `..` at the root stays there."""
    return _fold(unquote_to_bytes(path)[1:].split(b"/"), merge=True, strict=False)


def unmerged(path: bytes) -> bytes | None:
    """As nginx with `merge_slashes off`."""
    return _fold(unquote_to_bytes(path)[1:].split(b"/"), merge=False, strict=False)


def kept_escapes(path: bytes) -> bytes | None:
    """A backslash is a slash; an escaped slash is none (`AllowEncodedSlashes NoDecode`)."""
    parts = path.replace(b"\\", b"/")[1:].split(b"/")
    segments = [unquote_to_bytes(part.replace(b"%2f", b"%252f").replace(b"%2F", b"%252F")) for part in parts]
    return _fold(segments, merge=True, strict=False)


def backslashes(path: bytes) -> bytes | None:
    """Servers of one system: a backslash is a slash, escaped or not."""
    return _fold(unquote_to_bytes(path).replace(b"\\", b"/")[1:].split(b"/"), merge=True, strict=False)


SERVERS: tuple[Read, ...] = (
    as_it_comes,
    decoded,
    folded_then_decoded,
    nginx,
    lenient,
    unmerged,
    kept_escapes,
    backslashes,
)


def taken_for(target: bytes, send: re.Pattern[bytes]) -> list[str]:
    """The servers that take `target` for a path that `send` matches; a slash at its end does not count."""
    path = target.partition(b"?")[0]
    found = ((server.__name__, server(path)) for server in SERVERS)
    return [name for name, read in found if read is not None and send.fullmatch(read.rstrip(b"/") or b"/")]


def pairs(*texts: bytes) -> set[tuple[bytes, bytes]]:
    """Every pair that any reader of forms may find in query or content, whatever separates them."""
    found: set[tuple[bytes, bytes]] = set()
    for text in texts:
        for separator in ("&", ";"):
            read = parse_qsl(text, keep_blank_values=True, separator=separator)
            found |= {(bytes(name), bytes(value)) for name, value in read}
    return found
