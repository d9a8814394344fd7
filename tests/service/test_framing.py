"""What cannot be read for certain is refused, in our own words, and nothing of it or behind it is forwarded."""

from __future__ import annotations

import asyncio
import inspect
import time
from pathlib import Path

import pytest
from aiohttp.web_protocol import RequestHandler
from harness import Client, RedisServer, duration, raw_bytes, request, scaled, until
from harness.wire import split_head
from pair import Pair, each_test, head, module_pair, post, running

from sidecar import server

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair({"limits": {"request": "1MiB"}})
mail = each_test()

MARK = b"zq7-secret"
HIDDEN = head(
    b"POST /mail/emails HTTP/1.1", b"Host: h", b"Idempotency-Key: hidden", b"X-Mark: " + MARK, b"Content-Length: 0"
)


def framed(*lines: bytes, content: bytes = b"", line: bytes = b"POST /mail/emails HTTP/1.1") -> bytes:
    """A request with these fields, a key and a mark, and behind its content another request."""
    return head(line, b"Host: h", b"X-Mark: " + MARK, b"Idempotency-Key: trick", *lines) + content + HIDDEN


CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"
TRICKS = {
    "length and chunks": framed(b"Content-Length: 3", b"Transfer-Encoding: chunked", content=CHUNKS),
    "chunks and length": framed(b"Transfer-Encoding: chunked", b"Content-Length: 13", content=CHUNKS),
    "two lengths": framed(b"Content-Length: 3", b"Content-Length: 4", content=b"abc"),
    "two equal lengths": framed(b"Content-Length: 3", b"Content-Length: 3", content=b"abc"),
    "list of lengths": framed(b"Content-Length: 3, 3", content=b"abc"),
    "length with a sign": framed(b"Content-Length: +5", content=b"abcde"),
    "negative length": framed(b"Content-Length: -1"),
    "hexadecimal length": framed(b"Content-Length: 0x5", content=b"abcde"),
    "length with underscore": framed(b"Content-Length: 1_0", content=b"0123456789"),
    "length in other digits": framed(b"Content-Length: \xd9\xa3", content=b"abc"),
    "empty length": framed(b"Content-Length: "),
    "length beyond all numbers": framed(b"Content-Length: 99999999999999999999999", content=b"abc"),
    "unknown coding": framed(b"Transfer-Encoding: xchunked", content=CHUNKS),
    "coding behind chunked": framed(b"Transfer-Encoding: chunked, gzip", content=CHUNKS),
    "coding before chunked": framed(b"Transfer-Encoding: gzip, chunked", content=CHUNKS),
    "chunked twice": framed(b"Transfer-Encoding: chunked, chunked", content=CHUNKS),
    "two codings": framed(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", content=CHUNKS),
    "coding identity": framed(b"Transfer-Encoding: identity", b"Content-Length: 3", content=b"abc"),
    "chunks under HTTP/1.0": framed(b"Transfer-Encoding: chunked", line=b"POST /mail/emails HTTP/1.0", content=CHUNKS),
    "blank before the colon": framed(b"Content-Length : 3", content=b"abc"),
    "folded field": framed(b"X-Fold: a\r\n b", b"Content-Length: 3", content=b"abc"),
    "NUL in a value": framed(b"X-Nul: a\0b", b"Content-Length: 3", content=b"abc"),
    "bare CR in a value": framed(b"X-Cr: a\rb", b"Content-Length: 3", content=b"abc"),
    "bare LF in the key": framed(b"Idempotency-Key: a\nX-Evil: 1", b"Content-Length: 3", content=b"abc"),
    "NUL in the key": framed(b"Idempotency-Key: a\0b", b"Content-Length: 3", content=b"abc"),
    "no colon": framed(b"Nonsense", b"Content-Length: 3", content=b"abc"),
    "name that is no token": framed(b"X(y): 1", b"Content-Length: 3", content=b"abc"),
    "chunk size with a sign": framed(b"Transfer-Encoding: chunked", content=b"+3\r\nabc\r\n0\r\n\r\n"),
    "chunk size with 0x": framed(b"Transfer-Encoding: chunked", content=b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk without its end": framed(b"Transfer-Encoding: chunked", content=b"3\r\nabcd\r\n0\r\n\r\n"),
    "LF in a chunk extension": framed(b"Transfer-Encoding: chunked", content=b"3;a\nb\r\nabc\r\n0\r\n\r\n"),
    "length in the trailer": framed(
        b"Transfer-Encoding: chunked", content=b"3\r\nabc\r\n0\r\nContent-Length: 3\r\n\r\n"
    ),
    "version 2.0": framed(b"Content-Length: 3", line=b"POST /mail/emails HTTP/2.0", content=b"abc"),
    "version 1.2.3": framed(b"Content-Length: 3", line=b"POST /mail/emails HTTP/1.2.3", content=b"abc"),
    "no version": framed(b"Content-Length: 3", line=b"POST /mail/emails", content=b"abc"),
    "two hosts": framed(b"Host: other", b"Content-Length: 3", content=b"abc"),
    "target beyond ASCII": framed(line=b"POST /mail/\xc3\xa9 HTTP/1.1"),
    "bare LF line ends": framed(b"Content-Length: 3", content=b"abc").replace(b"\r\n", b"\n"),
}


@pytest.mark.case("C236", "C237")
@pytest.mark.parametrize("trick", TRICKS)
async def test_framing_trick_is_refused_and_nothing_behind_it_is_read(mail: Pair, trick: str) -> None:
    before = len(mail.sidecar.log())
    answered = await raw_bytes(mail.sidecar.base, TRICKS[trick])
    first_head, _, content = answered.partition(b"\r\n\r\n")
    got = split_head(first_head + b"\r\n\r\n")
    assert got.start == b"HTTP/1.1 400 Bad Request"
    assert (b"Connection", b"close") in got.fields
    assert (b"Content-Type", b"application/problem+json") in got.fields
    assert dict(got.fields)[b"Content-Length"] == b"%d" % len(content)
    assert b"request-malformed" in content
    assert b'"sent": "no"' in content
    assert mail.upstream.begun == []
    await until(lambda: len(mail.sidecar.log()) > before)
    told = mail.sidecar.log()[before:]
    for leak in (MARK, b"Evil", b"hidden", b"trick"):
        assert leak not in answered
        assert leak.decode() not in told
    assert told.count("\n") == 1
    assert '"outcome": "request-malformed"' in told


@pytest.mark.case("C236")
@pytest.mark.parametrize(
    "start", [b"CONNECT m.test:443", b"POST /mail/emails#part", b"POST http://a@b/mail/emails", b"GET *"]
)
async def test_target_that_leads_nowhere_for_certain_is_refused(mail: Pair, start: bytes) -> None:
    got = await mail.ask(head(start + b" HTTP/1.1", b"Host: h", b"X-Mark: " + MARK))
    assert (got.status, got.slug, mail.upstream.begun) == (400, "request-malformed", [])
    assert MARK not in got.content


@pytest.mark.case("C236")
async def test_bytes_that_are_no_http_at_all_are_refused_without_an_echo(mail: Pair) -> None:
    for data in (b"\x16\x03\x01\x00\xa5\x01" + MARK, b"SSH-2.0-" + MARK + b"\r\n\r\n", b"\0" * 40 + MARK):
        got = await mail.ask(data)
        assert (got.status in (400, 405), got.slug, got.first("connection")) == (True, "request-malformed", b"close")
        assert MARK not in got.content
    assert (mail.upstream.begun, mail.sidecar.log().count(MARK.decode())) == ([], 0)


@pytest.mark.case("C236")
async def test_missing_host_is_refused_and_that_of_http_1_0_is_not(mail: Pair) -> None:
    bare = b"GET /mail/x HTTP/%b\r\n\r\n"
    assert (await mail.ask(bare % b"1.1")).status == 400
    assert (await mail.ask(bare % b"1.0")).status == 200


@pytest.mark.case("C236")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
@pytest.mark.parametrize("broken", [b"zz\r\n", b"+3\r\nabc\r\n0\r\n\r\n"])
async def test_chunks_that_break_within_the_content_are_refused_at_once(mail: Pair, target: str, broken: bytes) -> None:
    key = f"broken {target} {broken!r}"
    data = request("POST", target, [("Authorization", "Bearer one"), ("Transfer-Encoding", "chunked")], key=key)
    async with await mail.client() as client:
        await client.send(data + b"3\r\nabc\r\n")
        if "other" in target:
            await until(lambda: mail.upstream.begun)
        else:
            assert (await mail.ask(request("GET", "/nowhere"))).status == 404
        begun = len(mail.upstream.begun)
        await client.send(broken + HIDDEN)
        got = await client.answer(deadline_s=2)
        assert (got.status, got.slug, got.first("connection")) == (400, "request-malformed", b"close")
    await until(lambda: mail.upstream.open_connections == 0 or begun == 0)
    assert (mail.count, len(mail.upstream.begun)) == (0, begun)


@pytest.mark.case("C243")
async def test_passed_upload_that_falls_silent_is_ended(tmp_path: Path, session_store: RedisServer) -> None:
    timeout = {"receive": duration(0.4), "connect": duration(1), "total": duration(2)}
    async with running(tmp_path, session_store.url, timeout=timeout) as pair, await pair.client() as client:
        await client.send(request("POST", "/mail/other", [("Content-Length", "10")]) + b"x")
        await until(lambda: pair.upstream.begun)
        got = await client.answer(deadline_s=3)
        assert (got.status, got.slug) == (408, "request-malformed")
        await until(lambda: pair.upstream.open_connections == 0)
        assert pair.count == 0


@pytest.mark.case("C238")
async def test_limit_of_the_head_has_its_own_status(mail: Pair) -> None:
    long = MARK * 7000
    cases = [
        (414, head(b"POST /mail/emails?" + long + b" HTTP/1.1", b"Host: h", b"Content-Length: 0")),
        (431, head(b"POST /mail/emails HTTP/1.1", b"Host: h", b"Authorization: " + long, b"Content-Length: 0")),
        (431, head(b"POST /mail/emails HTTP/1.1", b"Host: h", *[b"X: " + MARK * 50] * 140, b"Content-Length: 0")),
        (431, head(b"POST /mail/emails HTTP/1.1", b"Host: h", *[b"X: 1"] * 600, b"Content-Length: 0")),
    ]
    statuses = []
    for _, data in cases:
        got = await mail.ask(data)
        assert MARK not in got.head + got.content
        assert got.slug == "request-malformed"
        statuses.append(got.status)
    assert mail.upstream.begun == []
    assert MARK.decode() not in mail.sidecar.log()
    assert statuses == [status for status, _ in cases]


@pytest.mark.case("C238")
async def test_head_just_within_the_limit_is_taken(mail: Pair) -> None:
    for size, status in ((64 * 1024 - 200, 200), (64 * 1024 + 1, 431)):
        got = await mail.ask(request("GET", "/mail/x", [("Authorization", "a" * size)]))
        assert (got.status, mail.count) == (status, 1)


@pytest.mark.case("C238")
async def test_limits_of_the_server_are_in_force() -> None:
    async def handle(inbound: server.Inbound) -> bool:
        raise AssertionError

    made = server.Server(handle, malformed=lambda problem: None, closing=lambda: False, header_bytes=4321)
    connection = made()
    # A misspelt option is dropped by aiohttp without a word, and all others with it.
    known = inspect.signature(RequestHandler.__init__).parameters
    assert set(made.options) <= set(known)
    assert 4321 <= made.options["max_line_size"] <= 4323
    assert 4321 <= made.options["max_field_size"] <= 4323
    assert made.options["auto_decompress"] is False
    assert made._kwargs == made.options
    assert connection._keepalive_timeout == made.options["keepalive_timeout"]
    assert connection._lingering_time == made.options["lingering_time"]
    assert made.handler_cancellation


@pytest.mark.case("C239")
@pytest.mark.parametrize("method", [b"FOO", b"post", b"M-SEARCHES"])
async def test_method_that_is_not_known_is_405(mail: Pair, method: bytes) -> None:
    got = await mail.ask(framed(b"Content-Length: 3", content=b"abc", line=method + b" /mail/emails HTTP/1.1"))
    assert (got.status, got.slug, mail.upstream.begun) == (405, "request-malformed", [])
    assert got.first("connection") == b"close"


@pytest.mark.case("C240")
@pytest.mark.parametrize(
    "named", ["Idempotency-Key", "authorization", "Host", "Content-Length", "content-type", "close, IDEMPOTENCY-KEY"]
)
async def test_connection_field_that_drops_what_decides_is_refused(mail: Pair, named: str) -> None:
    fields = [("Authorization", "Bearer one"), ("Content-Type", "application/json"), ("Connection", named)]
    got = await mail.ask(post("named in Connection", fields=fields))
    assert (got.status, got.slug, mail.upstream.begun) == (400, "request-malformed", [])


@pytest.mark.case("C241")
async def test_expectation_is_answered_at_once_and_not_forwarded(mail: Pair) -> None:
    content = b"e" * 600_000
    fields = [("Expect", "100-Continue"), ("Authorization", "Bearer one")]
    for number, target in enumerate(("/mail/emails", "/mail/emails", "/mail/other")):
        data = post("expected", content, target, fields)
        async with await mail.client() as client:
            begin_s = time.monotonic()
            await client.send(data[: -len(content)])
            line = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), scaled(5))
            assert line == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(content)
            got = await client.answer()
            assert time.monotonic() - begin_s < scaled(0.9)
        assert (got.status, got.interim, got.replayed) == (200, (), number == 1)
    assert [one.first("expect") for one in mail.upstream.requests] == [None, None]


