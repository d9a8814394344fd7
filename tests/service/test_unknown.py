"""An unknown outcome: held or sent again, when, with which key, and what a later attempt may and may not change."""

from __future__ import annotations

import asyncio
import time

import pytest
from harness import Upstream, answer, cut_content, duration, gate, request, reset_after_content, scaled, stall, together
from harness.behaviours import Received
from harness.program import MAIL
from lab import (
    AUTHORIZATION,
    FIELDS,
    JSON,
    LEASE_S,
    Lab,
    Settings,
    busy,
    elapsed,
    fresh,
    problem,
    stored,
    times,
    unknown,
)

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK_S = 0.4
AFTER_S = 0.6
WINDOW_S = 1.0
NATIVE = {"field": "Idempotency-Key", "window": "24h"}
GUARDED = {**NATIVE, "twins": "guarded"}
LOST = reset_after_content()


def routes(lab: Lab) -> dict[str, Settings]:
    quick = {"timeout": times(connect_s=QUICK_S, total_s=QUICK_S)}
    # An attempt may only begin while a whole one, and a lease, still fit into the provider's window.
    window = duration(WINDOW_S + QUICK_S + LEASE_S)
    retry = {"retry": {"attempts": 3, "backoff": duration(0.02)}}
    return {
        "mail": lab.route(**quick),
        "resend": lab.route("resend", **quick),
        "sendhq": lab.route("sendhq", **quick),
        "held": lab.route(**quick, native=GUARDED, unknown="hold"),
        "window": lab.route(**quick, native={**GUARDED, "window": window}),
        "after": lab.route(**quick, native=NATIVE, unknown="resend", resend_after=duration(AFTER_S)),
        "twice": lab.route(**quick, unknown="resend"),
        "open": lab.route(**quick, native=GUARDED, scope=["route"]),
        "named": lab.route(**quick, native={**GUARDED, "field": "X-Provider-Key", "max_length": 64}),
        "again": lab.route(**quick, **retry, native=GUARDED),
        "again-held": lab.route(**quick, **retry, native=GUARDED, unknown="hold"),
        "again-plain": lab.route(**quick, **retry),
        "again-unguarded": lab.route(**quick, **retry, native=NATIVE),
    }


def keys_of(mails: list[Received]) -> list[bytes | None]:
    return [one.first("idempotency-key") for one in mails]


async def lose(lab: Lab, key: str, target: str) -> None:
    """A first attempt whose answer is lost."""
    lab.upstream.script(LOST)
    unknown(await lab.one.send(key, target=target))


@pytest.mark.case("C145")
@pytest.mark.parametrize("target", ["/mail/emails", "/held/emails"])
async def test_held_key_is_never_sent_again(shared: Lab, target: str) -> None:
    key = fresh()
    await lose(shared, key, target)
    for _ in range(10):
        unknown(await shared.one.send(key, target=target))
    for given in await together(shared.one.base, [request(target=target, content=MAIL, fields=FIELDS, key=key)] * 10):
        unknown(given)
    assert shared.count(key) == 1


@pytest.mark.case("C146")
@pytest.mark.parametrize("target", ["/resend/emails", "/sendhq/v1/send"])
async def test_second_attempt_is_sent_and_its_success_is_stored(shared: Lab, target: str) -> None:
    key = fresh()
    counted = await shared.one.metric("sidecar_resends_total", native="yes")
    await lose(shared, key, target)
    second = await shared.one.send(key, target=target)
    assert (second.status, second.replayed) == (200, False)
    stored(second, await shared.one.send(key, target=target))
    assert keys_of(shared.upstream.requests) == 2 * [key.encode()]
    assert await shared.one.metric("sidecar_resends_total", native="yes") == counted + 1
    assert shared.one.log_lines(event="request", outcome="forwarded")[-1]["attempt"] == 2


