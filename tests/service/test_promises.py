"""The promise itself: one key, one mail at the upstream, and every retry gets the first answer."""

from __future__ import annotations

import hashlib
import json

import pytest
from harness import answer, chunked, request, together
from harness.client import Parsed
from harness.program import MAIL
from lab import FIELDS, JSON, Lab, Settings, fresh, problem, stored

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = MAIL.replace(b"hello", b"goodbye")


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(),
        "strict": lab.route(key={"missing": "reject"}),
        "batch": lab.route(
            sends=[{"match": "POST /one", "final": ["2xx"]}, {"match": "POST /many", "final": ["2xx", 400]}]
        ),
        "put": lab.route(sends=["PUT /things/{id}", "POST /emails"]),
        "quiet": lab.route(replay_field="X-Again"),
    }


async def twice(lab: Lab, key: str, target: str = "/mail/emails") -> tuple[Parsed, Parsed]:
    return await lab.one.send(key, target=target), await lab.one.send(key, target=target)


@pytest.mark.case("C101")
async def test_unused_key_is_forwarded_once_and_its_answer_is_unchanged(shared: Lab) -> None:
    key = fresh()
    fields = [("X-Id", "1"), ("x-id", "2"), ("Date", "Mon, 07 Sep 2026 07:07:07 GMT"), ("Server", "up")]
    shared.upstream.script(answer(201, fields, b"\x00made\xff", "Fine"))
    given = await shared.one.send(key)
    assert (given.status, given.reason, given.content) == (201, b"Fine", b"\x00made\xff")
    assert [field for field in given.fields if field[0].lower() != b"content-length"] == [
        (name.encode(), value.encode()) for name, value in fields
    ]
    assert shared.count(key) == 1
    assert shared.upstream.requests[0].content == MAIL