@pytest.mark.case("C241")
async def test_refusal_comes_in_place_of_the_go_ahead(mail: Pair) -> None:
    expect = ("Expect", "100-continue")
    bad = [
        (417, [("Expect", "nonsense")], "/mail/emails", 10, "a"),
        (417, [("Expect", "100-continue, nonsense")], "/mail/emails", 10, "a"),
        (413, [expect], "/mail/emails", 2_000_000, "a"),
        (404, [expect], "/nowhere", 10, "a"),
        (400, [expect], "/mail/emails", 10, "a,b"),
    ]
    for status, fields, target, size, key in bad:
        async with await mail.client() as client:
            await client.send(post(key, b"", target, [*fields, ("Content-Length", str(size))]))
            got = await client.answer()
            assert (got.status, got.interim) == (status, ())
            assert got.first("connection") == b"close"
    assert mail.upstream.begun == []


@pytest.mark.case("C242")
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_content_above_the_limit_is_413_and_the_key_stays_free(mail: Pair, framing: str) -> None:
    key = f"too large by {framing}"
    content = b"l" * (1024 * 1024 + 1)
    if framing == "length":
        data = post(key, content)
    else:
        data = request(
            "POST", "/mail/emails", [("Authorization", "Bearer one"), ("Transfer-Encoding", "chunked")], key=key
        )
        data += b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    got = await mail.ask(data)
    assert (got.status, got.slug, mail.upstream.begun) == (413, "content-too-large", [])
    fitting = await mail.ask(post(key, content[:-1]))
    assert (fitting.status, fitting.replayed, mail.count) == (200, False, 1)


