"""What a complete answer of the upstream means: one test per status and kind of route, and what the next retry gets."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import pytest
from harness import Client, Parsed, answer, early, interim, raw_answer, request
from harness.program import MAIL
from lab import FIELDS, JSON, Lab, Settings, fresh, problem, stored, unknown

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

STORED_BYTES = 64 * 1024
TOP = {"limits": {"stored_response": "64KiB"}}
NATIVE = {"field": "Idempotency-Key", "window": "24h"}


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(),
        "guarded": lab.route(native={**NATIVE, "twins": "guarded"}),
        "unguarded": lab.route(native=NATIVE),
        "resend": lab.route("resend"),
        "sendhq": lab.route("sendhq"),
        "rovela": lab.route("rovela"),
        "distrust": lab.route(lost=[500, 502, 503, 504], final=["2xx", 404]),
        "success": lab.route(final=["2xx"], lost=[504]),
    }


def target(route: str) -> str:
    return f"/{route}/v1/send" if route == "sendhq" else f"/{route}/emails"


class Next(StrEnum):
    """What the next retry gets."""

    REPLAY = "replay"
    HELD = "held"
    FORWARDED = "forwarded"
    RESENT = "resent"


SUCCESS = {200, 201, 202, 204, 206, 207}
REFUSED = {400, 422}
OTHERS = {301, 302, 303, 307, 308, 401, 402, 403, 404, 405, 408, 409, 410, 413, 415, 425, 429, 451}
SERVER = {500, 501, 503, 505, 507, 521, 523, 525, 526, 530, 599}
# Gateway words about a request that left.
GATEWAY = {502, 504, 520, 522, 524, 527}
ALL = sorted(SUCCESS | REFUSED | OTHERS | SERVER | GATEWAY)
# route -> what is final beside 2xx, what is lost, and whether an unknown outcome is sent again.
TABLE: dict[str, tuple[set[int], set[int], bool]] = {
    "mail": (REFUSED, GATEWAY, False),
    "unguarded": (REFUSED, GATEWAY, False),
    "guarded": (REFUSED, GATEWAY | SERVER, True),
    "resend": (set(), GATEWAY | SERVER, True),
    "sendhq": (REFUSED, GATEWAY | SERVER, True),
    "rovela": (set(), GATEWAY, False),
    "distrust": ({404}, {500, 502, 503, 504}, False),
    "success": (set(), {504}, False),
}


def expected(route: str, status: int) -> Next:
    final, lost, resend = TABLE[route]
    if status in SUCCESS | final:
        return Next.REPLAY
    if status in lost:
        return Next.RESENT if resend else Next.HELD
    return Next.FORWARDED


def unchanged(status: int, given: Parsed) -> None:
    """The upstream's own answer, with nothing of ours."""
    content = b"" if status == 204 else b'{"message": "as it is"}'
    assert (given.status, given.reason, given.content) == (status, b"Its Own Words", content), given
    fields = [field for field in given.fields if field[0].lower() != b"content-length"]
    assert fields == [(b"Retry-After", b"2"), (b"Content-Type", b"application/json")], given


@pytest.mark.case("C126")
@pytest.mark.parametrize("status", ALL)
@pytest.mark.parametrize("route", TABLE)
async def test_complete_answer_is_given_unchanged_and_its_status_decides_about_the_retry(
    shared: Lab, route: str, status: int
) -> None:
    key = fresh()
    fields = [("Retry-After", "2"), JSON]
    shared.upstream.script(answer(status, fields, b'{"message": "as it is"}', "Its Own Words"))
    first = await shared.one.send(key, target=target(route))
    unchanged(status, first)
    assert shared.count(key) == 1
    again = await shared.one.send(key, target=target(route))
    match expected(route, status):
        case Next.REPLAY:
            stored(first, again)
            assert shared.count(key) == 1
        case Next.HELD:
            members = unknown(again)
            assert str(status) in members["detail"]
            assert shared.count(key) == 1
        case Next.FORWARDED | Next.RESENT:
            assert (again.status, again.replayed) == (200, False)
            assert shared.count(key) == 2
            assert (await shared.one.send(key, target=target(route))).replayed
            assert shared.count(key) == 2


