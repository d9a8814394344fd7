"""aiohttp's HTTP server as this program needs it: bounded, errors in our own words, nothing of a request quoted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, BadHttpMethod, HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from sidecar.errors import Outcome, ProblemError
from sidecar.problem import render

# Longer than any client keeps an idle connection: one that we close first is an error without a retry in several SDKs.
KEEP_ALIVE_S = 3630.0
# From the first byte of a head to its last.
HEAD_S = 60.0
MAX_FIELDS = 512
# The parser also reads HTTP/0.9 and 2.0, which nobody speaks on such a connection.
VERSIONS = ((1, 0), (1, 1))
ADMIN_HEADER_BYTES = 16 * 1024
# RFC 9110 section 5.6.2: what a method may look like, in the line that the parser quotes in its message as bytes.
METHOD = re.compile(r"b['\"][!#$%&'*+.^_`|~0-9A-Za-z-]+ ")

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Malformed = Callable[[ProblemError], None]


def malformed(detail: str, status: int = 400) -> ProblemError:
    """A request that cannot be read."""
    return ProblemError(Outcome.REQUEST_MALFORMED, detail, status=status)


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


def whole(problem: ProblemError) -> bytes:
    """A problem as the last answer of a connection."""
    answer = render(problem, None)
    lines = [b"HTTP/1.1 %d %b" % (answer.status, answer.reason)]
    lines += [b"%b: %b" % line for line in answer.fields]
    lines += [b"Content-Length: %d" % len(answer.content), b"Connection: close", b"\r\n"]
    return b"\r\n".join(lines) + answer.content


class Written:
    """What aiohttp gets as the response: everything is written already."""

    def __init__(self, keep_alive: bool) -> None:
        """`keep_alive`: whether the connection goes on."""
        self.keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to do."""


class _Refused(Written):
    """A problem for a request that the parser refused: nothing of the request is in it."""

    def __init__(self, problem: ProblemError) -> None:
        super().__init__(keep_alive=False)
        self._problem = problem

    async def prepare(self, request: web.BaseRequest) -> None:
        await request.writer.write(whole(self._problem))


class _Connection(RequestHandler):
    """aiohttp's protocol with error answers of our own, and with an end for a head that does not come."""

    __slots__ = ("_head_s", "_head_timer", "_malformed")

    def __init__(self, server: Exact, malformed: Malformed, head_s: float, options: dict[str, Any]) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._malformed = malformed
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Hand data to the parser; bound the time of a head; where a content breaks, tell whoever reads it."""
        before = len(self._messages)
        idle, behind = self._idle, self._whole_request
        super().data_received(data)
        came = list(self._messages)[before:]
        if came:
            self._forget_head()
            self._tell_of_broken_content()
        # Bytes that made no request are the beginning of one; so are those behind the only one that came with them.
        # aiohttp also feeds nothing, to let the parser go on with what it kept.
        begun = bool(data) and not came and (idle or behind)
        if begun or (idle and len(came) == 1 and _goes_on(data, *came[0])):
            self._watch_head()

    def _tell_of_broken_content(self) -> None:
        """Tell whoever reads a content that its framing broke.

        aiohttp queues the error behind the request, whose reader would wait for more until its time is over.
        """
        if isinstance(self._messages[-1][0], RawRequestMessage):
            return
        cut = [payload for message, payload in self._messages if isinstance(message, RawRequestMessage)]
        if self._current_request is not None:
            cut.append(self._current_request.content)
        for payload in cut:
            if not payload.is_eof():
                payload.set_exception(web.RequestPayloadError("the content's framing is broken"))

    @property
    def _whole_request(self) -> bool:
        """Whether the last request that came is whole, so that what comes now is behind it."""
        if self._messages:
            return bool(self._messages[-1][1].is_eof())
        return self._current_request is not None and self._current_request.content.is_eof()

    @property
    def _idle(self) -> bool:
        if self._request_count == 0:
            return True  # the first bytes may come before aiohttp's own task has begun to wait for them
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport is None:
            return
        if not self._idle:
            self._watch_head()  # a request before it still runs
            return
        problem = malformed("The head did not arrive in time.", 408)
        self._malformed(problem)
        self.transport.write(whole(problem))
        self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End with the connection."""
        self._forget_head()
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Leave out what a client did: its answer and its line say so already. A fault of ours is logged."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

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
        if exc is None or isinstance(exc, HttpProcessingError | web.RequestPayloadError):
            problem = refused(exc, self.max_line_size)
        else:
            self.log_exception("a fault of ours", exc_info=exc)
            problem = ProblemError(Outcome.INTERNAL_ERROR, "A fault of the sidecar.")
        self._malformed(problem)
        return cast(web.StreamResponse, _Refused(problem))


def _goes_on(data: bytes, message: object, payload: StreamReader) -> bool:
    """Whether `data`, which held one whole request from its first byte on, holds more behind it."""
    head_end = data.find(b"\r\n\r\n")
    if head_end < 0 or not isinstance(message, RawRequestMessage) or not payload.is_eof():
        return False
    if message.chunked:
        return not data.endswith(b"0\r\n\r\n")
    declared = message.headers.get("Content-Length", "0")
    return declared.isdigit() and len(data) > head_end + 4 + int(declared)


class Exact(web.Server):
    """A server whose answers are ours to the byte."""

    def __init__(self, respond: Respond, *, malformed: Malformed, header_bytes: int, head_s: float = HEAD_S) -> None:
        """`malformed` is told of each request that the parser refused. `head_s`: how long a head may take."""
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
        self._head_s = head_s
        super().__init__(respond, handler_cancellation=True, **self.options)

    def __call__(self) -> RequestHandler:
        """One connection. A misspelt option raises here: aiohttp itself would drop them all, limits too."""
        return _Connection(self, self._malformed, self._head_s, self.options)


def admin_server(respond: Respond) -> Exact:
    """The server of the admin listener: the same care, nothing counted."""

    async def known(request: web.BaseRequest) -> web.StreamResponse:
        if request.version in VERSIONS:
            return await respond(request)
        return cast(web.StreamResponse, _Refused(malformed("The version must be HTTP/1.1 or HTTP/1.0.")))

    return Exact(known, malformed=lambda _: None, header_bytes=ADMIN_HEADER_BYTES)