@pytest.mark.case("C147")
async def test_second_attempt_carries_the_first_ones_key_byte_for_byte(shared: Lab) -> None:
    for first_text, again_text in (('"{}"', "{}"), ("{}", '"{}"'), ('"{}\\"x"', '"{}\\"x"')):
        shared.reset()
        key = fresh()
        await lose(shared, first_text.format(key), "/resend/emails")
        assert (await shared.one.send(again_text.format(key), target="/resend/emails")).status == 200
        assert keys_of(shared.upstream.requests) == 2 * [first_text.format(key).encode()]


@pytest.mark.case("C148")
async def test_other_credential_than_the_first_attempts_is_held(shared: Lab) -> None:
    key = fresh()
    await lose(shared, key, "/open/emails")
    unknown(await shared.one.send(key, target="/open/emails", fields=[("Authorization", "Bearer two"), JSON]))
    assert shared.count(key) == 1
    assert (await shared.one.send(key, target="/open/emails", fields=[AUTHORIZATION, JSON])).status == 200
    assert shared.count(key) == 2


@pytest.mark.case("C149")
async def test_after_the_window_of_the_provider_nothing_is_sent_again(shared: Lab) -> None:
    within, beyond = fresh(), fresh()
    begin_s = time.monotonic()
    await lose(shared, within, "/window/emails")
    await lose(shared, beyond, "/window/emails")
    assert (await shared.one.send(within, target="/window/emails")).status == 200
    await elapsed(begin_s, WINDOW_S + 0.2)
    unknown(await shared.one.send(beyond, target="/window/emails"))
    assert (await shared.one.send(within, target="/window/emails")).replayed
    assert (shared.count(within), shared.count(beyond)) == (2, 1)


@pytest.mark.case("C149")
async def test_window_counts_from_the_first_attempt_not_from_the_last(shared: Lab) -> None:
    key = fresh()
    begin_s = time.monotonic()
    await lose(shared, key, "/window/emails")
    for share in (0.3, 0.6, 0.8):
        await elapsed(begin_s, share * WINDOW_S)
        await lose(shared, key, "/window/emails")
    sent = shared.count(key)
    assert sent == 4
    await elapsed(begin_s, WINDOW_S + 0.2)
    unknown(await shared.one.send(key, target="/window/emails"))
    assert shared.count(key) == sent


@pytest.mark.case("C150")
async def test_resend_after_is_told_as_outstanding_until_it_is_over(shared: Lab) -> None:
    key = fresh()
    await lose(shared, key, "/after/emails")
    begin_s = time.monotonic()
    busy(await shared.one.send(key, target="/after/emails"))
    assert shared.count(key) == 1
    given = await shared.retry(shared.one, lambda one: one.status == 200, key, target="/after/emails")
    assert not given.replayed
    assert time.monotonic() - begin_s > scaled(AFTER_S - 0.1)
    assert shared.count(key) == 2
    # It counts from the end of the last attempt, not of the first.
    key = fresh()
    for _ in range(2):
        shared.upstream.script(LOST)
        await shared.retry(shared.one, lambda one: one.status == 504, key, target="/after/emails")
        busy(await shared.one.send(key, target="/after/emails"))


@pytest.mark.case("C151")
async def test_without_a_provider_key_resend_is_at_least_once_and_counted_apart(shared: Lab) -> None:
    key = fresh()
    counted = await shared.one.metric("sidecar_resends_total", native="no")
    await lose(shared, key, "/twice/emails")
    assert (await shared.one.send(key, target="/twice/emails")).status == 200
    assert (await shared.one.send(key, target="/twice/emails")).replayed
    assert shared.count(key) == 2
    assert await shared.one.metric("sidecar_resends_total", native="no") == counted + 1


