"""When no complete answer comes: surely not sent, or lost; what the client is told, and what a retry gets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
from harness import (
    answer,
    chunked,
    close_after_content,
    close_idle,
    cut_chunks,
    cut_content,
    free_port,
    interim,
    raw_answer,
    reset_after_content,
    reset_on_accept,
    scaled,
    slow,
    stall,
    until,
)
from harness.behaviours import At, Behaviour, Turn
from harness.program import MAIL
from lab import Lab, Settings, error_of, fresh, problem, stored, times, unknown

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK_S = 0.5


def routes(lab: Lab) -> dict[str, Settings]:
    quick = {"timeout": times(connect_s=QUICK_S, total_s=QUICK_S)}
    away = {"upstream": f"http://127.0.0.1:{free_port()}"}
    return {
        "mail": lab.route(**quick),
        "resend": lab.route("resend", **quick),
        "sendhq": lab.route("sendhq", **quick),
        "rovela": lab.route("rovela", **quick),
        "refused": lab.route(**quick | away),
        "refused-resend": lab.route("resend", **quick | away),
        "name": lab.route(**quick, upstream="http://nowhere.invalid"),
        "handshake": lab.route(**quick, upstream=f"https://127.0.0.1:{lab.upstream.port}"),
        "slow-handshake": lab.route(**quick, upstream=f"https://127.0.0.1:{silent_port(lab)}"),
        "full": lab.route(**quick, upstream=f"http://127.0.0.1:{full_port(lab)}"),
    }


def silent_port(lab: Lab) -> int:
    """A port that takes connections and says nothing."""
    server = lab.closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    return int(server.getsockname()[1])


def full_port(lab: Lab) -> int:
    """A port whose backlog is full: a connection is neither taken nor refused."""
    server = lab.closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        sock = lab.closing.enter_context(socket.socket())
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(server.getsockname())
    return int(server.getsockname()[1])


def target(route: str) -> str:
    return f"/{route}/v1/send" if route == "sendhq" else f"/{route}/emails"


def reset_within_content(after_bytes: int = 100_000) -> Behaviour:
    """Reads the head and some of the content, then RST."""

    async def act(turn: Turn) -> bool:
        await turn.reader.readexactly(after_bytes)
        turn.reset()
        return False

    return Behaviour(act, At.HEAD)


def plain_text() -> Behaviour:
    """Speaks HTTP where a TLS handshake is awaited."""

    async def act(turn: Turn) -> bool:
        await turn.reader.read(100)
        await turn.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await turn.reader.read()
        return False

    return Behaviour(act, At.ACCEPT)


OK = b"HTTP/1.1 200 OK\r\n"
LOST = {
    "reset": (reset_after_content(), {"connection_terminated"}),
    "closed": (close_after_content(), {"connection_terminated"}),
    "silent": (stall(), {"http_response_timeout"}),
    "late": (slow(3 * QUICK_S), {"http_response_timeout"}),
    "trickle": (chunked([b"x"] * 20, gap_s=QUICK_S / 4), {"http_response_timeout", "connection_read_timeout"}),
    "cut-content": (cut_content(), {"http_response_incomplete"}),
    "reset-content": (cut_content(reset=True), {"http_response_incomplete", "connection_terminated"}),
    "cut-chunks": (cut_chunks(), {"http_response_incomplete"}),
    "cut-head": (raw_answer(OK + b"X-Id: 1\r\n"), {"http_response_incomplete", "connection_terminated"}),
    "garbage": (raw_answer(b"garbage\r\n\r\n"), {"http_protocol_error"}),
    "two-lengths": (raw_answer(OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"), {"http_protocol_error"}),
    "bad-chunk": (raw_answer(OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"), {"http_protocol_error"}),
    "101": (raw_answer(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"), None),
    "interim-only": (interim(103, then=close_after_content()), {"connection_terminated"}),
}


@pytest.mark.case("C137")
@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("route", ["mail", "rovela"])
async def test_lost_answer_is_504_and_no_retry_is_sent(shared: Lab, route: str, name: str) -> None:
    behaviour, errors = LOST[name]
    key = fresh()
    shared.upstream.script(behaviour)
    first = await shared.one.send(key, target=target(route))
    unknown(first)
    assert first.first("retry-after") is None
    assert errors is None or error_of(first) in errors
    assert shared.state(key) == "unknown"
    for _ in range(2):
        unknown(await shared.one.send(key, target=target(route)))
    reused = await shared.one.send(key, MAIL.replace(b"hello", b"x"), target(route))
    problem(reused, "key-reused", 422, sent="unknown", retryable=False)
    assert shared.count(key) == 1


@pytest.mark.case("C138")
@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("route", ["resend", "sendhq"])
async def test_lost_answer_is_504_and_a_retry_is_sent_with_the_same_key_where_the_provider_guards_it(
    shared: Lab, route: str, name: str
) -> None:
    behaviour, errors = LOST[name]
    key = fresh()
    shared.upstream.script(behaviour)
    first = await shared.one.send(key, target=target(route))
    unknown(first)
    assert errors is None or error_of(first) in errors
    if route == "resend":
        assert first.first("content-type") == b"application/json"
        members = first.json()
        assert (members["statusCode"], members["name"]) == (504, "outcome_unknown")
        assert members["message"] == members["detail"]
    second = await shared.one.send(key, target=target(route))
    assert (second.status, second.replayed) == (200, False)
    stored(second, await shared.one.send(key, target=target(route)))
    assert [one.first("idempotency-key") for one in shared.mails(key)] == 2 * [key.encode()]


@pytest.mark.case("C137")
async def test_reset_while_the_content_is_still_sent_is_lost(shared: Lab) -> None:
    key = fresh()
    large = b"x" * 8_000_000
    shared.upstream.script(reset_within_content())
    unknown(await shared.one.send(key, large))
    unknown(await shared.one.send(key, large))
    assert shared.count(key) == 0
    assert len(shared.upstream.begun) == 1


@pytest.mark.case("C139")
async def test_total_timeout_tells_504_in_time_and_the_retry_at_once(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(stall())
    begin_s = time.monotonic()
    unknown(await shared.one.send(key))
    took_s = time.monotonic() - begin_s
    assert scaled(QUICK_S) <= took_s < scaled(QUICK_S + 0.5)
    begin_s = time.monotonic()
    unknown(await shared.one.send(key))
    assert time.monotonic() - begin_s < scaled(0.2)
    assert shared.count(key) == 1


@pytest.mark.case("C139")
async def test_answer_within_the_total_timeout_is_no_loss_however_slowly_it_comes(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(chunked([b"a", b"b", b"c"], gap_s=QUICK_S / 5))
    first = await shared.one.send(key)
    assert (first.status, first.content) == (200, b"abc")
    stored(first, await shared.one.send(key))
    assert shared.count(key) == 1


NOT_SENT = {
    "refused": "connection_refused",
    "refused-resend": "connection_refused",
    "name": "dns_error",
    "handshake": "tls_protocol_error",
    "slow-handshake": "connection_timeout",
    "full": "connection_timeout",
}


@pytest.mark.case("C140")
@pytest.mark.parametrize("route", NOT_SENT)
async def test_not_a_byte_written_is_502_with_the_reason_and_the_key_is_free(shared: Lab, route: str) -> None:
    key = fresh()
    if route == "handshake":
        shared.upstream.script(plain_text(), plain_text())
    begin_s = time.monotonic()
    given = await shared.one.send(key, target=f"/{route}/emails")
    assert time.monotonic() - begin_s < scaled(QUICK_S + 1.0)
    members = problem(given, "upstream-unreachable", 502, sent="no")
    assert error_of(given) == NOT_SENT[route]
    if route == "refused-resend":
        assert (members["statusCode"], members["name"]) == (502, "upstream_unreachable")
    assert shared.state(key) == ""
    assert shared.upstream.begun == []
    again = await shared.one.send(key, MAIL.replace(b"hello", b"other content"), f"/{route}/emails")
    problem(again, "upstream-unreachable", 502, sent="no")


@pytest.mark.case("C141")
@pytest.mark.parametrize("route", ["mail", "resend", "sendhq", "rovela"])
async def test_refused_connection_never_burns_the_key(shared: Lab, route: str) -> None:
    key = fresh()
    await shared.upstream.refuse()
    begin_s = time.monotonic()
    problem(await shared.one.send(key, target=target(route)), "upstream-unreachable", 502, sent="no")
    assert time.monotonic() - begin_s < scaled(1.0)
    await shared.upstream.accept()
    given = await shared.one.send(key, target=target(route))
    assert (given.status, given.replayed) == (200, False)
    assert (await shared.one.send(key, target=target(route))).replayed
    assert shared.count(key) == 1


@pytest.mark.case("C141")
async def test_never_left_and_perhaps_accepted_are_told_apart(shared: Lab) -> None:
    unsent, lost = fresh(), fresh()
    await shared.upstream.refuse()
    problem(await shared.one.send(unsent), "upstream-unreachable", 502, sent="no")
    await shared.upstream.accept()
    shared.upstream.script(reset_after_content())
    unknown(await shared.one.send(lost))
    assert (await shared.one.send(unsent)).status == 200
    unknown(await shared.one.send(lost))
    assert (shared.count(unsent), shared.count(lost)) == (1, 1)


@pytest.mark.case("C142")
@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_idle_connection_that_ended_is_seen_before_it_is_used(shared: Lab, reset: bool) -> None:
    shared.upstream.script(close_idle(reset=reset))
    assert (await shared.one.send(fresh())).status == 200
    await until(lambda: shared.upstream.open_connections == 0, what="the upstream has closed its connection")
    key = fresh()
    given = await shared.one.send(key)
    assert (given.status, given.replayed) == (200, False)
    assert shared.count(key) == 1


@pytest.mark.case("C142")
async def test_request_read_and_then_closed_on_a_used_connection_is_lost(shared: Lab) -> None:
    shared.upstream.script(answer(), close_after_content())
    assert (await shared.one.send(fresh())).status == 200
    key = fresh()
    unknown(await shared.one.send(key))
    unknown(await shared.one.send(key))
    assert shared.count(key) == 1
    assert shared.upstream.requests[1].connection == shared.upstream.requests[0].connection


@pytest.mark.case("C143")
async def test_late_answer_never_reaches_the_next_request(shared: Lab) -> None:
    shared.upstream.script(slow(QUICK_S + 0.2, answer(200, content=b"late")))
    unknown(await shared.one.send(fresh()))
    shared.upstream.default = answer(200, content=b"own")
    given = await asyncio.gather(*(shared.one.send(fresh()) for _ in range(5)))
    assert {one.content for one in given} == {b"own"}
    late = shared.upstream.requests[0].connection
    assert late not in {one.connection for one in shared.upstream.requests[1:]}


@pytest.mark.case("C143")
async def test_reset_on_a_fresh_connection_before_a_byte_was_read_never_doubles(shared: Lab) -> None:
    """Whether it counts as not sent or as lost is a race of the network; either way there is one mail at most."""
    await shared.upstream.drop()
    key = fresh()
    shared.upstream.script(reset_on_accept())
    first = await shared.one.send(key)
    assert first.slug in ("upstream-unreachable", "outcome-unknown")
    again = await shared.one.send(key)
    if first.slug == "upstream-unreachable":
        assert (again.status, shared.count(key)) == (200, 1)
    else:
        unknown(again)
        assert shared.count(key) == 0


@pytest.mark.case("C144")
async def test_sends_over_the_limit_of_requests_are_refused_and_their_keys_stay_free(shared: Lab) -> None:
    crowded = await shared.sidecar(
        {"mail": shared.route(timeout=times(total_s=3))}, limits={"outstanding": 5}, store={"prefix": "crowded"}
    )
    shared.upstream.default = slow(0.3)
    keys = [fresh() for _ in range(20)]
    given = dict(zip(keys, await asyncio.gather(*(crowded.send(key) for key in keys)), strict=True))
    over = [key for key, one in given.items() if one.status == 503]
    assert over
    assert len(over) >= 15 - 5
    for key in over:
        problem(given[key], "overloaded", 503, sent="no")
        assert given[key].first("retry-after") is not None
        assert shared.count(key) == 0
    assert all(given[key].status == 200 for key in keys if key not in over)
    shared.upstream.default = answer()
    for key in over:
        assert (await crowded.send(key)).status == 200
    assert [shared.count(key) for key in keys] == 20 * [1]


@pytest.mark.case("C144")
async def test_many_sends_at_once_to_a_slow_upstream_all_arrive(shared: Lab) -> None:
    patient = await shared.sidecar(
        {"mail": shared.route(timeout=times(total_s=5, connect_s=5))}, store={"prefix": "patient"}
    )
    shared.upstream.default = slow(0.5)
    keys = [fresh() for _ in range(250)]
    given = await asyncio.gather(*(patient.send(key, deadline_s=20) for key in keys))
    assert [one.status for one in given] == 250 * [200]
    assert [shared.count(key) for key in keys] == 250 * [1]
