"""Many clients at once, idle, stalled, slow or deaf: they cost little, they end, and others do not feel them."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from pathlib import Path

import pytest
from crowd import connected, descriptors, each, meanwhile, ordinary
from harness import (
    Client,
    NoAnswerError,
    RedisServer,
    Sidecar,
    Turn,
    Upstream,
    answer,
    chunked,
    default_config,
    duration,
    raw,
    request,
    scaled,
    slow,
    until,
)
from harness.behaviours import Behaviour
from pair import Pair, each_test, module_pair, post, rss_bytes, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB = 1024 * 1024
TIMES = {"receive": duration(4), "connect": duration(2), "total": duration(4)}
shared = module_pair({"limits": {"stored_response": "4MiB"}}, timeout=TIMES)
mail = each_test()

HALF_HEAD = b"POST /mail/emails HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer o"


def half_content(number: int) -> bytes:
    """A send that stops in the middle of its content."""
    return request("POST", "/mail/emails", [("Content-Length", "1000")], key=f"half {number}") + b'{"to":"'


async def stats(pair: Pair) -> dict[str, int]:
    got: dict[str, int] = (await pair.sidecar.ask_admin("/v1/stats")).json()
    return got


async def resting(pair: Pair) -> None:
    """Wait until nothing is under way, and nothing is held."""

    async def none() -> bool:
        now = await stats(pair)
        return (now["outstanding"], now["content_bytes"], now["unsettled"]) == (0, 0, 0)

    await until(none, 10)


@pytest.mark.slow
@pytest.mark.case("C320")
async def test_idle_and_stalled_clients_by_the_thousand_do_not_slow_ordinary_sends(mail: Pair) -> None:
    begin = rss_bytes(mail.sidecar.pid)
    stalled = lambda number: half_content(number) if number % 2 else HALF_HEAD  # noqa: E731
    async with connected(mail, 2000), connected(mail, 500, stalled):
        assert (await stats(mail))["outstanding"] == 250
        (await ordinary(mail, "beside a crowd", 100)).quick(median_s=0.05, longest_s=1.0)
        assert rss_bytes(mail.sidecar.pid) - begin < 60 * MIB
    await resting(mail)
    assert descriptors(mail.sidecar.pid) < 200
    assert {one.first("idempotency-key") for one in mail.upstream.begun} == {
        b"beside a crowd %d" % number for number in range(100)
    }


@pytest.mark.case("C321")
@pytest.mark.parametrize("begun", ["alone", "behind a request", "behind a running request", "byte by byte"])
async def test_half_a_head_is_ended_in_the_time_for_uploads(
    tmp_path: Path, session_store: RedisServer, begun: str
) -> None:
    timeout = {"receive": duration(0.5), "connect": duration(1), "total": duration(2)}
    async with running(tmp_path, session_store.url, timeout=timeout) as pair, await pair.client() as client:
        begin_s = time.monotonic()
        pieces = [HALF_HEAD]
        if begun == "byte by byte":
            pieces = [bytes((byte,)) for byte in HALF_HEAD * 10]
        elif begun != "alone":
            pair.upstream.default = slow(0.2) if "running" in begun else answer()
            pieces = [post(f"whole {begun}") + HALF_HEAD]
        writing = asyncio.create_task(client.send_pieces(pieces, gap_s=0.02))
        if "request" in begun:
            assert (await client.answer()).status == 200
        rest = await client.rest(3)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert scaled(0.4) < time.monotonic() - begin_s < scaled(2.5)
        assert rest == b"" or rest.startswith(b"HTTP/1.1 408 ")
        # An idle connection is none that dawdles: nothing was begun on it.
        async with await pair.client() as idle:
            assert (await idle.ask(post("first"))).status == 200
            await until(lambda: time.monotonic() > begin_s + scaled(2))
            assert (await idle.ask(post("second"))).status == 200


@pytest.mark.slow
@pytest.mark.case("C322")
async def test_uploads_that_trickle_are_ended_and_hold_nobody_up(mail: Pair) -> None:
    async def trickle(client: Client, target: str, number: int) -> tuple[int, str]:
        data = request("POST", target, [("Content-Length", "4000")], key=f"trickle {target} {number}")
        await client.send(data)
        writing = asyncio.create_task(client.send_pieces([b"x"] * 4000, gap_s=0.05))
        got = await client.answer(deadline_s=20)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        return got.status, got.slug

    async with connected(mail, 100) as clients, meanwhile(mail, "beside trickles") as felt:
        got = await asyncio.gather(*(trickle(client, "/mail/emails", at) for at, client in enumerate(clients)))
    assert got == [(408, "request-malformed")] * 100
    felt.quick(median_s=0.05, longest_s=1.0)
    await resting(mail)
    assert [one for one in mail.upstream.begun if b"trickle /" in (one.first("idempotency-key") or b"")] == []


@pytest.mark.slow
@pytest.mark.case("C323")
async def test_upstream_that_trickles_its_answer_is_given_its_total_and_no_more(mail: Pair) -> None:
    drip = chunked([b"d"] * 200, gap_s=0.05)
    marked: dict[bytes, Behaviour] = {b"drip": drip}

    async def act(turn: Turn) -> bool:
        assert turn.request is not None
        return await marked.get(turn.request.first("x-how") or b"", answer()).act(turn)

    mail.upstream.default = Behaviour(act)
    dripped = [request("POST", "/mail/emails", [("X-How", "drip")], b"{}", key=f"drip {at}") for at in range(50)]
    async with connected(mail, 50) as clients, meanwhile(mail, "beside drips") as felt:
        begin_s = time.monotonic()
        got = await asyncio.gather(
            *(client.ask(data, deadline_s=20) for client, data in zip(clients, dripped, strict=True))
        )
        assert time.monotonic() - begin_s < scaled(7)
        # What passes is streamed for as long as it flows.
        passed = await mail.ask(request("GET", "/mail/domains", [("X-How", "drip")]), deadline_s=30)
    assert {(one.status, one.slug) for one in got} == {(504, "outcome-unknown")}
    assert (passed.status, passed.content) == (200, b"d" * 200)
    felt.quick(median_s=0.05, longest_s=1.0)
    await resting(mail)
    assert [(await mail.ask(data)).status for data in dripped[:5]] == [504] * 5
    assert len([one for one in mail.upstream.begun if one.target == b"/emails" and one.first("x-how")]) == 50


@pytest.mark.slow
@pytest.mark.case("C324")
async def test_fifteen_hundred_sends_at_once_are_all_answered_once(mail: Pair) -> None:
    mail.upstream.default = slow(1.0)
    async with connected(mail, 1500, lambda number: post(f"at once {number}")) as clients:
        got = await asyncio.gather(*(client.answer(deadline_s=30) for client in clients))
    assert {one.status for one in got} == {200}
    assert len({one.content for one in got}) == 1500
    keys = [one.first("idempotency-key") for one in mail.upstream.requests]
    assert (len(keys), len(set(keys))) == (1500, 1500)
    await resting(mail)
    async with connected(mail, 1500, lambda number: post(f"at once {number}")) as clients:
        again = await asyncio.gather(*(client.answer(deadline_s=30) for client in clients))
    assert [(one.status, one.content) for one in again] == [(200, one.content) for one in got]
    assert mail.count == 1500


@pytest.mark.slow
@pytest.mark.case("C325")
async def test_clients_that_do_not_read_their_answers_hold_up_nobody(mail: Pair) -> None:
    big = b"z" * (3 * MIB)
    mail.upstream.script(answer(200, [], big))
    assert (await mail.ask(post("big"))).status == 200
    begin = rss_bytes(mail.sidecar.pid)
    deaf = []
    for _ in range(60):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", mail.sidecar.port))
        sock.sendall(post("big"))
        deaf.append(sock)
        # One after the other: this is about answers that stay, not about many megabytes from the store at once.
        await ordinary(mail, f"beside deaf {len(deaf)}", 1)
    try:
        (await ordinary(mail, "beside the deaf", 50)).quick(median_s=0.05, longest_s=1.0)
        assert rss_bytes(mail.sidecar.pid) - begin < 60 * 4 * MIB
    finally:
        for sock in deaf:
            sock.close()
    await resting(mail)


@pytest.mark.case("C326")
async def test_pipelined_requests_without_end_are_taken_at_the_pace_of_their_answers(mail: Pair) -> None:
    begin = rss_bytes(mail.sidecar.pid)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", mail.sidecar.port))
    sock.setblocking(False)
    data = request("GET", "/nowhere") * 500
    taken = refused = 0
    deadline_s = time.monotonic() + scaled(10)
    # Until it takes no more for a while: nobody reads the answers.
    while refused < 20 and taken < 64 * MIB and time.monotonic() < deadline_s:
        try:
            taken += sock.send(data)
            refused = 0
        except BlockingIOError:
            refused += 1
            await ordinary(mail, f"beside a pipeline {taken} {refused}", 1)
    assert refused == 20, taken
    assert rss_bytes(mail.sidecar.pid) - begin < 24 * MIB
    sock.close()
    await resting(mail)


@pytest.mark.case("C327")
async def test_end_of_descriptors_leaves_it_alive_and_it_recovers(tmp_path: Path, session_store: RedisServer) -> None:
    far = await Upstream.start()
    few = Sidecar(tmp_path / "few", default_config(far, session_store.url))
    try:
        await few.run(ready=False)
        # Before its first line of Python: what it finds when it looks.
        resource.prlimit(few.pid, resource.RLIMIT_NOFILE, (300, 300))
        await few.ready()
        pair = Pair(few, far)
        async with connected(pair, 400) as clients:
            await until(lambda: descriptors(few.pid) >= 299)
            # A connection that stands is served: with a problem where none can be opened upstream.
            got = await clients[0].ask(post("at the end"))
            assert (got.status, got.slug) in (
                (502, "upstream-unreachable"),
                (503, "overloaded"),
                (503, "store-unavailable"),
            )
            assert got.json()["sent"] == "no"
            with pytest.raises((NoAnswerError, OSError)):
                await raw(few.base, post("one too many"), deadline_s=3)
            assert (few.exit_code, far.begun) == (None, [])

        async def served() -> bool:
            try:
                return (await few.send("at the end")).status == 200
            except (NoAnswerError, OSError):
                return False

        await until(served, 10)
        assert (await few.ask_admin("/livez")).status == 200
        await until(lambda: descriptors(few.pid) < 60)
        assert few.log_lines(level="error") == []
        assert far.count == 1
    finally:
        await few.close()
        await far.stop()


@pytest.mark.slow
@pytest.mark.case("C328")
async def test_connections_that_come_and_go_leave_nothing_behind(mail: Pair) -> None:
    pid = mail.sidecar.pid
    await ordinary(mail, "before the coming and going", 20)
    firsts = (b"", HALF_HEAD, half_content(1), post("whole")[:-3], b"\r\n", b"GET /nowhere HTTP/1.1\r\nHost: h\r\n\r\n")

    async def visit(number: int) -> None:
        client = await mail.client()
        await client.send(firsts[number % len(firsts)])
        if number % 3:
            client.writer.transport.abort()
        else:
            client.close()

    await each(1500, visit, 20)
    await resting(mail)
    before, open_before = rss_bytes(pid), descriptors(pid)
    await each(4500, visit, 20)
    await resting(mail)
    assert rss_bytes(pid) - before < 12 * MIB
    assert descriptors(pid) <= open_before + 20
    assert mail.count == 20
    (await ordinary(mail, "after the coming and going", 20)).quick(median_s=0.05, longest_s=1.0)


@pytest.mark.case("C329")
async def test_more_than_the_limit_of_outstanding_requests_is_503_and_nothing_is_sent(
    tmp_path: Path, session_store: RedisServer
) -> None:
    async with running(tmp_path, session_store.url, {"limits": {"outstanding": 5}}) as pair:
        pair.upstream.default = slow(0.6)
        async with connected(pair, 30, lambda number: post(f"many {number}")) as clients:
            got = await asyncio.gather(*(client.answer() for client in clients))
        assert sorted({(one.status, one.slug) for one in got}) == [(200, ""), (503, "overloaded")]
        assert all(one.json()["sent"] == "no" and one.first("retry-after") for one in got if one.status == 503)
        assert [one.status for one in got].count(200) == pair.count == 5
        # Stalled ones count as well, and leave with their time.
        async with connected(pair, 5, half_content):
            full = await until(lambda: _refused(pair))
            assert full
        await until(lambda: _served(pair))


async def _refused(pair: Pair) -> bool:
    return (await pair.ask(request("GET", "/mail/domains"))).status == 503


async def _served(pair: Pair) -> bool:
    return (await pair.ask(request("GET", "/mail/domains"))).status == 200
