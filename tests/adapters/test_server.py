"""aiohttp's server as we set it up, on real sockets: its limits, its errors in our words, and exact bytes out."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from harness import Client, raw, raw_bytes, request, until

from sidecar.content import Content, Memory
from sidecar.errors import ProblemError
from sidecar.message import Answer, Fields
from sidecar.protocol import KEEP_ALIVE_S, MAX_FIELDS
from sidecar.server import Inbound, Server

HEADER_BYTES = 4096
SECRET = b"Bearer hush-hush"
Handle = Callable[[Inbound], Awaitable[bool]]


@dataclass
class Lab:
    """A server that keeps each request's target and fields, and answers with `answer`."""

    answer: Answer = field(default_factory=lambda: Answer(200, b"OK", ((b"X-A", b"1"),), b"ok"))
    server: Server = field(init=False)
    base: str = ""
    closing: bool = False
    seen: list[tuple[bytes, bytes, Fields, bytes]] = field(default_factory=list)
    problems: list[ProblemError] = field(default_factory=list)
    faults: list[ProblemError] = field(default_factory=list)

    async def handle(self, inbound: Inbound) -> bool:
        pieces = []
        try:
            inbound.check(HEADER_BYTES)
            inbound.go_on()
            while piece := await inbound.piece():
                pieces.append(piece)
        except ProblemError as problem:
            self.faults.append(problem)
            await inbound.answer(Answer(problem.status, b"Refused", (), b""))
            return False
        self.seen.append((inbound.method, inbound.target, inbound.fields, b"".join(pieces)))
        await inbound.answer(self.answer)
        return inbound.keep_alive


@asynccontextmanager
async def serving(lab: Lab, handle: Handle | None = None) -> AsyncIterator[Lab]:
    """`lab` on a free port."""
    lab.server = Server(
        handle or lab.handle, malformed=lab.problems.append, closing=lambda: lab.closing, header_bytes=HEADER_BYTES
    )
    listening = await asyncio.get_running_loop().create_server(lab.server, "127.0.0.1", 0)
    lab.base = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield lab
    finally:
        listening.close()
        await lab.server.shutdown(1)


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    async with serving(Lab()) as made:
        yield made


# The limits that hold, and what happens to a misspelt one.


async def test_limits_of_a_connection_are_those_we_set(lab: Lab) -> None:
    connection = lab.server()
    assert connection.max_line_size == HEADER_BYTES
    assert connection.max_field_size == HEADER_BYTES + 1
    assert connection.max_headers == MAX_FIELDS
    assert connection.keepalive_timeout == KEEP_ALIVE_S
    assert lab.server.handler_cancellation
    assert connection.access_log is None


@pytest.mark.parametrize("misspelt", ["max_line_length", "auto_decompres", "acces_log"])
async def test_misspelt_option_raises_at_the_first_connection(lab: Lab, misspelt: str) -> None:
    lab.server.options[misspelt] = 1
    with pytest.raises(TypeError, match=misspelt):
        lab.server()


async def test_content_coding_is_left_alone(lab: Lab) -> None:
    packed = gzip.compress(b"{}")
    await raw(lab.base, request(fields=[("Content-Encoding", "gzip")], content=packed))
    assert lab.seen[0][3] == packed


async def test_handler_is_cancelled_when_its_client_leaves() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(_inbound: Inbound) -> bool:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return False

    async with serving(Lab(), wait) as lab:
        async with await Client.open(lab.base) as client:
            await client.send(request())
            await started.wait()
        await asyncio.wait_for(ended.wait(), 5)


# What the parser refuses.

