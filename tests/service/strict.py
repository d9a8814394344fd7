"""What HTTP/1.1 allows to be said, and not a byte more: the strict reader of answers, and of what upstreams get."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.wire import Field, first, split_head

STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-9][0-9]{2} [\t\x20-\x7e\x80-\xff]*")
# RFC 9110 sections 5.1 and 5.5, RFC 9112 section 3.
TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
FIELD_NAME = re.compile(TOKEN)
FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
REQUEST_LINE = re.compile(TOKEN + rb" (?:/[!-~]*|\*) HTTP/1\.1")


@dataclass(frozen=True, slots=True)
class Read:
    """One answer as it was read. `whole` is False where the connection ended within its content."""

    status: int
    fields: tuple[Field, ...]
    content: bytes
    whole: bool


def answers(data: bytes) -> list[Read]:
    """The answers in `data`, interim ones left out; the last one may be cut.

    Raises: ValueError where it is anything else.
    """
    found = []
    while data:
        head, blank, rest = data.partition(b"\r\n\r\n")
        if not blank:
            raise ValueError(f"half a head: {data[:200]!r}")
        status, fields = _head(head + blank)
        if status >= 200:
            read, rest = _content(status, fields, rest)
            found.append(read)
        elif rest.startswith(b"HTTP/1.1 1"):
            raise ValueError("two interim answers")
        data = rest
    return found


def check_fields(fields: tuple[Field, ...]) -> None:
    """Raises: ValueError where one of them is no field."""
    for name, value in fields:
        if not FIELD_NAME.fullmatch(name) or not FIELD_VALUE.fullmatch(value):
            raise ValueError(f"no field: {name!r}: {value!r}")


def _head(raw: bytes) -> tuple[int, tuple[Field, ...]]:
    head = split_head(raw)
    if not STATUS_LINE.fullmatch(head.start):
        raise ValueError(f"no status line: {head.start!r}")
    check_fields(head.fields)
    return int(head.start[9:12]), head.fields


def _content(status: int, fields: tuple[Field, ...], rest: bytes) -> tuple[Read, bytes]:
    framings = [name.lower() for name, _ in fields if name.lower() in (b"content-length", b"transfer-encoding")]
    if status in (204, 304):
        return Read(status, fields, b"", whole=True), rest
    if len(framings) > 1:
        raise ValueError(f"two framings: {fields}")
    if framings == [b"content-length"]:
        length = int(first(fields, b"content-length") or b"")
        return Read(status, fields, rest[:length], len(rest) >= length), rest[length:]
    if framings == [b"transfer-encoding"]:
        return _chunks(status, fields, rest)
    return Read(status, fields, rest, whole=True), b""


def _chunks(status: int, fields: tuple[Field, ...], rest: bytes) -> tuple[Read, bytes]:
    content = b""
    while True:
        size, end, rest = rest.partition(b"\r\n")
        if not end:
            return Read(status, fields, content, whole=False), b""
        length = int(size, 16)
        content += rest[:length]
        if len(rest) < length + 2:
            return Read(status, fields, content, whole=False), b""
        rest = rest[length + 2 :]
        if not length:
            return Read(status, fields, content, whole=True), rest


def check_request(head: bytes, authority: bytes) -> None:
    """What an upstream may get: one valid head for its own host, with at most one framing.

    Raises: ValueError.
    """
    parsed = split_head(head)
    if not REQUEST_LINE.fullmatch(parsed.start):
        raise ValueError(f"no request line: {parsed.start!r}")
    check_fields(parsed.fields)
    names = [name.lower() for name, _ in parsed.fields]
    if [value for name, value in parsed.fields if name.lower() == b"host"] != [authority]:
        raise ValueError(f"not its host: {parsed.fields}")
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise ValueError(f"two framings: {parsed.fields}")
