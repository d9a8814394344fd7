"""One request of a client as it came, and its answer as it leaves: head and content, byte for byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

from aiohttp import web

from sidecar.content import Content
from sidecar.errors import Outcome, ProblemError
from sidecar.message import Answer, Fields, first, values
from sidecar.protocol import HEAD_S, VERSIONS, Exact, Malformed, Written, malformed

# How much of an answer is handed to the transport before waiting for the client to take it.
PIECE_BYTES = 64 * 1024
# RFC 9110 section 6.4.1: answers that never have content.
NO_CONTENT = (204, 304)
# A client that takes nothing of its answer for so long has left, whatever its connection says.
SILENT_S = 60.0
AT_ONCE_BYTES = 32 * 1024
# RFC 3986 section 3.2.2, and an empty one, which RFC 9112 section 3.2 allows.
HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")

Handle = Callable[["Inbound"], Awaitable[bool]]


class Inbound:
    """One request as it came, and the way back to its client."""

    __slots__ = ("_closing", "_continued", "_keep_alive", "fields", "http10", "method", "request", "target")

    def __init__(self, request: web.BaseRequest, closing: Callable[[], bool]) -> None:
        """Reads nothing but the head. `closing` says whether connections are to end, whenever it is asked."""
        self.request = request
        self.method = request.method.encode("ascii")
        self.target = request.raw_path.encode("utf-8", "surrogateescape")
        self.fields: Fields = request.raw_headers
        self.http10 = request.version < (1, 1)
        self._keep_alive = request.keep_alive
        self._closing = closing
        self._continued = False

    @property
    def keep_alive(self) -> bool:
        """Whether the connection goes on after this request."""
        return self._keep_alive and not self._closing()

    def end_connection(self) -> None:
        """Let the connection end after this request."""
        self._keep_alive = False

    def check(self, header_bytes: int) -> int | None:
        """What RFC 9112 says of the head, beyond what the parser refused; the declared length, if any.

        Raises: ProblemError `request-malformed`.
        """
        if sum(len(name) + len(value) + 4 for name, value in self.fields) + len(self.target) > header_bytes:
            raise ProblemError(Outcome.REQUEST_MALFORMED, f"The head is longer than {header_bytes} bytes.", status=431)
        if self.request.version not in VERSIONS:
            raise malformed("The version must be HTTP/1.1 or HTTP/1.0.")
        hosts = values(self.fields, b"host")
        # RFC 9112 section 3.2: a request without exactly one Host field, or with an invalid one, is answered with 400.
        if len(hosts) > 1 or (not hosts and not self.http10):
            raise malformed("Send exactly one Host field.")
        if hosts and not HOST.fullmatch(hosts[0].strip()):
            raise malformed("The Host field is no host.")
        codings = values(self.fields, b"transfer-encoding")
        # RFC 9112 section 6.1 allows more codings than chunked; we undo none, so we take none.
        if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
            raise malformed("Transfer-Encoding must be chunked, or absent.")
        declared = first(self.fields, b"content-length")
        return None if declared is None else int(declared)

    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue`.

        Raises: ProblemError 417 for any other expectation (RFC 9110 section 10.1.1).
        """
        expectations = [value.strip().lower() for value in values(self.fields, b"expect")]
        if not expectations or self.http10:
            return False
        if expectations != [b"100-continue"]:
            raise ProblemError(Outcome.REQUEST_MALFORMED, "Only the expectation 100-continue is known.", status=417)
        return True

    def go_on(self) -> None:
        """Write `100 Continue`, once, where it is waited for."""
        transport = self.request.transport
        if not self._continued and transport is not None and self.expects_continue():
            self._continued = True
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def piece(self) -> bytes:
        """The next piece of the content, empty at its end.

        Raises: ProblemError where its framing is broken; ConnectionError where the client left.
        """
        try:
            return await self.request.content.readany()
        except (web.RequestPayloadError, ValueError) as exc:
            self.end_connection()
            raise malformed("The content's framing cannot be read.") from exc

    @property
    def unread(self) -> bool:
        """Whether content is left that nobody has read."""
        return not self.request.content.at_eof()

    # The way back.

    async def write(self, piece: bytes) -> None:
        """Hand bytes to the client and wait until it takes them.

        Raises: ConnectionError where it left, or took nothing for a minute.
        """
        transport = self.request.transport
        if transport is None or (transport.get_write_buffer_size() == 0 and len(piece) <= AT_ONCE_BYTES):
            await self.request.writer.write(piece)  # it fits below the transport's mark, so nothing waits
            return
        try:
            async with asyncio.timeout(SILENT_S):
                await self.request.writer.write(piece)
        except TimeoutError as exc:
            self.abort()
            raise ConnectionResetError("the client takes nothing") from exc

    async def answer(self, answer: Answer, content: Content | None = None) -> None:
        """Write a whole answer. `content` takes the place of the answer's own, where it is too large for one value.

        Raises: ConnectionError where the client left.
        """
        size = len(answer.content) if content is None else content.size
        bare = self.method == b"HEAD" or answer.status in NO_CONTENT
        head = self.head(
            answer.status, answer.reason, answer.fields, length=None if answer.status in NO_CONTENT else size
        )
        if bare:
            await self.write(head)
        elif size <= PIECE_BYTES:
            await self.write(head + (answer.content if content is None else content.whole()))
        else:
            await self.write(head)
            for piece in _pieces(answer.content) if content is None else content.pieces():
                await self.write(piece)

    def head(self, status: int, reason: bytes, fields: Fields, *, length: int | None, chunked: bool = False) -> bytes:
        """The bytes of an answer's head. `length`: the Content-Length, in its place or last; None for none."""
        lines = [b"HTTP/1.1 %d %b" % (status, reason)]
        for name, value in fields:
            if name.lower() == b"content-length":
                if length is not None:
                    lines.append(b"%b: %d" % (name, length))
                    length = None
                continue
            lines.append(b"%b: %b" % (name, value))
        if length is not None:
            lines.append(b"Content-Length: %d" % length)
        if chunked:
            lines.append(b"Transfer-Encoding: chunked")
        if not self.keep_alive:
            lines.append(b"Connection: close")
        elif self.http10:
            lines.append(b"Connection: keep-alive")
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    def abort(self) -> None:
        """Break the connection visibly: what was written so far is not a whole answer."""
        self.end_connection()
        if self.request.transport is not None:
            self.request.transport.abort()


def _pieces(content: bytes) -> Iterator[bytes]:
    """A content by pieces: the transport keeps a copy of what it could not write, and that is one piece then."""
    for at in range(0, len(content), PIECE_BYTES):
        yield content[at : at + PIECE_BYTES]


class Server(Exact):
    """Serves one data listener. `handle` writes the whole answer and says whether the connection may go on."""

    def __init__(
        self,
        handle: Handle,
        *,
        malformed: Malformed,
        closing: Callable[[], bool],
        header_bytes: int,
        head_s: float = HEAD_S,
    ) -> None:
        """`closing`: as in `Inbound`; the others as in `protocol.Exact`."""

        async def respond(request: web.BaseRequest) -> web.StreamResponse:
            inbound = Inbound(request, closing)
            go_on = await handle(inbound)
            return cast(web.StreamResponse, Written(go_on))

        super().__init__(respond, malformed=malformed, header_bytes=header_bytes, head_s=head_s)
