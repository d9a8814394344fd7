"""Connections, both sides: versions of HTTP, reuse, ends in the wrong moment, and where requests go at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from harness import (
    Client,
    RedisServer,
    Upstream,
    answer,
    chunked,
    close_after_content,
    close_idle,
    cut_chunks,
    cut_content,
    early,
    request,
    slow,
    together,
    until,
)
from pair import Pair, each_test, head, module_pair, post, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair()
mail = each_test()


@pytest.mark.case("C216")
@pytest.mark.parametrize("target", [b"/mail/emails", b"/mail/other"])
async def test_client_of_http_1_0_gets_no_chunks_and_sees_the_end(mail: Pair, target: bytes) -> None:
    mail.upstream.script(chunked([b"one,", b"two"]), answer(200, [], b"kept"))
    fields = (b"Authorization: Bearer one", b"Idempotency-Key: old" + target, b"Content-Length: 2")
    async with await mail.client() as client:
        got = await client.ask(head(b"POST " + target + b" HTTP/1.0", *fields) + b"{}")
        assert (got.status, got.content, got.first("transfer-encoding")) == (200, b"one,two", None)
        assert await client.rest() == b""
    replays = [b"POST " + target, b"GET /mail/other"]
    async with await mail.client() as client:
        for line in replays[("other" in target.decode()) :]:
            lines = (line + b" HTTP/1.0", b"Connection: keep-alive", *fields[: 3 if b"POST" in line else 1])
            got = await client.ask(head(*lines) + (b"{}" if b"POST" in line else b""))
            assert (got.status, got.every("connection")) == (200, [b"keep-alive"])
            assert got.content in (b"one,two", b"kept")


@pytest.mark.case("C217")
async def test_pipelined_requests_on_one_socket_are_answered_in_order(mail: Pair) -> None:
    mail.upstream.script(slow(0.1, answer(200, [], b"first")))
    keys = ["pipe 1", "pipe 2", "pipe 1"]
    data = b"".join(post(key) for key in keys) + request("GET", "/mail/last") + request("GET", "/nowhere")
    async with await mail.client() as client:
        await client.send(data)
        got = [await client.answer() for _ in range(5)]
    assert [one.status for one in got] == [200, 200, 200, 200, 404]
    assert [one.replayed for one in got] == [False, False, True, False, False]
    assert got[0].content == got[2].content == b"first"
    assert [one.target for one in mail.upstream.requests] == [b"/emails", b"/emails", b"/last"]


@pytest.mark.case("C217")
async def test_many_requests_share_one_socket_on_either_side(mail: Pair) -> None:
    async with await mail.client() as client:
        await client.ask(request("GET", "/mail/warm"))
        before = mail.upstream.connections
        for number in range(20):
            assert (await client.ask(post(f"kept alive {number}"))).status == 200
    assert (mail.count, mail.upstream.connections) == (21, before)


@pytest.mark.case("C218")
@pytest.mark.parametrize("status", [413, 401])
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_early_refusal_of_a_large_mail_reaches_the_client_and_frees_the_key(
    mail: Pair, status: int, target: str
) -> None:
    large = b"x" * 20 * 1024 * 1024
    mail.upstream.script(early(status, [("X-Why", "early")], b"too much"))
    data = post(f"early {status} {target}", large, target)
    async with await mail.client() as client:
        await client.send(data[:1000])
        writing = asyncio.create_task(client.send(data[1000:]))
        got = await client.answer()
        await asyncio.gather(writing, return_exceptions=True)
    assert (got.status, got.content, got.first("x-why")) == (status, b"too much", b"early")
    assert (await mail.ask(post(f"early {status} {target}", large, target))).status == 200
    assert mail.count == 1


@pytest.mark.case("C219")
@pytest.mark.parametrize("reset", [False, True])
async def test_idle_connection_that_the_upstream_closed_is_not_written_on(mail: Pair, reset: bool) -> None:
    mail.upstream.script(close_idle(reset=reset))
    for number in range(2):
        assert (await mail.ask(post(f"idle {reset} {number}"))).status == 200
    assert mail.count == 2
    assert mail.upstream.malformed == []


@pytest.mark.case("C219")
async def test_connection_that_ends_after_the_whole_request_leaves_the_key_unknown(mail: Pair) -> None:
    mail.upstream.script(answer(), close_after_content())
    await mail.ask(post("warm"))
    got = [await mail.ask(post("closed after it was read")) for _ in range(2)]
    assert [(one.status, one.slug) for one in got] == [(504, "outcome-unknown")] * 2
    assert mail.count == 2


@pytest.mark.case("C220")
@pytest.mark.parametrize(
    "cut",
    [cut_content(b"z" * 100, 40), cut_content(b"z" * 100, 40, reset=True), cut_chunks([b"z" * 40])],
    ids=["length", "length and reset", "chunks"],
)
async def test_half_an_answer_is_neither_kept_nor_taken_for_the_whole(
    mail: Pair, cut: object, request: pytest.FixtureRequest
) -> None:
    mail.upstream.script(cut)  # type: ignore[arg-type]
    key = f"half {request.node.callspec.id}"
    got = [await mail.ask(post(key)) for _ in range(3)]
    assert [(one.status, one.slug) for one in got] == [(504, "outcome-unknown")] * 3
    assert b"zzz" not in b"".join(one.content for one in got)
    assert mail.count == 1


@pytest.mark.case("C221")
async def test_crowd_of_sends_waits_for_no_connection_and_none_is_lost(mail: Pair) -> None:
    mail.upstream.default = slow(0.5)
    got = await together(mail.sidecar.base, [post(f"crowd {number}") for number in range(250)], deadline_s=20)
    assert [one.status for one in got] == [200] * 250
    assert mail.count == 250
    assert len({one.content for one in got}) == 250


@pytest.mark.case("C222")
@pytest.mark.parametrize(
    ("line", "target"),
    [
        (b"POST /mail/x/../emails HTTP/1.1", b"/x/../emails"),
        (b"POST http://evil.test/mail/emails HTTP/1.1", b"/emails"),
        (b"POST http://evil.test:1/mail//evil.test/emails HTTP/1.1", b"//evil.test/emails"),
        (b"POST //mail/emails HTTP/1.1", b"/emails"),
    ],
)
async def test_upstream_comes_from_the_configuration_whatever_a_request_names(
    mail: Pair, line: bytes, target: bytes
) -> None:
    fields = (b"Host: evil.test", b"X-Forwarded-Host: evil.test", b"Forwarded: host=evil.test", b"X-Host: evil.test")
    got = await mail.ask(head(line, *fields, b"Content-Length: 2") + b"{}")
    assert got.status == 200
    seen = mail.upstream.requests[0]
    assert seen.target == target
    assert seen.every("host") == [b"127.0.0.1:%d" % mail.upstream.port]


@pytest.mark.case("C222")
async def test_upstream_host_may_be_the_clients(tmp_path: Path, session_store: RedisServer) -> None:
    async with running(tmp_path, session_store.url, upstream_host="preserve") as pair:
        await pair.ask(request("GET", "/mail/a", host="mail.example.test:8"))
        await pair.send("preserved", fields=[("HOST", "other.test")])
        assert [one.first("host") for one in pair.upstream.requests] == [b"mail.example.test:8", b"other.test"]


@pytest.mark.case("C223")
async def test_environment_chooses_neither_proxy_nor_login(tmp_path: Path, session_store: RedisServer) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login thief password thief\n")
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = {**proxies, "HOME": str(tmp_path), "NETRC": str(tmp_path / ".netrc")}
    async with running(tmp_path, session_store.url, env=env) as pair:
        for key, fields in (("with", [("Authorization", "Bearer A")]), ("without", []), (None, [])):
            assert (await pair.ask(post(key, fields=fields))).status == 200
        assert [one.first("authorization") for one in pair.upstream.requests] == [b"Bearer A", None, None]


@pytest.mark.case("C224")
async def test_cookie_is_sent_for_nobody_where_the_upstream_has_a_name(
    tmp_path: Path, session_store: RedisServer
) -> None:
    far = await Upstream.start(answer(200, [("Set-Cookie", "sid=A; Path=/")]))
    try:
        named = f"http://localhost:{far.port}"
        async with running(tmp_path, session_store.url, at=far, upstream=named) as pair:
            for credential in ("A", "B", "A"):
                assert (await pair.ask(post(None, fields=[("Authorization", credential)]))).status == 200
            assert [one.first("cookie") for one in far.requests] == [None] * 3
            assert far.requests[0].first("host") == f"localhost:{far.port}".encode()
    finally:
        await far.stop()


@pytest.mark.case("C225")
async def test_late_answer_of_a_lost_exchange_reaches_nobody_else(mail: Pair) -> None:
    mail.upstream.script(slow(2.5, answer(200, [], b"late and secret")))
    first = asyncio.create_task(mail.ask(post("late")))
    await mail.upstream.reached(1)
    lost = await first
    assert lost.slug == "outcome-unknown"
    got = [await mail.ask(post(f"after the late one {number}")) for number in range(5)]
    assert {one.content == b"late and secret" for one in got} == {False}
    assert mail.count == 6


@pytest.mark.case("C226")
async def test_client_that_leaves_during_its_upload_leaves_no_trace(mail: Pair, session_store: RedisServer) -> None:
    before = session_store.keys()
    lines = len(mail.sidecar.log_lines(client="left"))
    data = post("left in the upload", b"x" * 300_000)
    for cut in (1_000, 200_000, len(data) - 1):
        client = await Client.open(mail.sidecar.base)
        await client.send(data[:cut])
        client.abort()
    await until(lambda: len(mail.sidecar.log_lines(client="left")) == lines + 3)
    assert (mail.count, mail.upstream.begun, session_store.keys()) == (0, [], before)
    got = await mail.ask(post("left in the upload", b"y"))
    assert (got.status, got.replayed, mail.count) == (200, False, 1)


@pytest.mark.case("C227")
async def test_slow_upload_takes_no_reservation(mail: Pair) -> None:
    data = post("slow upload")
    async with await mail.client() as client:
        await client.send(data[:-1])
        quick = await mail.ask(data)
        assert (quick.status, quick.replayed) == (200, False)
        await client.send(data[-1:])
        slow_one = await client.answer()
    assert (slow_one.status, slow_one.replayed, slow_one.content) == (200, True, quick.content)
    assert mail.count == 1
