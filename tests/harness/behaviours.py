"""What the scripted upstream does with one request: answers, and every way to misbehave, by name."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.waiting import scaled
from harness.wire import Field, Pairs, Text, every, first, to_bytes, to_fields


@dataclass(slots=True)
class Received:
    """A request as it came. `at_s`: the loop's clock; `connection`: 1 for the first; `whole`: all of it was read."""

    method: bytes
    target: bytes
    fields: tuple[Field, ...]
    head: bytes
    at_s: float
    connection: int
    content: bytes = b""
    whole: bool = False

    def first(self, name: Text) -> bytes | None:
        """The first value of the field `name`, or None."""
        return first(self.fields, name)

    def every(self, name: Text) -> list[bytes]:
        """All values of the field `name`."""
        return every(self.fields, name)


class At(StrEnum):
    """When a behaviour acts: on the new connection, after the head, after the whole request."""

    ACCEPT = "accept"
    HEAD = "head"
    CONTENT = "content"


@dataclass(slots=True)
class Turn:
    """What a behaviour acts on: one connection and, but for `At.ACCEPT`, the request just read."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    request: Received | None = None
    number: int = 0

    async def write(self, data: bytes) -> None:
        """Write exactly these bytes."""
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """End the connection with an RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


# True: the connection waits for its next request. False: it is closed.
Act = Callable[[Turn], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the upstream does with one request, and when."""

    act: Act
    at: At = At.CONTENT


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


def _head(status: int, reason: Text | None, fields: Sequence[Field]) -> bytes:
    phrase = _reason(status) if reason is None else to_bytes(reason)
    lines = [b"HTTP/1.1 %d %s" % (status, phrase), *(name + b": " + value for name, value in fields)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _numbered(turn: Turn) -> bytes:
    return json.dumps({"object": "email", "id": f"upstream-{turn.number}"}).encode()


def answer(
    status: int = 200, fields: Pairs = (), content: bytes | None = None, reason: Text | None = None
) -> Behaviour:
    """A complete answer. Without `content`: JSON with an id that no other answer has.

    Adds Content-Length where the content needs one and `fields` name none; nothing else (no Date, no Server).
    """

    async def act(turn: Turn) -> bool:
        sent = to_fields(fields)
        body = content
        if body is None:
            body = _numbered(turn)
            if first(sent, b"content-type") is None:
                sent.append((b"Content-Type", b"application/json"))
        bare = status in (204, 304) or (turn.request is not None and turn.request.method == b"HEAD")
        if status not in (204, 304) and first(sent, b"content-length") is None:
            sent.append((b"Content-Length", b"%d" % len(body)))
        await turn.write(_head(status, reason, sent) + (b"" if bare else body))
        return (first(sent, b"connection") or b"").lower() != b"close"

    return Behaviour(act)


def slow(delay_s: float, then: Behaviour | None = None) -> Behaviour:
    """Waits `delay_s` (scaled), then behaves as `then` (a plain answer)."""

    async def act(turn: Turn) -> bool:
        await asyncio.sleep(scaled(delay_s))
        return await (then or answer()).act(turn)

    return Behaviour(act)


def gate(event: asyncio.Event, then: Behaviour | None = None) -> Behaviour:
    """Waits until the test sets `event`, then behaves as `then` (a plain answer)."""

    async def act(turn: Turn) -> bool:
        await event.wait()
        return await (then or answer()).act(turn)

    return Behaviour(act)


def stall() -> Behaviour:
    """Never answers; keeps the connection until the other side leaves."""

    async def act(turn: Turn) -> bool:
        await turn.reader.read()
        return False

    return Behaviour(act)


def reset_after_content() -> Behaviour:
    """Reads the whole request, then RST."""

    async def act(turn: Turn) -> bool:
        turn.reset()
        return False

    return Behaviour(act)


def close_after_content() -> Behaviour:
    """Reads the whole request, then an orderly end without a byte."""

    async def act(turn: Turn) -> bool:
        return False

    return Behaviour(act)


def reset_on_accept() -> Behaviour:
    """RST as soon as a connection is made (or, on a connection that already stands, before the content)."""

    async def act(turn: Turn) -> bool:
        turn.reset()
        return False

    return Behaviour(act, At.ACCEPT)


def cut_content(content: bytes = b'{"id": "cut"}', keep: int = 5, *, reset: bool = False) -> Behaviour:
    """Declares all of `content`, sends its first `keep` bytes, then ends: FIN, or RST with `reset`."""

    async def act(turn: Turn) -> bool:
        fields = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(content))]
        await turn.write(_head(200, None, fields) + content[:keep])
        if reset:
            turn.reset()
        return False

    return Behaviour(act)


def cut_chunks(pieces: Sequence[bytes] = (b'{"id":',)) -> Behaviour:
    """Sends `pieces` as chunks and ends without the last one."""

    async def act(turn: Turn) -> bool:
        await turn.write(_head(200, None, [(b"Transfer-Encoding", b"chunked")]))
        for piece in pieces:
            await turn.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        return False

    return Behaviour(act)


def chunked(pieces: Sequence[bytes], gap_s: float = 0.0, fields: Pairs = (), trailer: bytes = b"") -> Behaviour:
    """A complete answer in chunks, `gap_s` (scaled) between them."""

    async def act(turn: Turn) -> bool:
        await turn.write(_head(200, None, [*to_fields(fields), (b"Transfer-Encoding", b"chunked")]))
        for piece in pieces:
            await turn.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await asyncio.sleep(scaled(gap_s))
        await turn.write(b"0\r\n" + trailer + b"\r\n")
        return True

    return Behaviour(act)


def early(status: int = 413, fields: Pairs = (), content: bytes = b"") -> Behaviour:
    """Answers after the head, reads the rest without counting it, and closes."""

    async def act(turn: Turn) -> bool:
        await answer(status, [*fields, ("Connection", "close")], content).act(turn)
        # An end with bytes unread would be an RST, which can overtake the answer.
        with contextlib.suppress(OSError):
            turn.writer.write_eof()
            while await turn.reader.read(65536):
                pass
        return False

    return Behaviour(act, At.HEAD)


def raw_answer(data: bytes, *, keep: bool = False) -> Behaviour:
    """Writes exactly `data`, then closes, or goes on with `keep`."""

    async def act(turn: Turn) -> bool:
        await turn.write(data)
        return keep

    return Behaviour(act)


def echo() -> Behaviour:
    """Answers 200 with the content of the request and its Content-Type."""

    async def act(turn: Turn) -> bool:
        assert turn.request is not None
        kind = turn.request.first(b"content-type") or b"application/octet-stream"
        return await answer(200, [(b"Content-Type", kind)], turn.request.content).act(turn)

    return Behaviour(act)


def interim(status: int = 103, fields: Pairs = (), then: Behaviour | None = None) -> Behaviour:
    """An interim answer, then `then` (a plain answer)."""

    async def act(turn: Turn) -> bool:
        await turn.write(_head(status, None, to_fields(fields)))
        return await (then or answer()).act(turn)

    return Behaviour(act)


def close_idle(then: Behaviour | None = None, *, reset: bool = False) -> Behaviour:
    """Answers as if the connection stayed, then closes it: FIN, or RST with `reset`."""

    async def act(turn: Turn) -> bool:
        await (then or answer()).act(turn)
        if reset:
            turn.reset()
        return False

    return Behaviour(act)
