"""Answers as bytes: what is read from them, where they end, and what is refused, whatever way they are cut up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.parser import AnswerParser, UnreadableError

HEAD = b"HTTP/1.1 200 OK\r\n"


def read(*pieces: bytes, head_request: bool = False, header_bytes: int = 65536) -> tuple[AnswerParser, bytes]:
    parser = AnswerParser(head_request=head_request, header_bytes=header_bytes)
    content = b"".join([parser.feed(piece) for piece in pieces])
    return parser, content


def refused(*pieces: bytes, head_request: bool = False, header_bytes: int = 65536) -> str:
    with pytest.raises(UnreadableError) as caught:
        read(*pieces, head_request=head_request, header_bytes=header_bytes)
    return str(caught.value)


def test_head_keeps_every_field_in_order_case_and_bytes() -> None:
    parser, content = read(
        HEAD + b"X-A: 1\r\nx-a:2\r\nX-E:\r\nL: caf\xe9\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n"
    )
    assert parser.fields == (
        (b"X-A", b"1"),
        (b"x-a", b"2"),
        (b"X-E", b""),
        (b"L", b"caf\xe9"),
        (b"Set-Cookie", b"a"),
        (b"Set-Cookie", b"b"),
        (b"Content-Length", b"0"),
    )
    assert (parser.status, parser.reason, parser.complete, content) == (200, b"OK", True, b"")


@pytest.mark.parametrize("line", [b"HTTP/1.1 200", b"HTTP/1.1 200 "])
def test_reason_may_be_missing(line: bytes) -> None:
    parser, _ = read(line + b"\r\nContent-Length: 0\r\n\r\n")
    assert (parser.status, parser.reason, parser.complete) == (200, b"", True)


WHOLE: list[tuple[str, bytes, bytes, bool]] = [
    ("length", HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello", False),
    ("empty", HEAD + b"Content-Length: 0\r\n\r\n", b"", False),
    ("content like heads", HEAD + b"Content-Length: 8\r\n\r\n\r\n\r\n\r\n\r\n", b"\r\n" * 4, False),
    ("chunks", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n", b"hello", False),
    ("coding in capitals", HEAD + b"Transfer-Encoding: Chunked\r\n\r\n1\r\nh\r\n0\r\n\r\n", b"h", False),
    ("chunks of line ends", HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n", False),
    ("trailers", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nh\r\n0\r\nT: 1\r\nU:\r\n\r\n", b"h", False),
    ("204", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b"", False),
    ("304", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", False),
    ("HEAD", HEAD + b"Content-Length: 512\r\n\r\n", b"", True),
    ("HEAD chunked", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"", True),
    ("HEAD without length", HEAD + b"\r\n", b"", True),
    (
        "interim",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 9
        + HEAD
        + b"Content-Length: 1\r\n\r\nh",
        b"h",
        False,
    ),
    ("interim 1.0", b"HTTP/1.0 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\nh", b"h", False),
    ("upgrade offered", HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 1\r\n\r\nh", b"h", False),
    ("status 999", b"HTTP/1.1 999 No\r\nContent-Length: 1\r\n\r\nh", b"h", False),
]
CASES = pytest.mark.parametrize(
    ("data", "content", "head_request"), [row[1:] for row in WHOLE], ids=[row[0] for row in WHOLE]
)


@CASES
def test_whole_answer_in_one_read_is_complete_and_kept(data: bytes, content: bytes, head_request: bool) -> None:
    parser, got = read(data, head_request=head_request)
    assert (got, parser.complete, parser.closes) == (content, True, False)


@CASES
def test_whole_answer_byte_by_byte_is_the_same_and_complete_at_its_last_byte_only(
    data: bytes, content: bytes, head_request: bool
) -> None:
    parser = AnswerParser(head_request=head_request, header_bytes=65536)
    got = b""
    for at in range(len(data)):
        assert not parser.complete
        got += parser.feed(data[at : at + 1])
    assert (got, parser.complete) == (content, True)


@CASES
@given(cuts=st.data())
def test_answer_is_the_same_however_it_is_cut_up(
    data: bytes, content: bytes, head_request: bool, cuts: st.DataObject
) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(1, len(data) - 1), max_size=8)))
    pieces = [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]
    parser, got = read(*pieces, head_request=head_request)
    assert (got, parser.complete) == (content, True)


@CASES
@pytest.mark.parametrize("surplus", [b"\r", b"\n", b"\r\n", b"0", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"\0"])
def test_any_byte_behind_the_end_is_seen(data: bytes, content: bytes, head_request: bool, surplus: bytes) -> None:
    refused(data + surplus, head_request=head_request)
    refused(data, surplus, head_request=head_request)


@CASES
def test_answer_cut_anywhere_is_not_complete_even_when_the_connection_ends(
    data: bytes, content: bytes, head_request: bool
) -> None:
    for at in range(1, len(data)):
        parser, _ = read(data[:at], head_request=head_request)
        assert parser.end() is False


def test_answer_without_length_ends_with_the_connection() -> None:
    parser, content = read(HEAD + b"\r\nhel", b"lo\r\n\r\n")
    assert (content, parser.complete, parser.closes, parser.length) == (b"hello\r\n\r\n", False, True, None)
    assert parser.end() is True


@pytest.mark.parametrize(
    ("fields", "closes"),
    [
        (b"Connection: close\r\n", True),
        (b"Connection: x, CLOSE\r\n", True),
        (b"Connection: keep-alive\r\nConnection: Close\r\n", True),
        (b"Connection: closed\r\n", False),
        (b"Connection: keep-alive\r\n", False),
    ],
)
def test_connection_field_decides_whether_the_connection_is_kept(fields: bytes, closes: bool) -> None:
    parser, _ = read(HEAD + fields + b"Content-Length: 0\r\n\r\n")
    assert parser.closes is closes


def test_http_1_0_is_read_and_its_connection_not_kept() -> None:
    parser, content = read(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok")
    assert (content, parser.complete, parser.closes) == (b"ok", True, True)


@pytest.mark.parametrize(
    ("value", "keep_s"),
    [(b"timeout=5", 5.0), (b"max=100, Timeout = 7 ", 7.0), (b"timeout=x", None), (b"max=3", None), (b"", None)],
)
def test_keep_alive_field_tells_how_long_the_upstream_keeps_a_connection(value: bytes, keep_s: float | None) -> None:
    parser, _ = read(HEAD + b"Keep-Alive: " + value + b"\r\nContent-Length: 0\r\n\r\n")
    assert parser.keep_s == keep_s


@pytest.mark.parametrize(
    ("data", "length", "free"),
    [
        (HEAD + b"Content-Length: 3 \r\n\r\n", 3, False),
        (HEAD + b"\r\n", None, False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", None, False),
        (b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n", None, True),
        (b"HTTP/1.1 304 No\r\nContent-Length: 7\r\n\r\n", 7, True),
    ],
)
def test_length_is_the_declared_one(data: bytes, length: int | None, free: bool) -> None:
    parser, _ = read(data)
    assert (parser.length, parser.content_free) == (length, free)


UNREADABLE = {
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "two different lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "length list": HEAD + b"Content-Length: 2, 2\r\n\r\nok",
    "length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "signed length": HEAD + b"Content-Length: +2\r\n\r\nok",
    "negative length": HEAD + b"Content-Length: -2\r\n\r\nok",
    "hexadecimal length": HEAD + b"Content-Length: 0x2\r\n\r\nok",
    "empty length": HEAD + b"Content-Length:\r\n\r\nok",
    "endless length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nok",
    "chunked not last": HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\nx",
    "coding we never asked for": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\nx",
    "chunked with parameter": HEAD + b"Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "chunks in 1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size signed": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+2\r\nok\r\n0\r\n\r\n",
    "chunk size with line feed": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\nok\r\n0\r\n\r\n",
    "chunk longer than told": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nokX\r\n0\r\n\r\n",
    "length as trailer": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n",
    "garbage": b"\x16\x03\x01garbage\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH\r\n",
    "RTSP": b"RTSP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "leading empty line": b"\r\n" + HEAD + b"Content-Length: 0\r\n\r\n",
    "line feeds": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "last line feed": HEAD + b"Content-Length: 0\r\n\n",
    "folded field": HEAD + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "blank before colon": HEAD + b"A : b\r\nContent-Length: 0\r\n\r\n",
    "NUL": HEAD + b"A: b\0c\r\nContent-Length: 0\r\n\r\n",
    "no colon": HEAD + b"nonsense\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "status below 100": b"HTTP/1.1 099 OK\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    "101 without upgrade": b"HTTP/1.1 101 Switching\r\n\r\n",
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    refused(data)
    parts = [data[at : at + 1] for at in range(len(data))]
    refused(*parts)


def test_another_protocol_is_refused_at_its_first_byte() -> None:
    refused(b"S")


def test_head_up_to_the_bound_is_read_and_one_byte_more_is_not() -> None:
    head = HEAD + b"X: " + b"y" * 100 + b"\r\nContent-Length: 0\r\n\r\n"
    assert read(head, header_bytes=len(head))[0].complete
    assert "head above" in refused(head, header_bytes=len(head) - 1)
    assert "head above" in refused(HEAD + b"X: ", b"y" * 200, header_bytes=100)


def test_content_does_not_count_as_head() -> None:
    data = HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 100000
    assert read(data, header_bytes=100)[0].complete


def test_interim_answers_without_end_are_refused() -> None:
    assert "head above" in refused(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 100, header_bytes=2000)


def test_trailers_without_end_are_refused() -> None:
    start = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    assert "framing above" in refused(start, *[b"T: " + b"y" * 100 + b"\r\n"] * 30, header_bytes=2000)


def test_trailers_are_dropped() -> None:
    parser, _ = read(HEAD + b"Transfer-Encoding: chunked\r\nA: 1\r\n\r\n", b"0\r\nB: 2\r\n\r\n")
    assert parser.fields == ((b"Transfer-Encoding", b"chunked"), (b"A", b"1"))


@given(st.binary(min_size=1, max_size=200))
def test_any_bytes_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    for start in (b"", HEAD, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"):
        parser = AnswerParser(head_request=False, header_bytes=1000)
        try:
            parser.feed(start + data)
            parser.end()
        except UnreadableError:
            pass
