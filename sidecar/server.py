"""aiohttp's HTTP server as this proxy needs it: exact bytes out, errors in our own words, nothing echoed.

What a client sent is read from aiohttp's parser; what it gets is written here, head and content, byte for byte.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, BadHttpMethod, LineTooLong
from aiohttp.web_protocol import RequestHandler

from sidecar.content import Content
from sidecar.errors import Outcome, ProblemError
from sidecar.message import Answer, Fields, first, values
from sidecar.problem import render

# Longer than any client keeps an idle connection: one that we close first is an error without a retry in several SDKs.
KEEP_ALIVE_S = 3630.0
MAX_FIELDS = 512
# How much of an answer is handed to the transport before waiting for the client to take it.
PIECE_BYTES = 64 * 1024
# RFC 9110 section 6.4.1: answers that never have content.
NO_CONTENT = (204, 304)
# RFC 3986 section 3.2.2, and an empty one, which RFC 9112 section 3.2 allows.
HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
# RFC 9110 section 5.6.2: what a method may look like, in the line that the parser quotes in its message as bytes.
METHOD = re.compile(r"b['\"][!#$%&'*+.^_`|~0-9A-Za-z-]+ ")

Handle = Callable[["Inbound"], Awaitable[bool]]
Malformed = Callable[[ProblemError], None]


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
        # The parser also reads HTTP/0.9 and 2.0, which nobody speaks on such a connection.
        if self.request.version not in ((1, 0), (1, 1)):
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
        """Hand bytes to the client and wait until it takes them. Raises: ConnectionError where it left."""
        await self.request.writer.write(piece)

    async def answer(self, answer: Answer, content: Content | None = None) -> None:
        """Write a whole answer. `content` takes the place of the answer's own, where it is too large for one value.

        Raises: ConnectionError where the client left.
        """
        size = len(answer.content) if content is None else content.size
        bare = self.method == b"HEAD" or answer.status in NO_CONTENT
        head = self.head(
            answer.status, answer.reason, answer.fields, length=None if answer.status in NO_CONTENT else size
        )
        if content is None or content.size <= PIECE_BYTES:
            whole = answer.content if content is None else content.whole()
            await self.write(head if bare else head + whole)
            return
        await self.write(head)
        for piece in content.pieces():
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


def malformed(detail: str, status: int = 400) -> ProblemError:
    """A request that cannot be read."""
    return ProblemError(Outcome.REQUEST_MALFORMED, detail, status=status)


class _Written:
    """What aiohttp gets as the response: everything is written already."""

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to do."""


class _Refused(_Written):
    """A problem for a request that the parser refused: nothing of the request is in it."""

    def __init__(self, problem: ProblemError) -> None:
        super().__init__(keep_alive=False)
        self._problem = problem

    async def prepare(self, request: web.BaseRequest) -> None:
        answer = render(self._problem, None)
        lines = [b"HTTP/1.1 %d %b" % (answer.status, answer.reason)]
        lines += [b"%b: %b" % line for line in answer.fields]
        lines += [b"Content-Length: %d" % len(answer.content), b"Connection: close", b"\r\n"]
        await request.writer.write(b"\r\n".join(lines) + answer.content)


class _Connection(RequestHandler):
    """aiohttp's protocol with error answers of our own."""

    __slots__ = ("_malformed",)

    def __init__(self, server: Server, malformed: Malformed, options: dict[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._malformed = malformed

    def data_received(self, data: bytes) -> None:
        """Hand data to the parser; where it breaks within a content, tell whoever reads that content.

        aiohttp queues the error behind the request, whose reader would wait for more until its time is over.
        """
        super().data_received(data)
        if not self._messages or isinstance(self._messages[-1][0], RawRequestMessage):
            return
        cut = [payload for message, payload in self._messages if isinstance(message, RawRequestMessage)]
        if self._current_request is not None:
            cut.append(self._current_request.content)
        for payload in cut:
            if not payload.is_eof():
                payload.set_exception(web.RequestPayloadError("the content's framing is broken"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,  # noqa: ARG002 - aiohttp's own signature
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's own signature
    ) -> web.StreamResponse:
        """Answer what the parser refused; aiohttp's own answer and log line would quote the request."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way")
        problem = refused(exc, self.max_line_size)
        self._malformed(problem)
        return cast(web.StreamResponse, _Refused(problem))


def refused(exc: BaseException | None, header_bytes: int) -> ProblemError:
    """The problem for what aiohttp's parser raised. `header_bytes`: the limit of the request line."""
    if isinstance(exc, LineTooLong):
        # The limit tells which of the two it was: that of a field is one byte larger.
        if exc.args[1] == header_bytes:
            return malformed(f"The request line is longer than {header_bytes} bytes (limits.header).", 414)
        return malformed(f"A field is longer than {header_bytes} bytes (limits.header).", 431)
    if isinstance(exc, BadHttpMethod) and METHOD.search(exc.message):
        return malformed("This method is not known here.", 405)
    if isinstance(exc, BadHttpMessage) and exc.message == "Too many headers received":
        return malformed(f"There are more than {MAX_FIELDS} fields.", 431)
    return malformed("The request is not HTTP/1.1 as RFC 9112 has it.")


class Server(web.Server):
    """Serves one listener. `handle` writes the whole answer and says whether the connection may go on."""

    def __init__(self, handle: Handle, *, malformed: Malformed, closing: Callable[[], bool], header_bytes: int) -> None:
        """`malformed` is told of each request that the parser refused. `closing`: as in `Inbound`."""

        async def respond(request: web.BaseRequest) -> web.StreamResponse:
            inbound = Inbound(request, closing)
            go_on = await handle(inbound)
            return cast(web.StreamResponse, _Written(go_on))

        self.options: dict[str, Any] = {
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": KEEP_ALIVE_S,
            "max_line_size": header_bytes,
            "max_field_size": header_bytes + 1,
            "max_headers": MAX_FIELDS,
            # What a refused client still sends is read and dropped this long, so that it can read our answer.
            "lingering_time": 5.0,
        }
        self._malformed = malformed
        super().__init__(respond, handler_cancellation=True, **self.options)

    def __call__(self) -> RequestHandler:
        """One connection. A misspelt option raises here: aiohttp itself would drop them all, limits too."""
        return _Connection(self, self._malformed, self.options)