@pytest.mark.case("C152")
async def test_refusal_of_a_later_attempt_proves_nothing_and_is_not_stored(shared: Lab) -> None:
    key, target = fresh(), "/sendhq/v1/send"
    await lose(shared, key, target)
    shared.upstream.script(answer(422, [JSON], b'{"message":"refused"}'))
    refused = await shared.one.send(key, target=target)
    assert (refused.status, refused.content) == (422, b'{"message":"refused"}')
    assert shared.state(key) == "unknown"
    third = await shared.one.send(key, target=target)
    assert (third.status, third.replayed, shared.count(key)) == (200, False, 3)
    stored(third, await shared.one.send(key, target=target))


@pytest.mark.case("C152")
@pytest.mark.parametrize("status", [401, 409, 429, 404])
async def test_free_answer_of_a_later_attempt_does_not_free_the_key(shared: Lab, status: int) -> None:
    key, target = fresh(), "/resend/emails"
    await lose(shared, key, target)
    shared.upstream.script(answer(status, [JSON, ("Retry-After", "1")], b'{"message":"no"}'))
    given = await shared.one.send(key, target=target)
    assert (given.status, given.first("retry-after")) == (status, b"1")
    assert shared.state(key) == "unknown"
    other = await shared.one.send(key, MAIL.replace(b"hello", b"x"), target)
    problem(other, "key-reused", 409, sent="unknown", retryable=False)
    assert shared.count(key) == 2


@pytest.mark.case("C153")
async def test_later_attempt_that_was_not_sent_is_told_as_unknown(shared: Lab) -> None:
    key, target = fresh(), "/resend/emails"
    await lose(shared, key, target)
    await shared.upstream.refuse()
    unknown(await shared.one.send(key, target=target))
    await shared.upstream.accept()
    assert shared.state(key) == "unknown"
    assert (await shared.one.send(key, target=target)).status == 200
    assert shared.count(key) == 2


@pytest.mark.case("C146")
async def test_attempts_may_be_lost_again_and_again_and_a_success_ends_it(shared: Lab) -> None:
    key, target = fresh(), "/resend/emails"
    shared.upstream.script(LOST, answer(503), cut_content(), answer(200), answer(200))
    statuses = [(await shared.one.send(key, target=target)).status for _ in range(5)]
    assert statuses == [504, 503, 504, 200, 200]
    assert keys_of(shared.upstream.requests) == 4 * [key.encode()]


@pytest.mark.case("C154")
async def test_twins_after_an_unknown_outcome_send_once(shared: Lab) -> None:
    key, target = fresh(), "/resend/emails"
    await lose(shared, key, target)
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    mail = request(target=target, content=MAIL, fields=FIELDS, key=key)
    asked = asyncio.create_task(together(shared.one.base, [mail] * 10))
    await shared.upstream.reached(2)
    opened.set()
    given = await asked
    assert sum(one.status == 200 for one in given) >= 1
    for one in given:
        if one.status != 200:
            problem(one, "request-outstanding", 409, sent="unknown")
            assert one.json()["name"] == "concurrent_idempotent_requests"
    assert shared.count(key) == 2


# `retry`: the sidecar's own attempts inside one reservation.


@pytest.mark.case("C155")
@pytest.mark.parametrize(
    "first", [LOST, answer(503), answer(500), stall(), cut_content()], ids=["reset", "503", "500", "silent", "cut"]
)
async def test_own_attempts_repeat_a_loss_with_the_same_key_where_twins_are_guarded(
    shared: Lab, first: object, request: pytest.FixtureRequest
) -> None:
    key = fresh()
    shared.upstream.script(first, answer(201))  # type: ignore[arg-type]  # parameters have no type
    given = await shared.one.send(key, target="/again/emails")
    assert (given.status, given.replayed) == (201, False)
    stored(given, await shared.one.send(key, target="/again/emails"))
    assert keys_of(shared.upstream.requests) == 2 * [key.encode()]


