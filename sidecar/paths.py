"""The normalised copy of a path: what routes, `sends` and fingerprints compare. What is forwarded is never this.

Unreserved escapes decoded, dot segments folded, repeated and trailing slashes merged: many ways to write one path
become one, so that spelling a path otherwise never leads past what protects it.
"""

from __future__ import annotations

import re

# Without any of these a path is its own copy.
SPECIAL = re.compile(rb"[%\\]|//|/\.|/\Z")
ESCAPE = re.compile(rb"%[0-9A-Fa-f]{2}")
SLASHES = (re.compile(rb"%2[Ff]"), re.compile(rb"\\"), re.compile(rb"%5[Cc]"))

# RFC 3986 section 6.2.2.2: escapes of unreserved characters are decoded. We go further and decode all that
# may stand in a segment as they are (section 3.3, pchar), because servers do: nginx takes `a%3Ab` for `a:b`.
SEGMENT_CHARACTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@")
DECODED = {b"%%%02X" % code: bytes((code,)) if code in SEGMENT_CHARACTERS else b"%%%02X" % code for code in range(256)}

Segment = tuple[bytes, int]


def _decode(match: re.Match[bytes]) -> bytes:
    # RFC 3986 section 6.2.2.1: the hexadecimal digits of an escape are the same in both cases.
    return DECODED[match.group().upper()]


def fold(raw: bytes, *, merge: bool = True) -> list[Segment]:
    """The segments of the normalised copy, each with the offset in `raw` at which it ends.

    `raw` begins with a slash and has no query. An escaped slash is part of its segment, not a border.
    `merge=False`: an empty segment counts as one that `..` takes away, as in RFC 3986 section 5.2.4.
    """
    kept: list[Segment] = []
    end = 0
    for part in raw[1:].split(b"/"):
        end += 1 + len(part)
        segment = ESCAPE.sub(_decode, part) if b"%" in part else part
        if segment == b"..":
            if kept:
                kept.pop()
        elif segment != b"." and (segment or not merge):
            kept.append((segment, end))
    return kept if merge else [each for each in kept if each[0]]


def join(segments: list[Segment]) -> bytes:
    """The normalised copy as one value; `/` for none."""
    return b"/" + b"/".join(segment for segment, _ in segments)


def normalise(raw: bytes) -> bytes:
    """The normalised copy of a path; `raw` begins with a slash and has no query."""
    return raw if raw == b"/" or not SPECIAL.search(raw) else join(fold(raw))


def readings(raw: bytes) -> set[bytes]:
    """Every path a server may take `raw` for, beyond its normalised copy; empty for nearly all.

    Servers differ in these points: whether an empty segment counts before `..` takes one away, and whether an
    escaped slash, a backslash, or an escaped backslash is a slash, each for itself.
    """
    spellings = {raw}
    for kind in SLASHES:
        spellings |= {kind.sub(b"/", each) for each in spellings}
    found = {join(fold(each, merge=merge)) for each in spellings for merge in (True, False)}
    return found - {join(fold(raw))}
