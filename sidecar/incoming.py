"""One answer as it arrives: its head, then its content piece by piece, or how it was lost.

Joins a connection (bytes and time) and a parser (what they mean). When the answer is complete the
connection is freed at once; in every other ending it is closed, so that what comes late reaches nobody.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator

from sidecar.connection import Connection
from sidecar.errors import LostError
from sidecar.message import Fields
from sidecar.parser import AnswerParser, UnreadableError

# How much content is held for a consumer that is slower than the upstream; one read (256 KiB) may come on top.
HIGH_BYTES = 256 * 1024
LOW_BYTES = 64 * 1024


class Incoming:
    """The answer to one request. Whoever holds it reads `pieces()` to the end, or calls `abandon()`.

    `status`, `reason`, `fields` and `length` are those of the head: all fields, exact bytes, in order, hop-by-hop
    ones too. `length` is the declared one, None where there is none; `content_free` says that no content
    comes whatever is declared (HEAD, 204, 304).
    """

    __slots__ = (
        "_connection",
        "_error",
        "_held",
        "_held_bytes",
        "_loop",
        "_parser",
        "_total_s",
        "_upload",
        "_waiter",
        "_whole",
        "began_at",
        "content_free",
        "fields",
        "head_s",
        "length",
        "reason",
        "status",
        "written_all",
    )

    def __init__(self, *, head_request: bool, header_bytes: int, total_s: float, whole: bool) -> None:
        """`total_s`: with `whole` from the first byte written to the last one read, else each silence."""
        self.status = 0
        self.reason = b""
        self.fields: Fields = ()
        self.length: int | None = None
        self.content_free = False
        self.written_all = False  # whether the request had left whole when the answer ended
        self.began_at = 0.0  # loop time of the first byte written
        self.head_s = 0.0  # from there to the answer's head

        self._loop = asyncio.get_running_loop()
        self._parser = AnswerParser(head_request=head_request, header_bytes=header_bytes)
        self._total_s = total_s
        self._whole = whole
        self._connection: Connection | None = None  # None again when the answer has ended, either way
        self._upload: asyncio.Task[None] | None = None
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    # The request's side

    def begin(self, connection: Connection, first: bytes) -> None:
        """Write `first` on `connection`: from now on the request may have left, and this answer is owed."""
        self._connection = connection
        self.began_at = self._loop.time()
        connection.begin(self, first)
        connection.expect_by(self.began_at + self._total_s)

    def upload(self, task: asyncio.Task[None]) -> None:
        """`task` writes the rest of the request; it ends with the answer at the latest."""
        self._upload = task

    def progress(self) -> None:
        """Something went on, either way: without `whole` the upstream's time begins anew."""
        if not self._whole and self._connection is not None:
            self._connection.expect_by(self._loop.time() + self._total_s)

    def uploaded(self) -> None:
        """The request has been written whole."""
        self.written_all = True
        self._upload = None

    def upload_failed(self, exc: BaseException) -> None:
        """The request cannot be written to its end: whoever waits for the answer gets `exc`."""
        self._upload = None
        self._fail(exc)

    @property
    def over(self) -> bool:
        """Whether the answer is complete or lost; nothing more is written then."""
        return self._connection is None

    # The consumer's side

    async def head(self) -> None:
        """Wait until the head has been read.

        Raises: LostError, or what the request's content raised.
        """
        while not self._parser.head and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content without chunk framing, as it arrives.

        A consumer that stops before the end, or is cancelled, ends the connection.

        Raises: LostError when the answer is cut, unreadable or late.
        """
        try:
            while True:
                while self._held:
                    piece = self._held.popleft()
                    self._held_bytes -= len(piece)
                    if self._held_bytes <= LOW_BYTES and self._connection is not None:
                        self._resume(self._connection)
                    yield piece
                if self._error is not None:
                    raise self._error
                if self._parser.complete:
                    return
                await self._wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Read no more: the connection is closed, unless the answer has ended already. May be called twice."""
        if self._connection is not None:
            self._held.clear()
            self._fail(self._lost("connection_terminated"))

    def _resume(self, connection: Connection) -> None:
        if connection.reading_paused:
            connection.resume_reading()
            self.progress()  # its time ran while nobody would have read a byte

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the connection tells

    def received(self, data: bytes) -> None:
        """Bytes of the answer."""
        connection = self._connection
        if connection is None:
            return
        parser = self._parser
        had_head = parser.head
        try:
            content = parser.feed(data)
        except UnreadableError:
            self._fail(self._lost("http_protocol_error"))
            return
        if parser.head and not had_head:
            self._take_head()
        if content:
            self._held.append(content)
            self._held_bytes += len(content)
        if parser.complete:
            self._complete(connection)
        elif self._held_bytes > HIGH_BYTES:
            connection.pause_reading()
        if parser.head:
            self.progress()
            self._wake()

    def _take_head(self) -> None:
        parser = self._parser
        self.head_s = self._loop.time() - self.began_at
        self.status = parser.status
        self.reason = parser.reason
        self.fields = parser.fields
        self.length = parser.length
        self.content_free = parser.content_free

    def _complete(self, connection: Connection) -> None:
        # Complete even where the request was not wholly written: an upstream may refuse early. Its connection
        # still carries, or lacks, a part of that request: it is not used again.
        self._connection = None
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None
        if self.written_all:
            connection.free(keep=not self._parser.closes, keep_s=self._parser.keep_s)
        else:
            connection.abort()

    def ended(self) -> None:
        """The upstream closed in good order: the end of an answer without a length, or the middle of one."""
        connection = self._connection
        if connection is None:
            return
        if self._parser.end():
            self._complete(connection)
            self._wake()
        else:
            self._fail(self._lost(self._cut_reason()))

    def broke(self, exc: Exception | None) -> None:
        """The connection is gone: what has not arrived by now never will."""
        reason = "tls_protocol_error" if isinstance(exc, ssl.SSLError) else self._cut_reason()
        self._fail(self._lost(reason))

    def _cut_reason(self) -> str:
        return "http_response_incomplete" if self._parser.head else "connection_terminated"

    def late(self) -> None:
        """The time is over. What the consumer or the client kept waiting is no silence of the upstream's."""
        connection = self._connection
        if connection is None:
            return
        if self._whole:
            stuck = connection.writing_paused and not self.written_all
            self._fail(self._lost("connection_write_timeout" if stuck else "http_response_timeout"))
        elif connection.writing_paused:
            self._fail(self._lost("connection_write_timeout"))
        elif connection.reading_paused or not self.written_all:
            connection.expect_by(self._loop.time() + self._total_s)
        else:
            self._fail(self._lost("connection_read_timeout"))

    def _lost(self, reason: str) -> LostError:
        return LostError(reason, status=self._parser.status or None)

    def _fail(self, error: BaseException) -> None:
        connection = self._connection
        if connection is None:
            return
        self._connection = None
        self._error = error
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None
        connection.abort()
        self._wake()
