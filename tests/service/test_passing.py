"""What is no send passes through: unchanged, streamed both ways, in bounded memory, never recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from harness import (
    Behaviour,
    Client,
    NoAnswerError,
    RedisServer,
    Turn,
    answer,
    close_after_content,
    cut_chunks,
    cut_content,
    echo,
    free_port,
    request,
    stall,
    until,
)
from harness.behaviours import At
from pair import Pair, each_test, head, module_pair, peak_bytes, post, reset_peak, rss_bytes, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair({"limits": {"request": "1MiB"}})
mail = each_test()

MIB = 1024 * 1024


def trickle(release: asyncio.Event, framing: bytes, first: bytes, second: bytes) -> Behaviour:
    """Answers with `first` and, once the test says so, `second`."""

    async def act(turn: Turn) -> bool:
        await turn.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + first)
        await release.wait()
        await turn.write(second)
        return True

    return Behaviour(act)


def flood(total_bytes: int, written: list[int]) -> Behaviour:
    """Answers with `total_bytes` as fast as they are taken; `written` says how many were."""

    async def act(turn: Turn) -> bool:
        await turn.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total_bytes)
        piece = b"f" * 65536
        while written[0] < total_bytes:
            await turn.write(piece)
            written[0] += len(piece)
        return True

    return Behaviour(act)


def lazy(begin: asyncio.Event) -> Behaviour:
    """Reads nothing of the content until the test says so."""

    async def act(turn: Turn) -> bool:
        await begin.wait()
        assert turn.request is not None
        length = turn.request.first("content-length")
        assert length is not None
        left = int(length)
        while left:
            left -= len(await turn.reader.read(min(left, 65536)))
        return await answer(200, [], b"read").act(turn)

    return Behaviour(act, At.HEAD)


@pytest.mark.case("C228")
@pytest.mark.parametrize(
    ("framing", "first", "second"),
    [
        (b"Content-Length: 10", b"first", b"-last"),
        (b"Transfer-Encoding: chunked", b"5\r\nfirst\r\n", b"5\r\n-last\r\n0\r\n\r\n"),
    ],
)
async def test_first_byte_of_an_answer_arrives_before_the_last_is_sent(
    mail: Pair, framing: bytes, first: bytes, second: bytes
) -> None:
    release = asyncio.Event()
    mail.upstream.script(trickle(release, framing, first, second))
    async with await mail.client() as client:
        await client.send(request("GET", "/mail/stream"))
        seen = await asyncio.wait_for(client.reader.readuntil(b"first"), 5)
        assert not release.is_set()
        release.set()
        seen += await asyncio.wait_for(client.reader.readuntil(b"-last"), 5)
    assert seen.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.case("C228")
@pytest.mark.parametrize("chunked", [False, True])
async def test_first_byte_of_a_request_arrives_before_the_last_is_sent(mail: Pair, chunked: bool) -> None:
    begun = asyncio.Event()

    async def act(turn: Turn) -> bool:
        await turn.reader.readuntil(b"first")
        begun.set()
        await turn.reader.readuntil(b"-last")
        return await answer(200, [("Connection", "close")], b"read").act(turn)

    mail.upstream.script(Behaviour(act, At.HEAD))
    framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", "10")
    async with await mail.client() as client:
        await client.send(request("POST", "/mail/stream", [framing]))
        await client.send(b"5\r\nfirst\r\n" if chunked else b"first")
        await asyncio.wait_for(begun.wait(), 5)
        await client.send(b"5\r\n-last\r\n0\r\n\r\n" if chunked else b"-last")
        assert (await client.answer()).content == b"read"


@pytest.mark.case("C229")
async def test_slow_reader_of_an_answer_does_not_fill_the_memory(mail: Pair) -> None:
    written = [0]
    total = 256 * MIB
    mail.upstream.script(flood(total, written))
    before = rss_bytes(mail.sidecar.pid)
    async with await mail.client() as client:
        await client.send(request("GET", "/mail/flood"))
        await until(lambda: written[0] > 0)
        await _stands_still(written)
        assert written[0] < 32 * MIB
        assert rss_bytes(mail.sidecar.pid) - before < 16 * MIB
        assert (await mail.ask(request("GET", "/mail/quick"))).status == 200
        await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)
        taken = 0
        while taken < 64 * MIB:
            taken += len(await asyncio.wait_for(client.reader.read(MIB), 5))
    assert rss_bytes(mail.sidecar.pid) - before < 32 * MIB
    await until(lambda: mail.upstream.open_connections <= 1)


async def _stands_still(written: list[int]) -> None:
    """Until nothing more is taken over a tenth of a second."""
    last = -1
    while last != written[0]:
        last = written[0]
        await asyncio.sleep(0.1)


@pytest.mark.case("C229")
async def test_slow_reader_of_a_request_does_not_fill_the_memory(mail: Pair) -> None:
    begin = asyncio.Event()
    mail.upstream.script(lazy(begin))
    total = 128 * MIB
    reset_peak(mail.sidecar.pid)
    before = rss_bytes(mail.sidecar.pid)
    sent = [0]

    async def upload(client: Client) -> None:
        for _ in range(total // 65536):
            await client.send(b"u" * 65536)
            sent[0] += 65536

    async with await mail.client() as client:
        await client.send(request("PUT", "/mail/upload", [("Content-Length", str(total))]))
        writing = asyncio.create_task(upload(client))
        await until(lambda: sent[0] > 0)
        await _stands_still(sent)
        assert sent[0] < 64 * MIB
        begin.set()
        assert (await client.answer(deadline_s=30)).content == b"read"
        await writing
    assert peak_bytes(mail.sidecar.pid) - before < 32 * MIB


@pytest.mark.case("C230")
async def test_content_above_the_limit_of_sends_passes(mail: Pair) -> None:
    mail.upstream.default = echo()
    content = bytes(range(256)) * 8192 + b"end"
    got = await mail.ask(request("POST", "/mail/other", [], content))
    assert (got.status, got.content == content) == (200, True)


@pytest.mark.case("C231")
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_other_methods_pass_twice_key_or_not_and_leave_no_record(
    mail: Pair, method: str, session_store: RedisServer
) -> None:
    before = session_store.keys()
    data = request(method, "/mail/emails?a=b", [("Authorization", "Bearer one")], b"content", key="passed")
    got = [await mail.ask(data) for _ in range(2)]
    assert [(one.status, one.replayed) for one in got] == [(200, False)] * 2
    assert [(one.method, one.target, one.content) for one in mail.upstream.requests] == [
        (method.encode(), b"/emails?a=b", b"content")
    ] * 2
    assert session_store.keys() == before


@pytest.mark.case("C231")
async def test_asterisk_form_of_options_passes_where_a_route_is_mounted_at_the_root(
    tmp_path: Path, session_store: RedisServer
) -> None:
    async with running(tmp_path, session_store.url, path="/") as pair:
        assert (await pair.ask(request("OPTIONS", "*"))).status == 200
        assert (await pair.ask(request("GET", "*"))).status == 400
        assert [(one.method, one.target) for one in pair.upstream.requests] == [(b"OPTIONS", b"*")]


@pytest.mark.case("C232")
async def test_answer_that_breaks_off_is_seen_to_break_off(mail: Pair) -> None:
    for cut in (cut_content(b"z" * 100, 40), cut_chunks([b"z" * 40])):
        mail.upstream.script(cut)
        with pytest.raises(NoAnswerError):
            await mail.ask(request("GET", "/mail/cut"))


@pytest.mark.case("C232")
async def test_answer_that_ends_with_its_connection_arrives_whole(mail: Pair) -> None:
    async def act(turn: Turn) -> bool:
        await turn.write(b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nall there is")
        return False

    mail.upstream.script(Behaviour(act))
    got = await mail.ask(request("GET", "/mail/to-the-end"))
    assert (got.status, got.content, got.first("x-a")) == (200, b"all there is", b"1")


@pytest.mark.case("C233")
async def test_failures_before_and_after_the_first_byte_are_told_apart(
    tmp_path: Path, session_store: RedisServer
) -> None:
    async with running(tmp_path, session_store.url) as pair:
        pair.upstream.script(close_after_content(), close_after_content())
        lost = await pair.ask(request("POST", "/mail/other", [], b"x"))
        assert (lost.status, lost.slug, lost.json()["sent"]) == (504, "outcome-unknown", "unknown")
        read = await pair.ask(request("GET", "/mail/other"))
        assert (read.status, read.slug, read.json()["sent"]) == (502, "upstream-unreachable", "no")
        await pair.upstream.refuse()
        for method in ("POST", "GET"):
            refused = await pair.ask(request(method, "/mail/other"))
            assert (refused.status, refused.slug, refused.json()["sent"]) == (502, "upstream-unreachable", "no")
            assert b"connection_refused" in (refused.first("proxy-status") or b"")


@pytest.mark.case("C234")
async def test_client_that_leaves_ends_the_passed_exchange(mail: Pair) -> None:
    mail.upstream.script(stall())
    client = await Client.open(mail.sidecar.base)
    await client.send(request("GET", "/mail/long"))
    await mail.upstream.reached(1)
    standing = mail.upstream.open_connections
    lines = len(mail.sidecar.log_lines(client="left", method="GET"))
    client.abort()
    await until(lambda: mail.upstream.open_connections < standing)
    await until(lambda: len(mail.sidecar.log_lines(client="left", method="GET")) == lines + 1)


@pytest.mark.case("C234")
async def test_client_that_leaves_within_a_passed_upload_cuts_it_visibly(mail: Pair) -> None:
    client = await Client.open(mail.sidecar.base)
    await client.send(request("POST", "/mail/other", [("Content-Length", "1000")]) + b"x" * 500)
    await until(lambda: mail.upstream.begun)
    standing = mail.upstream.open_connections
    client.abort()
    await until(lambda: mail.upstream.open_connections < standing)
    assert mail.count == 0


@pytest.mark.case("C235")
async def test_store_that_is_away_does_not_touch_what_passes(tmp_path: Path) -> None:
    away = f"redis://127.0.0.1:{free_port()}/0"
    async with running(tmp_path, away, ready=False) as pair:
        await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
        assert (await pair.ask(request("GET", "/mail/other"))).status == 200
        assert (await pair.ask(post(None))).status == 200
        refused = await pair.ask(post("needs the store"))
        assert (refused.slug, pair.count) == ("store-unavailable", 2)


@pytest.mark.case("C231")
async def test_head_of_a_passed_request_has_no_more_than_the_client_wrote(mail: Pair) -> None:
    await mail.ask(head(b"PATCH /mail/x HTTP/1.1", b"Host: h", b"transfer-encoding: chunked") + b"1\r\na\r\n0\r\n\r\n")
    seen = mail.upstream.requests[0]
    assert [name.lower() for name, _ in seen.fields] == [b"host", b"transfer-encoding"]
    assert seen.content == b"a"
