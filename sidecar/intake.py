"""Steps 3 and 4 of the walk: the content, read whole and fingerprinted as it streams; nothing is sent before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.arrival import Arrival
from sidecar.config import Limits
from sidecar.content import Content, Memory, MemoryFullError
from sidecar.errors import Outcome, ProblemError
from sidecar.fingerprint import Fingerprinter
from sidecar.protocol import malformed

# How long a client should stay away when there is nothing better to say.
AWAY_S = 1.0


def of_this_request(text: str) -> str:
    """A detail about this request alone, of a problem that was found before its key's record was read."""
    return f"{text} This request was not sent; its key's record was not read."


def too_large(limits: Limits) -> ProblemError:
    """413: more content than `limits.request`."""
    return ProblemError(
        Outcome.CONTENT_TOO_LARGE,
        of_this_request(f"At most {limits.request_bytes} bytes of content are taken (limits.request)."),
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """A content that arrived whole. `watched`: what of it was asked for, by JSON pointer or form field."""

    content: Content
    fingerprint: bytes
    watched: Mapping[str, bytes]


async def take(arrival: Arrival, *, memory: Memory, limits: Limits, watch: tuple[str, ...]) -> Taken:
    """Read the content, a piece at a time; other requests run in between.

    Raises: ProblemError; ConnectionError where the client left.
    """
    assert arrival.match is not None
    match, inbound = arrival.match, arrival.inbound
    printer = Fingerprinter(
        match.route.fingerprint,
        route=match.route.name,
        method=inbound.method,
        path=match.path,
        query=match.query,
        fields=inbound.fields,
        watch=watch,
        limit_bytes=limits.request_bytes,
    )
    content = Content(memory)
    inbound.go_on()
    try:
        async with asyncio.timeout(match.route.timeout.receive_s):
            await _read(arrival, content, printer, limits)
        return Taken(content, bytes(printer.finish()), printer.watched())
    except TimeoutError as exc:
        content.close()
        raise malformed("The content did not arrive in time.", 408) from exc
    except MemoryFullError as exc:
        content.close()
        detail = of_this_request("There is no room for this content now (limits.memory).")
        raise ProblemError(Outcome.OVERLOADED, detail, retry_after_s=AWAY_S) from exc
    except BaseException:
        content.close()
        raise


async def _read(arrival: Arrival, content: Content, printer: Fingerprinter, limits: Limits) -> None:
    while piece := await arrival.inbound.piece():
        if content.size + len(piece) > limits.request_bytes:
            raise too_large(limits)
        content.write(piece)
        arrival.content_bytes = content.size
        for _ in printer.feed(piece):
            await asyncio.sleep(0)
