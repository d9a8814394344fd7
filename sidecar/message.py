"""Fields, requests and answers as values, and the field rules of RFC 9110 section 7.6.1.

Names, values and targets are bytes and stay bytes: what a client wrote is what the upstream reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

Field = tuple[bytes, bytes]
Fields = tuple[Field, ...]
# The name of a record: hexadecimal digits that tell neither key nor credential.
RecordId = NewType("RecordId", str)

# RFC 9110 section 7.6.1: an intermediary removes the fields named in Connection, and these.
# Trailer announces fields we drop (RFC 9110 section 6.5.1); Upgrade and Proxy-Connection are of one hop.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-authentication-info",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


def values(fields: Iterable[Field], name: bytes) -> list[bytes]:
    """All values of the field `name` (given in lower case), in order."""
    return [value for field, value in fields if field.lower() == name]


def first(fields: Iterable[Field], name: bytes) -> bytes | None:
    """The first value of the field `name` (given in lower case), or None."""
    for field, value in fields:
        if field.lower() == name:
            return value
    return None


def connection_options(fields: Iterable[Field]) -> frozenset[bytes]:
    """The options of all Connection fields, in lower case (RFC 9110 section 7.6.1)."""
    return frozenset(
        option
        for value in values(fields, b"connection")
        for part in value.split(b",")
        if (option := part.strip().lower())
    )


def end_to_end(fields: Fields) -> Fields:
    """The fields that travel on: hop-by-hop ones and those named in Connection are left out, order kept."""
    named = connection_options(fields)
    return tuple(
        (name, value) for name, value in fields if (low := name.lower()) not in HOP_BY_HOP and low not in named
    )


def media_type(fields: Iterable[Field]) -> bytes:
    """`type/subtype` of the content in lower case, without parameters; empty when there is none."""
    value = first(fields, b"content-type")
    return b"" if value is None else value.split(b";", 1)[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer: every end-to-end field in order and count, the content bytes as they came."""

    status: int
    reason: bytes
    fields: Fields
    content: bytes
