"""One answer, read from the bytes of a connection: its head, its content, and where exactly it ends.

Does no I/O and keeps no time. llhttp (httptools) reads head and chunks; how the content is framed is
judged here, stricter than llhttp does, because a wrong end is a wrong outcome: what stands behind an
answer would become the answer to the next request.
"""

from __future__ import annotations

import re

import httptools

from sidecar.message import Field, Fields

# RFC 9112 section 4: what a reason phrase may hold. A strict client would refuse the whole answer of an accepted mail
# for one that holds more, and a client should ignore it anyway.
PHRASE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
HEAD_END = b"\r\n\r\n"
PROTOCOL = b"HTTP/"


class UnreadableError(Exception):
    """These bytes are no answer, or more than one; `str()` says why, without any of them."""


class AnswerParser:
    """Reads one answer. `feed` it what arrives until `complete`; tell it by `end` that the connection ended."""

    __slots__ = (
        "_again",
        "_body",
        "_chunked",
        "_fields",
        "_head_read",
        "_head_request",
        "_header_left",
        "_idle_bytes",
        "_left",
        "_llhttp",
        "_max_header",
        "_seen",
        "_tail",
        "closes",
        "complete",
        "content_free",
        "fields",
        "head",
        "keep_s",
        "length",
        "reason",
        "status",
    )

    def __init__(self, *, head_request: bool, header_bytes: int) -> None:
        """`head_request`: the method was HEAD; `header_bytes`: bound of all heads, interim ones included."""
        # What the answer says, once `head` is true.
        self.status = 0
        self.reason = b""
        self.fields: Fields = ()
        self.length: int | None = None
        self.content_free = False
        # How far it has been read, and what becomes of its connection.
        self.head = False
        self.complete = False
        self.closes = False
        self.keep_s: float | None = None

        self._head_request = head_request
        self._max_header = header_bytes
        self._header_left = header_bytes
        self._left: int | None = None  # content still to come; None: chunked, or until the connection ends
        self._chunked = False
        self._body: list[bytes] = []
        self._idle_bytes = 0
        self._begin_head()

    def _begin_head(self) -> None:
        # Each holds the other: let go as soon as it has nothing more to read, so that no cycle is left behind.
        self._llhttp: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._fields: list[Field] = []
        self._head_read = False
        self._again = False
        self._seen = 0
        self._tail = b""
        self.reason = b""

    # What arrives

    def feed(self, data: bytes) -> bytes:
        """Read `data`, not empty; the content it holds, without chunk framing.

        Raises: UnreadableError; whatever was read before then is part of no answer.
        """
        while not self.head:
            data = self._feed_head(data)
            if not data:
                return data
        if self.complete:
            raise UnreadableError("bytes behind the end of the answer")
        if self._chunked:
            return self._feed_chunks(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise UnreadableError("bytes behind the end of the answer")
            self.complete = self._left == 0
        return data

    def end(self) -> bool:
        """Take note that the connection ended in good order; whether the answer is complete now.

        RFC 9112 section 6.3: a response without a declared length ends with the connection. Section 8: with
        a length or chunks it is incomplete until they are.
        """
        if self.head and not self._chunked and self._left is None:
            self.complete = True
        return self.complete

    # The head

    def _feed_head(self, data: bytes) -> bytes:
        """Read as much of the head as `data` holds; what stands behind it."""
        # At the first byte, so that a server of another protocol is not waited for.
        expected = PROTOCOL[self._seen : self._seen + len(data)]
        if not data.startswith(expected):
            raise UnreadableError("not HTTP")
        window = self._tail + data if self._tail else data
        end = window.find(HEAD_END)
        cut = len(data) if end < 0 else end + len(HEAD_END) - len(self._tail)
        self._seen += cut
        self._header_left -= cut
        if self._header_left < 0:
            raise UnreadableError(f"a head above {self._max_header} bytes")
        self._tail = window[-3:]
        llhttp = self._parse(data if cut == len(data) else data[:cut])
        if self._head_read is not (end >= 0):
            raise UnreadableError("a head that does not end at its empty line")
        if self._head_read:
            self._judge_head(llhttp)
        return data[cut:]

    def _judge_head(self, llhttp: httptools.HttpResponseParser) -> None:
        status = llhttp.get_status_code()
        version = llhttp.get_http_version()
        if version not in {"1.1", "1.0"}:
            raise UnreadableError("not HTTP/1.1 or HTTP/1.0")
        if 100 <= status < 200:
            # RFC 9110 section 15.2: a client must be able to parse interim responses, any number of them, and
            # may ignore them. 101 has already failed in llhttp: we never ask for another protocol.
            self._begin_head()
            return
        if status < 200:
            raise UnreadableError("a status below 100")
        self.status = status
        self.fields = tuple(self._fields)
        self.head = True
        self.closes = version == "1.0"
        codings = self._judge_fields()
        # RFC 9112 section 6.3: these never have content, whatever their fields say. RFC 9110 section 8.6: a 204
        # has no length, a 304 or an answer to HEAD tells that of the content it leaves out.
        if self._head_request or status in {204, 304}:
            self.content_free = True
            self.length = None if status == 204 else self.length
            self._left = 0
        elif codings:
            # RFC 9112 section 6.1: Transfer-Encoding in HTTP/1.0 is faulty framing. Stricter than section 6.3, any
            # other coding than chunked, once, is unreadable: we sent no TE.
            if codings != [b"chunked"] or version == "1.0":
                raise UnreadableError("a transfer coding other than chunked")
            self._chunked = True
            return
        else:
            self._left = self.length
            self.closes |= self.length is None
        self.complete = self._left == 0
        self._llhttp = None

    def _judge_fields(self) -> list[bytes]:
        """Take from the fields what frames the content and what becomes of the connection; the transfer codings."""
        codings: list[bytes] = []
        for name, value in self.fields:
            match name.lower():
                case b"content-length":
                    self.length = int(value)  # llhttp has refused everything but digits, and a second one
                case b"transfer-encoding":
                    codings.append(value.strip().lower())
                case b"connection":
                    self.closes |= b"close" in [option.strip() for option in value.lower().split(b",")]
                case b"keep-alive":
                    self.keep_s = _keep_alive_s(value)
        return codings

    # Chunks

    def _feed_chunks(self, data: bytes) -> bytes:
        self._body.clear()
        self._parse(data)
        content = b"".join(self._body)
        # Extensions and trailers are read and dropped; they do not go on for ever.
        self._idle_bytes = 0 if content else self._idle_bytes + len(data)
        if self._idle_bytes > self._max_header:
            raise UnreadableError(f"chunk framing above {self._max_header} bytes")
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self.complete:
            self._llhttp = None
            if self._again or not self._ends_here():
                raise UnreadableError("bytes behind the end of the answer")
        return content

    def _ends_here(self) -> bool:
        # llhttp passes over empty lines between two messages without a word; the last line of chunked content
        # is never empty, so one more of them is seen here.
        return self._tail.endswith(HEAD_END) and self._tail[-5:-4] not in (b"\r", b"\n")

    # What llhttp calls

    def _parse(self, data: bytes) -> httptools.HttpResponseParser:
        llhttp = self._llhttp
        if llhttp is None:
            raise UnreadableError("bytes behind the end of the answer")
        try:
            llhttp.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._llhttp = None
            raise UnreadableError(str(exc)) from exc
        return llhttp

    def on_message_begin(self) -> None:
        """A message begins: after the end of this answer, a second one."""
        self._again = self.complete

    def on_status(self, reason: bytes) -> None:
        """A part of the reason phrase."""
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head; one behind the content (a trailer) is dropped."""
        if not self._head_read:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The head ends here."""
        self._head_read = True
        if not PHRASE.fullmatch(self.reason):
            self.reason = b""

    def on_body(self, piece: bytes) -> None:
        """Content of a chunk."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """The end: of a chunked answer that is all there is to it, of any other it is counted here."""
        if self._chunked:
            self.complete = True


def _keep_alive_s(value: bytes) -> float | None:
    """How long the upstream says it keeps an idle connection (`timeout=5, max=100`), or None."""
    for parameter in value.lower().split(b","):
        name, _, number = parameter.partition(b"=")
        if name.strip() == b"timeout" and number.strip().isdigit():
            return float(number)
    return None