@pytest.mark.case("C127")
async def test_passing_failures_free_the_key_until_a_success_is_stored(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(answer(500), answer(503), answer(429, [("Retry-After", "2")]), answer(200))
    answers = [await shared.one.send(key) for _ in range(5)]
    assert [one.status for one in answers] == [500, 503, 429, 200, 200]
    assert [one.replayed for one in answers] == [False] * 4 + [True]
    assert answers[2].first("retry-after") == b"2"
    assert shared.count(key) == 4


@pytest.mark.case("C127")
@pytest.mark.parametrize("status", [401, 403, 409])
async def test_refused_account_is_not_stored_so_the_mended_one_sends_under_its_key(shared: Lab, status: int) -> None:
    key = fresh()
    shared.upstream.script(answer(status, [JSON], b'{"message":"domain not verified"}'), answer(202))
    answers = [await shared.one.send(key) for _ in range(3)]
    assert [(one.status, one.replayed) for one in answers] == [(status, False), (202, False), (202, True)]
    assert shared.count(key) == 2


@pytest.mark.case("C128")
async def test_one_request_of_a_client_is_one_request_upstream_whatever_the_answer(shared: Lab) -> None:
    for status in (503, 500, 429, 408, 307):
        key = fresh()
        shared.upstream.script(answer(status, [("Location", "/x"), ("Retry-After", "0")]), answer(200))
        assert (await shared.one.send(key)).status == status
        assert shared.count(key) == 1
        shared.reset()


@pytest.mark.case("C129")
async def test_redirect_is_not_followed_nor_taken_for_success(shared: Lab) -> None:
    elsewhere = f"{shared.upstream.url}/elsewhere"
    for status in (301, 302, 303, 307, 308):
        shared.reset()
        key = fresh()
        shared.upstream.script(answer(status, [("Location", elsewhere)]))
        given = await shared.one.send(key)
        assert (given.status, given.first("location")) == (status, elsewhere.encode())
        assert [one.target for one in shared.upstream.requests] == [b"/emails"]
        assert shared.state(key) == ""


@pytest.mark.case("C130")
async def test_corrected_content_under_a_refused_key(shared: Lab) -> None:
    """Where the refusal is final the key is used up; where it is free the mended mail goes out under it."""
    for route, count in (("sendhq", 1), ("resend", 2), ("rovela", 2)):
        key = fresh()
        shared.upstream.script(answer(422))
        assert (await shared.one.send(key, target=target(route))).status == 422
        mended = await shared.one.send(key, MAIL.replace(b"hello", b"mended"), target(route))
        assert mended.status == (409 if route == "sendhq" else 200)
        assert shared.count(key) == count
        shared.reset()


@pytest.mark.case("C131")
async def test_only_the_final_answer_after_interim_ones_is_given_and_stored(shared: Lab) -> None:
    for status in (100, 102, 103):
        key = fresh()
        shared.upstream.script(interim(status, [("Link", "</a>")], then=interim(status, then=answer(201))))
        first = await shared.one.send(key)
        assert (first.status, first.interim) == (201, ())
        again = await shared.one.send(key)
        stored(first, again)
        assert again.interim == ()
        assert shared.count(key) == 1


@pytest.mark.case("C131")
async def test_answer_that_ends_with_an_orderly_end_is_complete(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(raw_answer(b"HTTP/1.1 200 OK\r\nX-Id: 1\r\n\r\nall of it"))
    first = await shared.one.send(key)
    assert (first.status, first.content) == (200, b"all of it")
    stored(first, await shared.one.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C132")
@pytest.mark.parametrize(("status", "next_one"), [(413, 200), (401, 200), (400, 400), (202, 202), (504, 504)])
async def test_answer_before_the_request_was_wholly_written_counts_as_an_answer(
    shared: Lab, status: int, next_one: int
) -> None:
    key = fresh()
    large = b"x" * 8_000_000
    shared.upstream.script(early(status, content=b"early"))
    first = await shared.one.send(key, large)
    assert (first.status, first.content) == (status, b"early")
    again = await shared.one.send(key, large)
    assert again.status == next_one
    assert shared.count(key) == (1 if next_one == 200 else 0)
    if next_one == 504:
        unknown(again)


@pytest.mark.case("C133")
@pytest.mark.parametrize(("status", "sent"), [(200, "unknown"), (422, "no")])
async def test_answer_too_large_to_keep_is_given_whole_and_the_key_stays_used(
    shared: Lab, status: int, sent: str
) -> None:
    key = fresh()
    content = bytes(range(256)) * (STORED_BYTES // 256) + b"!"
    shared.upstream.script(answer(status, content=content))
    first = await shared.one.send(key)
    assert first.status == status
    assert hashlib.sha256(first.content).digest() == hashlib.sha256(content).digest()
    for _ in range(2):
        again = await shared.one.send(key)
        problem(again, "response-not-kept", status, sent=sent, retryable=False)
    assert shared.count(key) == 1
    key = fresh()
    shared.upstream.script(answer(status, content=content[1:]))
    first = await shared.one.send(key)
    stored(first, await shared.one.send(key))


@pytest.mark.case("C134")
async def test_provider_409s_reach_the_client_with_their_content_and_are_not_stored(shared: Lab) -> None:
    for name in (b"concurrent_idempotent_requests", b"invalid_idempotent_request"):
        key = fresh()
        shared.upstream.script(answer(409, [JSON], b'{"statusCode":409,"name":"%b"}' % name))
        given = await shared.one.send(key, target="/resend/emails")
        assert (given.status, given.json()["name"]) == (409, name.decode())
        assert shared.state(key) == ""
        assert (await shared.one.send(key, target="/resend/emails")).status == 200
        assert shared.count(key) == 2
        shared.reset()


@pytest.mark.case("C135")
async def test_classes_are_counted_once_each(shared: Lab) -> None:
    async def counted() -> list[float]:
        return [
            await shared.one.metric("sidecar_answers_total", **{"route": "mail", "class": name})
            for name in ("final", "free", "lost")
        ]

    before = await counted()
    shared.upstream.script(answer(200), answer(400), answer(429), answer(504))
    for _ in range(4):
        await shared.one.send(fresh())
    assert [now - then for now, then in zip(await counted(), before, strict=True)] == [2, 1, 1]


@pytest.mark.case("C136")
async def test_pipelined_client_gets_each_answer_once(shared: Lab) -> None:
    key = fresh()
    async with await Client.open(shared.one.base) as client:
        await client.send(request(content=MAIL, fields=FIELDS, key=key) * 3)
        answers = [await client.answer() for _ in range(3)]
    assert [one.replayed for one in answers] == [False, True, True]
    assert {one.content for one in answers} == {answers[0].content}
    assert shared.count(key) == 1