MALFORMED = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no-token": (request(b"G\x01T"), 400),
    "unknown-method": (request("FOO"), 405),
    "two-lengths": (request(fields=[("Content-Length", "3"), ("Content-Length", "4")], content=b"abc"), 400),
    "length-and-chunked": (request(fields=[("Content-Length", "3"), ("Transfer-Encoding", "chunked")]), 400),
    "signed-length": (request(fields=[("Content-Length", "+3")]), 400),
    "blank-before-colon": (b"POST / HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n", 400),
    "folded": (b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n", 400),
    "nul": (b"POST / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
    "bare-cr": (b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\rY: 2\r\n\r\n", 400),
    "lf-lines": (b"POST / HTTP/1.1\nHost: a\n\n", 400),
    "long-target": (request(target=b"/" + b"x" * HEADER_BYTES), 414),
    "long-field": (request(fields=[("X-A", b"x" * (HEADER_BYTES + 9))]), 431),
    "many-fields": (request(fields=[("X", "1")] * (MAX_FIELDS + 1)), 431),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_refused_request_gets_a_problem_of_ours_and_nothing_is_quoted(
    lab: Lab, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, status = MALFORMED[name]
    data = data.replace(b"\r\nHost:", b"\r\nAuthorization: " + SECRET + b"\r\nHost:", 1)
    with caplog.at_level(logging.DEBUG):
        written = await raw_bytes(lab.base, data)
    head, _, content = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    lines = head.lower().split(b"\r\n")
    assert b"content-type: application/problem+json" in lines
    assert b"content-length: %d" % len(content) in lines
    assert b"connection: close" in lines
    assert json.loads(content)["type"].endswith("request-malformed")
    assert json.loads(content)["sent"] == "no"
    assert b"hush" not in written
    assert "hush" not in caplog.text
    assert [problem.status for problem in lab.problems] == [status]
    assert lab.seen == []


async def test_long_authorization_is_not_quoted(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        written = await raw_bytes(
            lab.base, request(fields=[("Authorization", SECRET + b"x" * HEADER_BYTES)]), deadline_s=10
        )
    assert written.startswith(b"HTTP/1.1 431 ")
    assert b"hush" not in written
    assert "hush" not in caplog.text


async def test_refused_request_ends_the_connection_behind_an_answered_one(lab: Lab) -> None:
    async with await Client.open(lab.base) as client:
        assert (await client.ask(request())).status == 200
        await client.send(request(fields=[("Content-Length", "+1")]) + request(target="/smuggled"))
        assert (await client.rest()).count(b"HTTP/1.1 400 ") == 1
    assert [target for _, target, _, _ in lab.seen] == [b"/mail/emails"]


CHECKED = {
    "no-host": (b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
    "two-hosts": (b"POST / HTTP/1.1\r\nHost: a\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 400),
    "other-coding": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "all-fields-too-long": (request(fields=[(f"X-{n}", "x" * 1000) for n in range(5)]), 431),
    "expectation": (request(fields=[("Expect", "200-ok")]), 417),
}


@pytest.mark.parametrize("name", CHECKED)
async def test_head_that_rfc_9112_forbids_is_refused(lab: Lab, name: str) -> None:
    data, status = CHECKED[name]
    assert (await raw(lab.base, data)).status == status
    assert lab.seen == []
    assert [problem.slug for problem in lab.faults + lab.problems] == ["request-malformed"]


# What arrives, and what is written.


async def test_target_and_fields_arrive_byte_for_byte(lab: Lab) -> None:
    lines = b"Host: a\r\nX-Tag: 1\r\nx-tag: caf\xe9\r\nX-TAG:\r\nContent-Length: 0\r\n\r\n"
    await raw(lab.base, b"PATCH //a/../b%2f?x=%7E&&#q HTTP/1.1\r\n" + lines)
    method, target, fields, _ = lab.seen[0]
    assert (method, target) == (b"PATCH", b"//a/../b%2f?x=%7E&&#q")
    assert fields == (
        (b"Host", b"a"),
        (b"X-Tag", b"1"),
        (b"x-tag", b"caf\xe9"),
        (b"X-TAG", b""),
        (b"Content-Length", b"0"),
    )


async def test_continue_is_written_once_and_only_where_it_is_waited_for(lab: Lab) -> None:
    async with await Client.open(lab.base) as client:
        await client.send(request(fields=[("Expect", "100-Continue"), ("Content-Length", "2")]))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"{}")
        assert (await client.answer()).interim == ()
        assert (await client.ask(request())).interim == ()


ODD: Fields = ((b"X-A", b"caf\xe9"), (b"Set-Cookie", b"a"), (b"set-COOKIE", b"b"), (b"X-Empty", b""))
ODD_LINES = b"X-A: caf\xe9\r\nSet-Cookie: a\r\nset-COOKIE: b\r\nX-Empty: \r\n"
HEADS = {
    "plain": (
        b"POST",
        "1.1",
        Answer(200, b"OK", ODD, b"ok"),
        b"200 OK\r\n" + ODD_LINES + b"Content-Length: 2\r\n",
        b"ok",
    ),
    "no-reason": (b"POST", "1.1", Answer(299, b"", (), b""), b"299 \r\nContent-Length: 0\r\n", b""),
    "odd-reason": (
        b"POST",
        "1.1",
        Answer(200, b"Caf\xe9 :)", (), b""),
        b"200 Caf\xe9 :)\r\nContent-Length: 0\r\n",
        b"",
    ),
    "length-in-place": (
        b"POST",
        "1.1",
        Answer(200, b"OK", ((b"content-length", b"99"), (b"X-A", b"1"), (b"Content-Length", b"99")), b"ok"),
        b"200 OK\r\ncontent-length: 2\r\nX-A: 1\r\n",
        b"ok",
    ),
    "head": (b"HEAD", "1.1", Answer(200, b"OK", (), b"ok"), b"200 OK\r\nContent-Length: 2\r\n", b""),
    "204": (b"POST", "1.1", Answer(204, b"No Content", ODD, b""), b"204 No Content\r\n" + ODD_LINES, b""),
    "1.0": (
        b"POST",
        "1.0",
        Answer(200, b"OK", (), b"ok"),
        b"200 OK\r\nContent-Length: 2\r\nConnection: close\r\n",
        b"ok",
    ),
}


@pytest.mark.parametrize("name", HEADS)
async def test_answer_is_written_byte_for_byte(lab: Lab, name: str) -> None:
    method, version, lab.answer, head, content = HEADS[name]
    data = request(method, content=b"{}").replace(b"HTTP/1.1", b"HTTP/" + version.encode())
    async with await Client.open(lab.base) as client:
        await client.send(data)
        expected = b"HTTP/1.1 " + head + b"\r\n" + content
        assert await client.reader.readexactly(len(expected)) == expected
        client.half_close()
        assert await client.rest() == b""


async def test_connection_field_says_whether_it_goes_on(lab: Lab) -> None:
    close = await raw_bytes(lab.base, request(fields=[("Connection", "close")]))
    assert b"\r\nConnection: close\r\n" in close
    kept = request(fields=[("Connection", "keep-alive")]).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with await Client.open(lab.base) as client:
        for _ in range(2):
            assert (await client.ask(kept)).every("connection") == [b"keep-alive"]
        assert (await client.ask(request())).every("connection") == []
        # Asked when the answer is written: the drain may have begun while the request ran.
        lab.closing = True
        assert (await client.ask(request())).every("connection") == [b"close"]
        assert await client.rest() == b""


async def test_large_content_is_written_whole_at_the_pace_of_its_client() -> None:
    content = Content(Memory(1 << 22))
    for number in range(48):
        content.write(bytes([number]) * 65536)
    whole = content.whole()

    async def handle(inbound: Inbound) -> bool:
        await inbound.answer(Answer(200, b"OK", ((b"Content-Length", b"1"),), b""), content)
        return True

    async with serving(Lab(), handle) as lab:
        got = await raw(lab.base, request())
    assert got.content == whole
    assert got.every("content-length") == [b"%d" % len(whole)]
    content.close()


async def test_abort_is_seen_by_the_client_as_a_broken_answer() -> None:
    async def handle(inbound: Inbound) -> bool:
        await inbound.write(inbound.head(200, b"OK", (), length=None, chunked=True) + b"2\r\nok\r\n")
        inbound.abort()
        return False

    async with serving(Lab(), handle) as lab:
        written = await raw_bytes(lab.base, request())
        assert b"Transfer-Encoding: chunked\r\n" in written
        assert not written.endswith(b"0\r\n\r\n")
        await until(lambda: not lab.server.connections)