@pytest.mark.case("C102")
async def test_202_without_content_is_sent_once_and_five_retries_get_its_message_id(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(answer(202, [("X-Message-Id", "m1")], b""))
    answers = [await shared.one.send(key) for _ in range(6)]
    assert shared.count(key) == 1
    assert {(one.status, one.content, one.first("x-message-id")) for one in answers} == {(202, b"", b"m1")}
    assert [one.replayed for one in answers] == [False] + 5 * [True]


@pytest.mark.case("C103")
@pytest.mark.parametrize("status", [200, 201, 202, 204, 207, 226, 299])
async def test_replay_has_the_status_and_content_of_the_first_answer(shared: Lab, status: int) -> None:
    key = fresh()
    shared.upstream.script(answer(status))
    first, again = await twice(shared, key)
    assert first.status == status
    stored(first, again)
    if status == 204:
        assert again.first("content-length") is None
        assert again.first("transfer-encoding") is None
    assert shared.count(key) == 1


@pytest.mark.case("C104")
async def test_twenty_replays_in_a_row_are_equal_and_nothing_is_sent(shared: Lab) -> None:
    key = fresh()
    first = await shared.one.send(key)
    for _ in range(20):
        stored(first, await shared.one.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C104")
async def test_ten_replays_at_once_get_whole_contents(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(answer(200, content=bytes(range(256)) * 1000))
    first = await shared.one.send(key)
    again = await together(shared.one.base, [request(content=MAIL, fields=FIELDS, key=key)] * 10)
    for one in again:
        stored(first, one)
    assert shared.count(key) == 1


@pytest.mark.case("C105")
async def test_send_without_a_key_is_forwarded_each_time_and_leaves_no_record(shared: Lab) -> None:
    before, counted = shared.store.keys(), await shared.one.metric("sidecar_requests_total", outcome="unprotected")
    for key in (None, None, "", " \t "):
        given = await shared.one.send(key)
        assert (given.status, given.replayed) == (200, False)
    assert shared.upstream.count == 4
    assert shared.store.keys() == before
    assert await shared.one.metric("sidecar_requests_total", outcome="unprotected") == counted + 4


@pytest.mark.case("C106")
async def test_send_without_a_key_is_refused_where_the_route_asks_for_one(shared: Lab) -> None:
    for key in (None, "", "  ", '""'):
        given = await shared.one.send(key, target="/strict/emails")
        problem(given, "key-missing", 400, sent="no", retryable=False)
        assert given.first("content-type") == b"application/problem+json"
    assert shared.upstream.count == 0


@pytest.mark.case("C105")
async def test_key_inside_the_content_is_no_key(shared: Lab) -> None:
    content = json.dumps({"headers": {"Idempotency-Key": fresh()}}).encode()
    counted = await shared.one.metric("sidecar_requests_total", outcome="unprotected")
    answers = [await shared.one.send(None, content) for _ in range(2)]
    assert [one.status for one in answers] == [200, 200]
    assert shared.upstream.count == 2
    assert await shared.one.metric("sidecar_requests_total", outcome="unprotected") == counted + 2
    problem(await shared.one.send(None, content, "/strict/emails"), "key-missing", 400, sent="no", retryable=False)
    assert shared.upstream.count == 2


@pytest.mark.case("C107")
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT", "PATCH"])
async def test_what_is_no_send_passes_each_time_key_content_and_query_intact(shared: Lab, method: str) -> None:
    key = fresh()
    content = b"" if method in ("GET", "HEAD") else b'{"a": 1}'
    async with await shared.one.client() as client:
        for _ in range(2):
            given = await client.ask(request(method, "/mail/emails?a=%41&b", FIELDS, content, key=key))
            assert (given.status, given.replayed) == (200, False)
    mails = shared.mails(key)
    assert [(one.method, one.target, one.content) for one in mails] == 2 * [
        (method.encode(), b"/emails?a=%41&b", content)
    ]
    assert shared.name(key) == ""


@pytest.mark.case("C107")
async def test_only_listed_methods_and_paths_are_protected(shared: Lab) -> None:
    for method, target, count in (
        ("PUT", "/put/things/1", 1),
        ("POST", "/put/emails", 1),
        ("POST", "/put/things/1", 2),
        ("DELETE", "/put/things/1", 2),
        ("PUT", "/put/emails", 2),
    ):
        key = fresh()
        async with await shared.one.client() as client:
            for _ in range(2):
                assert (await client.ask(request(method, target, FIELDS, MAIL, key=key))).status == 200
        assert shared.count(key) == count, (method, target)


@pytest.mark.case("C108")
async def test_batch_answer_with_failures_inside_is_final_where_the_send_says_so(shared: Lab) -> None:
    partly = answer(400, [JSON], b'[{"status":"success"},{"status":"error"}]')
    shared.upstream.default = partly
    key = fresh()
    answers = [await shared.one.send(key, target="/batch/many") for _ in range(4)]
    assert shared.count(key) == 1
    for again in answers[1:]:
        stored(answers[0], again)
    key = fresh()
    answers = [await shared.one.send(key, target="/batch/one") for _ in range(3)]
    assert [(one.status, one.replayed) for one in answers] == 3 * [(400, False)]
    assert shared.count(key) == 3


@pytest.mark.case("C109")
async def test_200_that_lists_failures_is_stored_and_replayed_as_it_is(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(answer(200, [JSON], b'[ {"ErrorCode":0},{"ErrorCode":400} ]'))
    first, again = await twice(shared, key)
    stored(first, again)
    assert again.content == b'[ {"ErrorCode":0},{"ErrorCode":400} ]'
    assert shared.count(key) == 1


@pytest.mark.case("C103")
async def test_replay_keeps_every_field_in_order_and_count(shared: Lab) -> None:
    key = fresh()
    fields = [
        ("X-Message-Id", "m1"),
        ("Location", "/x"),
        ("Set-Cookie", "a=1"),
        ("X-Ratelimit-Remaining", "9"),
        ("Set-Cookie", "b=2"),
        ("Date", "Mon, 07 Sep 2026 07:07:07 GMT"),
    ]
    shared.upstream.script(answer(202, fields, b""))
    first, again = await twice(shared, key)
    stored(first, again)
    assert again.every("set-cookie") == [b"a=1", b"b=2"]
    assert first.every("date") == [b"Mon, 07 Sep 2026 07:07:07 GMT"]
    assert len(again.every("date")) == 1
    assert again.every("date") != first.every("date")
    assert shared.count(key) == 1


@pytest.mark.case("C103")
async def test_binary_answer_is_replayed_byte_for_byte(shared: Lab) -> None:
    key = fresh()
    content = bytes(range(256))
    shared.upstream.script(answer(200, [("Content-Type", "application/octet-stream")], content))
    for given in await twice(shared, key):
        assert hashlib.sha256(given.content).digest() == hashlib.sha256(content).digest()
        assert given.every("content-length") == [b"256"]
    assert shared.count(key) == 1


@pytest.mark.case("C103")
async def test_chunked_answer_is_replayed_whole_with_one_framing(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(chunked([b'{"id":', b'"e1"', b"}"], gap_s=0.05))
    first, again = await twice(shared, key)
    stored(first, again)
    assert again.content == b'{"id":"e1"}'
    framings = [again.first("content-length"), again.first("transfer-encoding")]
    assert framings.count(None) == 1
    assert shared.count(key) == 1


@pytest.mark.case("C110")
async def test_mark_stands_on_replays_alone_and_each_request_has_one_log_line(shared: Lab) -> None:
    key = fresh()
    first = await shared.one.send(key)
    again = await shared.one.send(key)
    other = await shared.one.send(key, OTHER)
    await shared.one.send(None)
    async with await shared.one.client() as client:
        await client.ask(request("GET", "/mail/emails"))
    assert [one.replayed for one in (first, again, other)] == [False, True, False]
    lines = shared.one.log_lines(event="request")[-5:]
    assert [line["outcome"] for line in lines] == ["forwarded", "replayed", "key-reused", "unprotected", "passed"]


@pytest.mark.case("C110")
async def test_replay_field_has_the_routes_own_name(shared: Lab) -> None:
    key = fresh()
    await shared.one.send(key, target="/quiet/emails")
    again = await shared.one.send(key, target="/quiet/emails")
    assert again.first("x-again") == b"true"
    assert again.first("idempotent-replayed") is None
