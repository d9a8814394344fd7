"""The harness itself: what the other tests believe of it is looked at once, on its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from harness import (
    Client,
    NoAnswerError,
    RedisServer,
    ReplyError,
    StartSidecar,
    StoreProxy,
    Upstream,
    answer,
    chunked,
    close_after_content,
    close_idle,
    cut_chunks,
    cut_content,
    early,
    echo,
    embedded,
    gate,
    interim,
    raw,
    raw_answer,
    raw_bytes,
    request,
    reset_after_content,
    reset_on_accept,
    stall,
    together,
    until,
)
from harness.behaviours import Behaviour


async def test_upstream_keeps_head_bytes_and_counts_whole_requests(upstream: Upstream) -> None:
    head = b"POST /a?  HTTP/1.1\r\nX-Tag: 1\r\nx-tag:2\r\nX-TAG:  caf\xe9\r\nContent-Length: 3\r\n\r\n"
    async with await Client.open(upstream.url) as client:
        await client.send_pieces([head[:20], head[20:], b"ab"])
        assert upstream.count == 0
        assert len(upstream.begun) == 1
        await client.send(b"c")
        assert (await client.answer()).status == 200
    received = upstream.requests[0]
    assert received.head == head
    assert received.every("x-tag") == [b"1", b"2", b" caf\xe9"]
    assert received.content == b"abc"
    assert received.whole


async def test_upstream_reads_chunks_and_keeps_the_connection(upstream: Upstream) -> None:
    upstream.default = echo()
    fields = [("Transfer-Encoding", "chunked")]
    async with await Client.open(upstream.url) as client:
        for content in (b"3\r\nabc\r\n2;x=1\r\nde\r\n0\r\nTrailer: 1\r\n\r\n", b"0\r\n\r\n"):
            await client.ask(request("POST", "/", fields) + content)
    assert [received.content for received in upstream.requests] == [b"abcde", b""]
    assert {received.connection for received in upstream.requests} == {1}


async def test_upstream_does_not_count_a_request_that_was_cut(upstream: Upstream) -> None:
    client = await Client.open(upstream.url)
    await client.send(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
    await until(lambda: upstream.begun)
    client.abort()
    await until(lambda: upstream.open_connections == 0)
    assert upstream.count == 0


async def test_script_is_played_in_order_then_the_default(upstream: Upstream) -> None:
    upstream.default = answer(202, content=b"")
    upstream.script(answer(500, content=b"no"), answer(422, [("X-A", "1"), ("X-A", "2")], b"{}", "Nope"))
    answers = [await raw(upstream.url, request(content=b"x")) for _ in range(3)]
    assert [one.status for one in answers] == [500, 422, 202]
    assert answers[1].reason == b"Nope"
    assert answers[1].every("x-a") == [b"1", b"2"]


@pytest.mark.parametrize(
    ("behaviour", "counted"),
    [
        (reset_after_content(), 1),
        (close_after_content(), 1),
        (cut_content(), 1),
        (cut_content(reset=True), 1),
        (cut_chunks(), 1),
        (reset_on_accept(), 0),
    ],
    ids=["reset", "close", "cut", "cut_reset", "cut_chunks", "reset_on_accept"],
)
async def test_misbehaviour_leaves_no_complete_answer(upstream: Upstream, behaviour: Behaviour, counted: int) -> None:
    upstream.script(behaviour)
    with pytest.raises((NoAnswerError, ConnectionError)):
        await raw(upstream.url, request(content=b"x"))
    assert upstream.count == counted
    assert (await raw(upstream.url, request(content=b"x"))).status == 200


async def test_early_answer_comes_before_the_content(upstream: Upstream) -> None:
    upstream.script(early(413))
    async with await Client.open(upstream.url) as client:
        await client.send(b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        assert (await client.answer()).status == 413
    assert upstream.count == 0


async def test_interim_chunked_and_raw_answers(upstream: Upstream) -> None:
    upstream.script(interim(103, then=chunked([b"ab", b"c"], trailer=b"X: 1\r\n")), raw_answer(b"garbage"))
    one = await raw(upstream.url, request())
    assert (one.interim, one.status, one.content) == ((103,), 200, b"abc")
    assert await raw_bytes(upstream.url, request()) == b"garbage"


async def test_stall_gate_and_close_idle(upstream: Upstream) -> None:
    opened = asyncio.Event()
    upstream.script(stall(), gate(opened), close_idle())
    with pytest.raises(TimeoutError):
        await raw(upstream.url, request(), deadline_s=0.05)
    async with await Client.open(upstream.url) as client:
        await client.send(request())
        await upstream.reached(2)
        opened.set()
        assert (await client.answer()).status == 200
    async with await Client.open(upstream.url) as client:
        assert (await client.ask(request())).first("connection") is None
        assert await client.rest() == b""


async def test_refusing_port_stays_its_own_and_opens_again(upstream: Upstream) -> None:
    await upstream.refuse()
    with pytest.raises(ConnectionRefusedError):
        await raw(upstream.url, request())
    await upstream.accept()
    assert (await raw(upstream.url, request())).status == 200


async def test_twins_leave_together_and_every_answer_differs(upstream: Upstream) -> None:
    answers = await together(upstream.url, [request(content=b"x")] * 20)
    assert upstream.count == 20
    assert len({one.content for one in answers}) == 20


async def test_head_request_has_no_content(upstream: Upstream) -> None:
    async with await Client.open(upstream.url) as client:
        for _ in range(2):
            one = await client.ask(request("HEAD", "/"))
            assert (one.status, one.content) == (200, b"")
            assert one.first("content-length") != b"0"


def test_store_answers_every_kind_of_reply(store: RedisServer) -> None:
    assert store.command("SET", "k", b"\x00\r\n") == b"OK"
    assert store.command("GET", "k") == b"\x00\r\n"
    assert store.command("GET", "none") is None
    assert store.command("EVAL", "return {1, 'a', {}}", 0) == [1, b"a", []]
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        store.command("LPUSH", "k", 1)
    assert store.keys() == [b"k"]


def test_store_is_empty_for_each_test(store: RedisServer) -> None:
    assert store.keys() == []


def test_private_store_survives_kill_and_hangs_while_paused(private_store: RedisServer) -> None:
    private_store.command("SET", "k", 1)
    private_store.pause()
    with pytest.raises(OSError, match="timed out"):
        private_store.command("GET", "k", deadline_s=0.05)
    private_store.resume()
    private_store.kill()
    with pytest.raises(OSError, match=r"refused|closed"):
        private_store.command("PING")
    private_store.start()
    assert private_store.command("GET", "k") == b"1"


async def _ask(front: StoreProxy, *words: str) -> bytes:
    reader, writer = await asyncio.open_connection(front.host, front.port)
    try:
        writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        return await asyncio.wait_for(reader.readline(), 0.3)
    except TimeoutError:
        return b"(silence)"
    finally:
        writer.close()


async def test_front_passes_loses_holds_and_cuts(front: StoreProxy, private_store: RedisServer) -> None:
    assert await _ask(front, "SET", "a", "1") == b"+OK\r\n"
    front.lose_reply(b"INCR")
    with pytest.raises(ConnectionError):
        await _ask(front, "INCR", "a")
    assert private_store.command("GET", "a") == b"2"
    assert await _ask(front, "INCR", "a") == b":3\r\n"
    front.drop_replies = True
    assert await _ask(front, "INCR", "a") == b"(silence)"
    front.drop_replies, front.black_hole = False, True
    assert await _ask(front, "INCR", "a") == b"(silence)"
    front.black_hole, front.cut_after_bytes = False, 2
    assert await _ask(front, "INCR", "a") == b":5"
    front.cut_after_bytes = None
    front.freeze()
    held = asyncio.create_task(_ask(front, "PING"))
    await until(lambda: front.connections == 7)
    front.thaw()
    assert await held == b"+PONG\r\n"
    await front.refuse()
    with pytest.raises(ConnectionRefusedError):
        await _ask(front, "PING")
    await front.accept()
    assert await _ask(front, "PING") == b"+PONG\r\n"
    assert front.lost == 1


async def test_until_names_what_did_not_happen() -> None:
    with pytest.raises(AssertionError, match="the sky falls"):
        await until(lambda: False, 0.02, what="the sky falls")


async def test_sidecar_answers_restarts_and_leaves_no_process(
    sidecar: StartSidecar, upstream: Upstream, tmp_path: Path
) -> None:
    one = await sidecar(store=embedded(tmp_path))
    first = await one.send("K1")
    assert (first.status, upstream.count) == (200, 1)
    await one.kill()
    await one.restart()
    again = await one.send("K1")
    assert (again.replayed, again.content, upstream.count) == (True, first.content, 1)
    assert one.log_lines()
    assert one.pid in one.processes()
    assert await one.stop() == 0
    assert one.processes() == []


async def test_sidecar_with_an_unusable_file_ends_with_its_reason(sidecar: StartSidecar) -> None:
    one = await sidecar("routes: [", ready=False)
    assert await one.wait_exit() == 2
    assert str(one.file) in one.log()
