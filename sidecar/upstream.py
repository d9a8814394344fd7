"""One send to an upstream: exact bytes, no repeat, and what is known about its outcome.

*Not sent* is what failed before the first byte was handed to a transport; everything later is *lost* until a
complete answer has been read. There is no third class, and no second attempt: that is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sidecar.config import Origin, Timeout
from sidecar.connection import Connection
from sidecar.dialer import Dialer
from sidecar.errors import NotSentError
from sidecar.incoming import Incoming
from sidecar.message import HOP_BY_HOP, Field, Fields, connection_options, first
from sidecar.pool import Pool
from sidecar.resolve import Resolver

__all__ = ["Fence", "Incoming", "Outgoing", "Upstream", "outgoing_fields"]

# Head and this much content leave in one write: nearly every mail is one segment train, one system call.
FIRST_BYTES = 64 * 1024
# Of one hop, or made by us: none of them goes upstream as the client wrote it.
OURS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
Rest = Iterator[bytes] | AsyncIterable[bytes]
LAST_CHUNK = b"0\r\n\r\n"
# How often a fence that has died again is renewed for one send; each renewal is a command to the store.
RENEWALS = 3


class Fence(Protocol):
    """The owner's permission to write the first byte: its lease, as its own clock shows it."""

    def alive(self) -> bool:
        """Whether the first byte may leave now. Asked right before the write, nothing in between."""

    async def renew(self) -> None:
        """Make it alive again.

        Raises: NotSentError where this process is not the owner, or cannot ask.
        """


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as it is written: `fields` are complete, with Host and framing (`outgoing_fields`).

    `content`: its pieces, written as they are, or with `chunked` each as a chunk.
    """

    method: bytes
    target: bytes
    fields: Fields
    content: Iterable[bytes] | AsyncIterable[bytes] = ()
    chunked: bool = False


def outgoing_fields(fields: Fields, *, host: bytes, content_length: int | None) -> Fields:
    """The fields to write for a client's `fields`: end-to-end ones, in order and case, without Expect.

    `host` replaces the value of Host; `content_length` that of Content-Length, None means chunked. Each stays where
    the client had it; a missing Host comes first, a missing length last, and only where content asks for one.
    """
    named = connection_options(fields)
    missing = {b"host": host}
    if content_length is None:
        missing[b"transfer-encoding"] = b"chunked"
    else:
        missing[b"content-length"] = b"%d" % content_length
    kept: list[Field] = []
    for name, value in fields:
        low = name.lower()
        if low in missing:
            kept.append((name, missing.pop(low)))
        elif low not in OURS and low not in named:
            kept.append((name, value))
    if b"host" in missing:
        kept.insert(0, (b"Host", host))
    if b"transfer-encoding" in missing:
        kept.append((b"Transfer-Encoding", b"chunked"))
    if b"content-length" in missing and (content_length or first(fields, b"transfer-encoding") is not None):
        kept.append((b"Content-Length", missing[b"content-length"]))
    return tuple(kept)


class Upstream:
    """The upstream of one route, with connections of its own; for one event loop."""

    def __init__(
        self,
        origin: Origin,
        *,
        timeout: Timeout,
        keepalive_s: float,
        ca: str = "",
        header_bytes: int,
        resolver: Resolver | None = None,
    ) -> None:
        """`keepalive_s`: how long a connection may be idle; `header_bytes`: bound of an answer's head.

        `ca`: file of the authorities to trust instead of the system's. `resolver`: may be shared by many upstreams.

        Raises: OSError where `ca` cannot be read as certificates.
        """
        self._timeout = timeout
        self._header_bytes = header_bytes
        self._pool = Pool(keepalive_s=keepalive_s)
        self._dialer = Dialer(origin, ca=ca, resolver=resolver or Resolver(), pool=self._pool)

    async def send(self, outgoing: Outgoing, *, fence: Fence | None = None, whole: bool = True) -> Incoming:
        """Write `outgoing` once and wait for the head of its answer.

        With `whole`, `timeout.total_s` runs from the first byte written to the last byte of the answer. Without
        (a request passed through), it bounds each silence of the upstream. Cancelled, it ends the connection.

        Raises: NotSentError while nothing was written, LostError after that; what `outgoing.content` raises.
        """
        opening, rest, left = _first_write(outgoing)
        incoming = Incoming(
            head_request=outgoing.method == b"HEAD",
            header_bytes=self._header_bytes,
            total_s=self._timeout.total_s,
            whole=whole,
        )
        connection = await self._begin(incoming, opening, fence)
        # The first byte was written. From here on the upstream may have accepted, whatever happens to us.
        try:
            if rest is None:
                incoming.uploaded()
            else:
                upload = _upload(incoming, connection, rest, left)
                incoming.upload(asyncio.get_running_loop().create_task(upload))
            await incoming.head()
        except BaseException:
            incoming.abandon()
            raise
        return incoming

    async def _begin(self, incoming: Incoming, opening: bytes, fence: Fence | None) -> Connection:
        """Write `opening` on a connection that is fit for it, while the fence is alive.

        Raises: NotSentError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout.connect_s
        for _ in range(RENEWALS + 1):
            connection = self._pool.take(loop.time())
            if connection is None:
                connection = await self._dialer.open(deadline)
            # From the look at the connection to the write no loop turn passes: neither can an end that has been
            # seen go unnoticed, nor can this process have been away unless it was frozen right here.
            if fence is None or fence.alive():
                try:
                    incoming.begin(connection, opening)
                except ssl.SSLError as exc:  # no record was made of it: the transport never saw a byte
                    connection.abort()
                    raise NotSentError("tls_protocol_error") from exc
                return connection
            # To the pool and back: while the store is asked, others may use it, or the upstream may close it.
            self._pool.give(connection, loop.time())
            await fence.renew()
        raise NotSentError("proxy_internal_error")

    async def close(self) -> None:
        """Close idle connections, wait for those in use, keep none any more; cancelled, end all at once.

        A send that comes later, of a request that began before a new configuration did, still works.
        """
        await self._pool.close()