@pytest.mark.case("C155")
@pytest.mark.parametrize("route", ["again-plain", "again-unguarded"])
@pytest.mark.parametrize(
    ("first", "status"),
    [(LOST, 504), (answer(503), 503), (answer(500), 500), (answer(504), 504)],
    ids=["reset", "503", "500", "504"],
)
async def test_own_attempts_never_repeat_what_could_be_a_second_mail(
    shared: Lab, route: str, first: object, status: int
) -> None:
    key = fresh()
    shared.upstream.script(first)  # type: ignore[arg-type]  # parameters have no type
    assert (await shared.one.send(key, target=f"/{route}/emails")).status == status
    assert shared.count(key) == 1


@pytest.mark.case("C155")
@pytest.mark.parametrize("status", [200, 400, 401, 409, 422, 429])
async def test_own_attempts_repeat_no_answer_below_500(shared: Lab, status: int) -> None:
    key = fresh()
    shared.upstream.script(answer(status))
    assert (await shared.one.send(key, target="/again/emails")).status == status
    assert shared.count(key) == 1


@pytest.mark.case("C156")
@pytest.mark.parametrize("route", ["again", "again-plain"])
async def test_own_attempts_repeat_a_refused_connection_anywhere(running: Lab, shared: Lab, route: str) -> None:
    late = await Upstream.start()
    await late.refuse()
    patient = shared.route(
        upstream=late.url, retry={"attempts": 8, "backoff": duration(0.02)}, ttl="1d", **_native(route)
    )
    sidecar = await running.sidecar({"mail": patient}, store={"prefix": route})
    try:
        begin_s = time.monotonic()
        asked = asyncio.create_task(sidecar.send(fresh()))
        await elapsed(begin_s, 0.1)
        await late.accept()
        assert (await asked).status == 200
        assert late.count == 1
    finally:
        await late.stop()


def _native(route: str) -> Settings:
    return {"native": GUARDED} if route == "again" else {}


@pytest.mark.case("C157")
async def test_own_attempts_end_with_the_last_answer_and_stay_one_reservation(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(LOST, answer(502), gate(opened, answer(500, content=b"third")), answer(200))
    asked = asyncio.create_task(shared.one.send(key, target="/again/emails"))
    await shared.upstream.reached(3)
    busy(await shared.one.send(key, target="/again/emails"))
    opened.set()
    given = await asked
    assert (given.status, given.content, shared.count(key)) == (500, b"third", 3)
    assert shared.state(key) == "unknown"


@pytest.mark.case("C157")
async def test_own_attempt_refused_after_a_loss_leaves_it_unknown(shared: Lab) -> None:
    for first, second in ((LOST, answer(422)), (answer(504), answer(409)), (LOST, answer(429))):
        shared.reset()
        key = fresh()
        shared.upstream.script(first, second)
        given = await shared.one.send(key, target="/again-held/emails")
        assert given.status in (422, 409, 429)
        assert shared.state(key) == "unknown"
        unknown(await shared.one.send(key, target="/again-held/emails"))
        assert shared.count(key) == 2


# The provider's own key.


@pytest.mark.case("C147")
async def test_key_goes_on_under_the_providers_name_and_limit_and_stays_the_same(shared: Lab) -> None:
    for key in (fresh(), fresh().ljust(200, "x")):
        shared.reset()
        await lose(shared, key, "/named/emails")
        assert (await shared.one.send(f'"{key}"', target="/named/emails")).status == 200
        names = {one.first("x-provider-key") for one in shared.upstream.requests}
        assert len(names) == 1
        name = names.pop()
        assert name is not None
        assert len(name) <= 64
        assert len(key) > 64 or name == key.encode()
        assert keys_of(shared.upstream.requests) == [key.encode(), f'"{key}"'.encode()]


@pytest.mark.case("C149")
async def test_retry_after_the_providers_window_is_answered_by_us(shared: Lab) -> None:
    key = fresh()
    begin_s = time.monotonic()
    first = await shared.one.send(key, target="/window/emails")
    await elapsed(begin_s, WINDOW_S + QUICK_S + LEASE_S + 0.2)
    stored(first, await shared.one.send(key, target="/window/emails"))
    assert shared.count(key) == 1
