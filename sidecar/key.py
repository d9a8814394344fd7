"""Reading the idempotency key, finding the scope it is valid in, and naming the record of both. Pure."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType

from sidecar.config import Route
from sidecar.errors import Outcome, ProblemError
from sidecar.message import Fields, RecordId, values

IdempotencyKey = NewType("IdempotencyKey", bytes)
Scope = NewType("Scope", bytes)

BLANKS = b" \t"
# RFC 8941 section 3.3.3: a String is printable ASCII between quotes, where a backslash escapes a quote or a backslash.
SF_STRING = re.compile(rb'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
SF_ESCAPE = re.compile(rb'\\(["\\])')
# A printable ASCII text. We are stricter than RFC 9110: bytes above 0x7F have no one meaning, and two spellings of
# one key would be two mails.
PRINTABLE = re.compile(rb"[\x20-\x7e]*")
AWS_ACCESS_KEY = re.compile(rb"AWS4-[A-Z0-9-]+\s+(?:.*[\s,])?Credential=([^/,\s]+)/")


@dataclass(frozen=True, slots=True)
class Key:
    """A key and where it was found: keys of different sources never meet. `field_value`: as the client wrote it."""

    value: IdempotencyKey
    source: str
    field_value: bytes = b""


def _malformed(detail: str) -> ProblemError:
    return ProblemError(Outcome.KEY_MALFORMED, detail)


def parse(text: bytes, *, name: str, max_length: int) -> IdempotencyKey | None:
    """The key in a field value: bare text, or a structured-field String (Idempotency-Key draft, section 2.1).

    None where it is empty or blank. `max_length` counts the decoded key, in bytes.

    Raises: ProblemError `key-malformed`.
    """
    trimmed = text.strip(BLANKS)
    if not PRINTABLE.fullmatch(trimmed):
        raise _malformed(f"The key in {name} has control bytes or bytes beyond ASCII. Use printable ASCII.")
    if trimmed.startswith(b'"'):
        string = SF_STRING.fullmatch(trimmed)
        if string is None:
            raise _malformed(
                f"The key in {name} begins with a quote but is not one whole quoted string. Close the quote and put"
                " nothing behind it."
            )
        trimmed = SF_ESCAPE.sub(rb"\1", string[1])
    elif b"," in trimmed or b'"' in trimmed:
        # A proxy that joins two field lines makes `K1, K1`: a third key, and a second mail.
        raise _malformed(f"The key in {name} has a comma or a quote. Put it in quotes, or leave them out.")
    if len(trimmed) > max_length:
        raise _malformed(f"The key in {name} is longer than {max_length} characters.")
    return IdempotencyKey(trimmed) if trimmed else None


def find(route: Route, fields: Fields) -> Key | None:
    """The key in the field lines of a request, from the first source that has one.

    Raises: ProblemError `key-malformed`, also for more than one line of a key field.
    """
    rules = route.key
    for name in (rules.field, *rules.also):
        if name.startswith("/"):
            continue
        lines = values(fields, name.lower().encode("ascii"))
        if len(lines) > 1:
            raise _malformed(f"There is more than one {name} field. Send exactly one.")
        if not lines:
            continue
        key = parse(lines[0], name=name, max_length=rules.max_length)
        if key is not None and not ignored(route, key):
            source = "" if name == rules.field else f"field {name.lower()}"
            return Key(key, source, lines[0])
    return None


def find_in_content(route: Route, watched: Mapping[str, bytes]) -> Key | None:
    """The key in the members of the content that `key.also` names.

    Raises: ProblemError `key-malformed`.
    """
    for pointer in members(route):
        text = watched.get(pointer)
        if text is None:
            continue
        if not PRINTABLE.fullmatch(text) or len(text) > route.key.max_length:
            raise _malformed(
                f"The key in member {pointer} must be printable ASCII of at most {route.key.max_length} characters."
            )
        if not ignored(route, text):
            return Key(IdempotencyKey(text), f"member {pointer}")
    return None


def members(route: Route) -> tuple[str, ...]:
    """The JSON pointers among the sources of the key."""
    return tuple(name for name in route.key.also if name.startswith("/"))


def ignored(route: Route, key: bytes) -> bool:
    """Whether a pattern of `key.ignore` says that this key counts as absent."""
    return any(_pattern(text).fullmatch(key) for text in route.key.ignore)


@functools.lru_cache(maxsize=64)
def _pattern(text: str) -> re.Pattern[bytes]:
    return re.compile(text.encode("ascii"))


def framed(parts: Iterable[bytes]) -> bytes:
    """A digest of parts, each with its length in front, so that no crafted part can pose as two."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


def credential(route: Route, fields: Fields) -> bytes:
    """A digest of what says whose account this is; a field that is absent counts as absent, not as empty."""
    parts: list[bytes] = []
    for name in route.credential:
        found = _access_key(fields) if name == "aws-access-key" else values(fields, name.lower().encode("ascii"))
        parts.append(name.lower().encode("ascii"))
        parts.append(b"%d" % len(found))
        parts.extend(found)
    return framed(parts)


def _access_key(fields: Fields) -> list[bytes]:
    """AWS Signature V4: the access key id alone, since the rest changes with each attempt."""
    found = (AWS_ACCESS_KEY.match(value) for value in values(fields, b"authorization"))
    return [match[1] for match in found if match]


def scope(route: Route, fields: Fields) -> Scope:
    """What a key is valid in: the route, and what `scope:` adds to it."""
    parts = [route.name.encode()]
    for item in route.scope:
        parts.append(item.encode())
        if item == "credential":
            parts.append(credential(route, fields))
        elif item.startswith("field:"):
            found = values(fields, item.removeprefix("field:").lower().encode("ascii"))
            parts.append(b"%d" % len(found))
            parts.extend(found)
    return Scope(framed(parts))


def record_id(scope_: Scope, key: Key) -> RecordId:
    """The name of a record: 40 hexadecimal digits that tell neither key nor credential."""
    return RecordId(framed((scope_, key.source.encode(), key.value)).hex())
