"""What is no protected send: passed through, streamed both ways, unchanged and never recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sidecar.arrival import Arrival
from sidecar.config import Route, UpstreamHost
from sidecar.content import Content
from sidecar.errors import LostError, NotSentError, Outcome, ProblemError, Sent
from sidecar.message import end_to_end, first
from sidecar.protocol import malformed
from sidecar.server import NO_CONTENT, Inbound
from sidecar.upstream import Incoming, Outgoing, outgoing_fields

# RFC 9110 section 9.2.1: methods that ask for no action, so that a lost answer loses nothing.
SAFE = (b"GET", b"HEAD", b"OPTIONS")


async def pass_through(arrival: Arrival, content: Content | None) -> None:
    """Forward one request and stream its answer back. `content`: where it has been read already.

    Raises: ProblemError, while nothing was written to the client; ConnectionError where it left.
    """
    assert arrival.upstream is not None
    outgoing = _outgoing(arrival, content)
    inbound = arrival.inbound
    if content is None:
        inbound.go_on()
    arrival.begun = True
    try:
        incoming = await arrival.upstream.send(outgoing, whole=False)
    except NotSentError as exc:
        raise _unreachable(exc) from exc
    except LostError as exc:
        raise _lost(inbound, exc) from exc
    arrival.status = incoming.status
    await _stream(inbound, incoming)


async def _stream(inbound: Inbound, incoming: Incoming) -> None:
    try:
        bare = inbound.method == b"HEAD" or incoming.status in NO_CONTENT
        chunked = not bare and incoming.length is None and not inbound.http10
        if not bare and incoming.length is None and inbound.http10:
            inbound.end_connection()  # an HTTP/1.0 client knows no chunks: the end of the connection is the end
        if inbound.unread:
            inbound.end_connection()
        head = inbound.head(
            incoming.status,
            incoming.reason,
            end_to_end(incoming.fields),
            length=_length(incoming, bare),
            chunked=chunked,
        )
        await inbound.write(head)
        async for piece in incoming.pieces():
            await inbound.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            await inbound.write(b"0\r\n\r\n")
    except LostError:
        inbound.abort()  # the client has part of an answer: it must see that it is no whole one
    except BaseException:
        incoming.abandon()
        raise


def _length(incoming: Incoming, bare: bool) -> int | None:
    """The Content-Length of the way back: of an answer to HEAD, or a 304, it is the upstream's own word."""
    if not bare:
        return incoming.length
    if incoming.status == 204:
        return None
    declared = first(incoming.fields, b"content-length")
    return int(declared) if declared is not None and declared.isdigit() else None


def _outgoing(arrival: Arrival, content: Content | None) -> Outgoing:
    match, inbound = arrival.match, arrival.inbound
    assert match is not None
    fields = inbound.fields
    chunked = content is None and first(fields, b"transfer-encoding") is not None
    if content is not None:
        length: int | None = content.size
    else:
        length = None if chunked else int(first(fields, b"content-length") or 0)
    return Outgoing(
        method=inbound.method,
        target=match.target,
        fields=outgoing_fields(fields, host=_host(match.route, inbound), content_length=length),
        content=_pieces(arrival) if content is None else content.pieces(),
        chunked=chunked,
    )


def _host(route: Route, inbound: Inbound) -> bytes:
    preserved = first(inbound.fields, b"host") if route.upstream_host is UpstreamHost.PRESERVE else None
    return route.upstream.authority if preserved is None else preserved


async def _pieces(arrival: Arrival) -> AsyncIterator[bytes]:
    assert arrival.match is not None
    silence_s = arrival.match.route.timeout.receive_s
    while True:
        try:
            async with asyncio.timeout(silence_s):
                piece = await arrival.inbound.piece()
        except TimeoutError as exc:
            # The upstream has a part of it and gets no more: its connection is closed, so it reads no whole request.
            raise malformed("The content did not arrive in time.", 408) from exc
        if not piece:
            return
        arrival.content_bytes += len(piece)
        yield piece


def _unreachable(exc: NotSentError) -> ProblemError:
    return ProblemError(
        Outcome.UPSTREAM_UNREACHABLE,
        f"Not a byte was sent ({exc.reason}). Repeat the same request.",
        proxy_status=exc.reason,
    )


def _lost(inbound: Inbound, exc: LostError) -> ProblemError:
    if inbound.method in SAFE:
        return ProblemError(
            Outcome.UPSTREAM_UNREACHABLE,
            f"No complete answer came ({exc.reason}). Repeat the same request.",
            proxy_status=exc.reason,
            sent=Sent.NO,
        )
    return ProblemError(
        Outcome.OUTCOME_UNKNOWN,
        "The request was sent and no complete answer came. It has no key, so a repeat is sent again.",
        proxy_status=exc.reason,
    )