def _first_write(outgoing: Outgoing) -> tuple[bytes, Rest | None, int | None]:
    """The head with as much content as goes into one write; the rest, if any, and its length (None: chunks).

    Raises: ValueError where the head would not stay one head, or the content is not as long as it says.
    """
    lines = [b"%b %b HTTP/1.1\r\n" % (outgoing.method, outgoing.target)]
    lines += [b"%b: %b\r\n" % field for field in outgoing.fields]
    lines.append(b"\r\n")
    head = b"".join(lines)
    # The last guard: whoever let a line break through, no field becomes two and no request a second one.
    if not head.count(b"\r") == head.count(b"\n") == len(lines) or b"\0" in head:
        raise ValueError("a line break or NUL within the head")
    left = None if outgoing.chunked else int(first(outgoing.fields, b"content-length") or 0)
    if isinstance(outgoing.content, AsyncIterable):
        return head, outgoing.content, left  # its first piece may take as long as it likes: the head goes ahead
    parts = [head]
    size = 0
    pieces = iter(outgoing.content)
    for piece in pieces:
        left = _after(piece, left)
        parts.append(_framed(piece, left))
        size += len(piece)
        if size >= FIRST_BYTES:
            return b"".join(parts), pieces, left
    parts.append(_last(left))
    return b"".join(parts), None, 0


def _after(piece: bytes, left: int | None) -> int | None:
    """How much content may follow `piece`. One byte too many would be read as the next request.

    Raises: ValueError.
    """
    if left is None:
        return None
    if len(piece) > left:
        raise ValueError("more content than declared")
    return left - len(piece)


def _framed(piece: bytes, left: int | None) -> bytes:
    # An empty chunk would be the last one.
    return b"%x\r\n%b\r\n" % (len(piece), piece) if left is None and piece else piece


def _last(left: int | None) -> bytes:
    """What ends the content. With bytes missing, the next request would be read as these.

    Raises: ValueError.
    """
    if left:
        raise ValueError("less content than declared")
    return LAST_CHUNK if left is None else b""


async def _each(pieces: Rest) -> AsyncIterator[bytes]:
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
    else:
        for piece in pieces:
            yield piece


async def _upload(incoming: Incoming, connection: Connection, rest: Rest, left: int | None) -> None:
    """Write the rest of a request, at the upstream's pace; cancelled when the answer has ended."""
    try:
        async for piece in _each(rest):
            left = _after(piece, left)
            await connection.ready_for_more()
            if incoming.over:
                return
            connection.write(_framed(piece, left))
            incoming.progress()
        last = _last(left)
        if incoming.over:
            return
        connection.write(last)
        incoming.uploaded()
    except asyncio.CancelledError:
        incoming.abandon()  # without effect where the answer's end cancelled us
        raise
    except ssl.SSLError as exc:
        incoming.broke(exc)
    except Exception as exc:  # noqa: BLE001 - whatever reading the client raises is for who awaits the answer
        incoming.upload_failed(exc)