@pytest.mark.case("C243")
async def test_upload_that_never_ends_is_408_and_leaves_no_trace(tmp_path: Path, session_store: RedisServer) -> None:
    timeout = {"receive": duration(0.4), "connect": duration(1), "total": duration(2)}
    async with running(tmp_path, session_store.url, timeout=timeout) as pair:
        before = session_store.keys()
        data = post("never ends")
        async with await pair.client() as client:
            begin_s = time.monotonic()
            writing = asyncio.create_task(client.send_pieces([data[:-20], *([b" "] * 19)], gap_s=0.1))
            got = await client.answer()
            took_s = time.monotonic() - begin_s
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        assert (got.status, got.slug, got.first("connection")) == (408, "request-malformed", b"close")
        assert scaled(0.3) < took_s < scaled(1.5)
        assert (pair.upstream.begun, session_store.keys()) == ([], before)
        assert (await pair.ask(data)).status == 200


@pytest.mark.case("C237")
async def test_start_line_names_the_parser_and_it_is_the_c_one(mail: Pair) -> None:
    assert mail.sidecar.log_lines(event="start")[0]["parser"] == "c"


@pytest.mark.case("C237")
async def test_half_a_head_is_dropped_without_an_answer_or_a_line(mail: Pair) -> None:
    before = mail.sidecar.log()
    client = await Client.open(mail.sidecar.base)
    await client.send(TRICKS["two lengths"][:40])
    client.abort()
    assert (await mail.ask(request("GET", "/nowhere"))).status == 404
    await until(lambda: mail.sidecar.log()[len(before) :].count("\n") == 1)
