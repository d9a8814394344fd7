"""A raw HTTP client: writes exactly the bytes it is given, reads one answer at a time, can leave in any way."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from harness.waiting import scaled
from harness.wire import (
    HEAD_LIMIT_BYTES,
    Field,
    Pairs,
    Text,
    every,
    first,
    is_chunked,
    read_content,
    read_head,
    to_bytes,
    to_fields,
)

DEADLINE_S = 10.0


class NoAnswerError(AssertionError):
    """The connection ended before a complete answer; `head` is that of the answer where at least it was read."""

    def __init__(self, reason: str, head: bytes = b"") -> None:
        """`reason`: one clause for the failed test."""
        super().__init__(reason)
        self.head = head


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer: its fields in order and count, its content unchunked. `interim`: statuses of 1xx before it."""

    status: int
    reason: bytes
    fields: tuple[Field, ...]
    content: bytes
    head: bytes
    interim: tuple[int, ...] = ()

    def first(self, name: Text) -> bytes | None:
        """The first value of the field `name`, or None."""
        return first(self.fields, name)

    def every(self, name: Text) -> list[bytes]:
        """All values of the field `name`."""
        return every(self.fields, name)

    def json(self) -> Any:
        """The content as JSON."""
        return json.loads(self.content)

    @property
    def slug(self) -> str:
        """The last part of a problem's `type`; empty where the answer is no problem of ours."""
        if b"json" not in (self.first(b"content-type") or b""):
            return ""
        problem = self.json()
        kind = problem.get("type", "") if isinstance(problem, dict) else ""
        return str(kind).rpartition(":")[2]

    @property
    def replayed(self) -> bool:
        """Whether it carries the mark of a replay."""
        return self.first(b"idempotent-replayed") == b"true"


def request(
    method: Text = "POST",
    target: Text = "/mail/emails",
    fields: Pairs = (),
    content: bytes = b"",
    *,
    key: Text | None = None,
    host: Text | None = "sidecar.test",
) -> bytes:
    """A whole request as bytes, with Host, the key and Content-Length where `fields` name none."""
    sent = to_fields(fields)
    if host is not None and first(sent, b"host") is None:
        sent.insert(0, (b"Host", to_bytes(host)))
    if key is not None:
        sent.append((b"Idempotency-Key", to_bytes(key)))
    wants_length = bool(content) or to_bytes(method) in (b"POST", b"PUT", b"PATCH")
    if wants_length and first(sent, b"content-length") is None and not is_chunked(sent):
        sent.append((b"Content-Length", b"%d" % len(content)))
    lines = [to_bytes(method) + b" " + to_bytes(target) + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in sent]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


class Client:
    """One connection. `async with await Client.open(base) as client: answer = await client.ask(request(...))`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `open`."""
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, base: str, tls: ssl.SSLContext | None = None) -> Self:
        """Connect to `http://host:port`, `https://host:port` (with `tls`) or `unix:/path`.

        Raises: OSError when nobody listens.
        """
        if base.startswith("unix:"):
            path = base.removeprefix("unix:").replace("///", "/", 1)
            return cls(*await asyncio.open_unix_connection(path, limit=HEAD_LIMIT_BYTES))
        parts = urlsplit(base)
        pair = await asyncio.open_connection(parts.hostname, parts.port, limit=HEAD_LIMIT_BYTES, ssl=tls)
        return cls(*pair)

    async def send(self, data: bytes) -> None:
        """Write exactly these bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def send_pieces(self, pieces: Iterable[bytes], gap_s: float = 0.0) -> None:
        """Write the pieces one by one, `gap_s` (scaled) after each; 0 still gives each a turn of the loop."""
        for piece in pieces:
            await self.send(piece)
            await asyncio.sleep(scaled(gap_s))

    async def answer(self, *, head_only: bool = False, deadline_s: float = DEADLINE_S) -> Parsed:
        """The next answer; `head_only` for the answer to a HEAD. `deadline_s` is scaled.

        Raises: NoAnswerError when the connection ends first, TimeoutError when nothing comes.
        """
        async with asyncio.timeout(scaled(deadline_s)):
            return await self._answer(head_only)

    async def ask(self, data: bytes, *, deadline_s: float = DEADLINE_S) -> Parsed:
        """Write a request and read its answer.

        Raises: as `answer`.
        """
        await self.send(data)
        return await self.answer(head_only=data.startswith(b"HEAD "), deadline_s=deadline_s)

    async def _answer(self, head_only: bool) -> Parsed:
        interim: list[int] = []
        raw_head = b""
        try:
            while True:
                head = await read_head(self.reader)
                if head is None:
                    raise NoAnswerError("the connection ended without an answer")
                raw_head = head.raw
                _version, code, reason = (head.start + b"  ").split(b" ", 2)
                status = int(code)
                if status >= 200 or status == 101:
                    break
                interim.append(status)
            bare = head_only or status in (101, 204, 304)
            content = b"" if bare else await read_content(self.reader, head.fields, to_end=True)
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise NoAnswerError(f"the connection ended within an answer: {exc}", raw_head) from exc
        return Parsed(status, reason.rstrip(b" "), head.fields, content, head.raw, tuple(interim))

    async def rest(self, deadline_s: float = DEADLINE_S) -> bytes:
        """Everything until the other side ends the connection (a reset counts as an end).

        Raises: TimeoutError when it does not within `deadline_s` (scaled).
        """
        parts: list[bytes] = []
        async with asyncio.timeout(scaled(deadline_s)):
            try:
                while part := await self.reader.read(65536):
                    parts.append(part)
            except ConnectionError:
                pass
        return b"".join(parts)

    def half_close(self) -> None:
        """End our direction (FIN) and go on reading."""
        self.writer.write_eof()

    def abort(self) -> None:
        """Leave with an RST, unread and unwritten bytes included."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """Leave in order (FIN). May be called twice."""
        self.writer.close()

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave in order."""
        self.close()


async def raw(base: str, data: bytes, *, deadline_s: float = DEADLINE_S, tls: ssl.SSLContext | None = None) -> Parsed:
    """Write exactly `data` on a connection of its own and read one answer.

    Raises: NoAnswerError, TimeoutError, OSError as `Client`.
    """
    async with await Client.open(base, tls) as client:
        return await client.ask(data, deadline_s=deadline_s)


async def raw_bytes(base: str, data: bytes, *, deadline_s: float = DEADLINE_S) -> bytes:
    """Write exactly `data` and read until the other side ends the connection.

    Raises: TimeoutError, OSError as `Client`.
    """
    async with await Client.open(base) as client:
        await client.send(data)
        return await client.rest(deadline_s)


async def together(base: str, requests: Sequence[bytes], deadline_s: float = DEADLINE_S) -> list[Parsed]:
    """Send all `requests` at once: every connection stands before the first byte of any is written.

    Raises: as `raw`.
    """
    clients = await asyncio.gather(*(Client.open(base) for _ in requests))
    try:
        for client, data in zip(clients, requests, strict=True):
            client.writer.write(data)
        return await asyncio.gather(
            *(
                client.answer(head_only=data.startswith(b"HEAD "), deadline_s=deadline_s)
                for client, data in zip(clients, requests, strict=True)
            )
        )
    finally:
        for client in clients:
            client.close()
