"""A store that is down, silent, slow, or loses replies: nothing is sent on a guess, what is known is told later."""

from __future__ import annotations

import asyncio
import time

import pytest
from harness import (
    Client,
    NoAnswerError,
    Parsed,
    Sidecar,
    StoreProxy,
    answer,
    duration,
    echo,
    gate,
    request,
    reset_after_content,
    scaled,
    until,
)
from harness.behaviours import Behaviour
from harness.program import MAIL
from lab import (
    AWAY,
    FIELDS,
    LEASE_S,
    STORE_TIMEOUT_S,
    Lab,
    Settings,
    away,
    busy,
    elapsed,
    fail,
    fresh,
    mend,
    passed,
    stored,
    times,
    unknown,
)

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

FRONT = True


def routes(lab: Lab) -> dict[str, Settings]:
    return {"mail": lab.route(timeout=times(total_s=8))}


def ask(sidecar: Sidecar, key: str, target: str = "/mail/emails") -> asyncio.Task[Parsed]:
    return asyncio.create_task(sidecar.send(key, target=target))


@pytest.mark.case("C184")
@pytest.mark.parametrize("how", AWAY)
async def test_while_the_store_is_away_nothing_is_sent_and_afterwards_the_key_is_free(
    shared: Lab, store_front: StoreProxy, how: str
) -> None:
    """Also where the store applied a reservation whose reply came late: the repeat is forwarded, not unknown."""
    key = fresh()
    await fail(store_front, how)
    for _ in range(3):
        begin_s = time.monotonic()
        away(await shared.one.send(key))
        assert time.monotonic() - begin_s < scaled(STORE_TIMEOUT_S + 0.5)
    assert shared.upstream.begun == []
    await mend(shared, store_front)
    begin_s = time.monotonic()
    given = await shared.retry(shared.one, lambda one: one.status != 409, key)
    assert (given.status, given.replayed) == (200, False)
    assert time.monotonic() - begin_s < scaled(LEASE_S + 1.0)
    stored(given, await shared.one.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C184")
async def test_reservation_given_up_on_is_no_unknown_outcome_however_long_the_store_is_away(
    shared: Lab, store_front: StoreProxy
) -> None:
    key = fresh()
    store_front.drop_replies = True
    asked = ask(shared.one, key)
    await shared.until_state(key, "outstanding")
    store_front.black_hole = True
    away(await asked)
    begin_s = time.monotonic()
    await elapsed(begin_s, LEASE_S + 0.2)
    assert shared.state(key) == "outstanding"
    await mend(shared, store_front)
    given = await shared.retry(shared.one, lambda one: one.status != 409, key)
    assert (given.status, given.replayed) == (200, False)
    assert shared.count(key) == 1


@pytest.mark.case("C184")
@pytest.mark.parametrize("how", AWAY)
async def test_what_needs_no_store_is_served_while_it_is_away(shared: Lab, store_front: StoreProxy, how: str) -> None:
    await fail(store_front, how)
    begin_s = time.monotonic()
    assert (await shared.one.send(None)).status == 200
    async with await shared.one.client() as client:
        assert (await client.ask(request("GET", "/mail/emails", key=fresh()))).status == 200
    assert time.monotonic() - begin_s < scaled(0.5)
    away(await shared.one.send(fresh()))

    async def unready() -> bool:
        given = await shared.one.ask_admin("/readyz")
        return given.status == 503 and "store" in given.json()["reasons"][0]

    await until(unready)
    assert (await shared.one.ask_admin("/livez")).status == 200
    assert shared.upstream.count == 2


@pytest.mark.case("C184")
async def test_impatient_repeats_on_503_send_nothing_and_the_first_one_afterwards_sends_once(
    shared: Lab, store_front: StoreProxy
) -> None:
    key = fresh()
    await store_front.refuse()
    for _ in range(3):
        away(await shared.one.send(key))
    await mend(shared, store_front)
    given = await asyncio.gather(*(shared.one.send(key) for _ in range(3)))
    assert sum(one.status == 200 and not one.replayed for one in given) == 1
    assert shared.count(key) == 1


@pytest.mark.case("C185")
async def test_twenty_claims_whose_connection_is_cut_after_the_write_are_twenty_mails(
    shared: Lab, store_front: StoreProxy
) -> None:
    keys = [fresh() for _ in range(20)]
    lost = store_front.lost
    for key in keys:
        store_front.lose_reply(b"EVALSHA")
        given = await shared.retry(shared.one, lambda one: one.status == 200, key)
        assert not given.replayed
    assert store_front.lost - lost == 20
    assert [shared.count(key) for key in keys] == 20 * [1]
    assert shared.eternal() == []


@pytest.mark.case("C185")
@pytest.mark.parametrize(
    ("then", "status", "state"),
    [(answer(200), 200, "completed"), (answer(503), 503, ""), (reset_after_content(), 504, "unknown")],
    ids=["complete", "release", "lose"],
)
async def test_last_word_whose_reply_is_lost_is_recognised_when_it_is_repeated(
    shared: Lab, store_front: StoreProxy, then: Behaviour, status: int, state: str
) -> None:
    key, opened = fresh(), asyncio.Event()
    shared.upstream.script(gate(opened, then))
    asked = ask(shared.one, key)
    await shared.upstream.reached(1)
    store_front.lose_reply(b"EVALSHA")
    lost = store_front.lost
    opened.set()
    assert (await asked).status == status
    await until(lambda: store_front.lost == lost + 1)
    await shared.until_state(key, state)
    again = await shared.retry(shared.one, lambda one: one.status not in (409, 503), key)
    assert (again.status, again.replayed) == {200: (200, True), 503: (200, False), 504: (504, False)}[status]
    assert shared.count(key) == (2 if status == 503 else 1)


@pytest.mark.case("C186")
@pytest.mark.parametrize("how", AWAY)
@pytest.mark.parametrize(
    ("then", "status"),
    [(answer(201, content=b"made"), 201), (answer(503), 503), (reset_after_content(), 504)],
    ids=["success", "free", "lost"],
)
async def test_what_became_of_a_request_is_told_though_the_store_is_away_and_recorded_when_it_is_back(
    shared: Lab, store_front: StoreProxy, how: str, then: Behaviour, status: int
) -> None:
    key, opened = fresh(), asyncio.Event()
    shared.upstream.script(gate(opened, then))
    asked = ask(shared.one, key)
    await shared.upstream.reached(1)
    await fail(store_front, how)
    begin_s = time.monotonic()
    opened.set()
    first = await asked
    assert time.monotonic() - begin_s < scaled(STORE_TIMEOUT_S + 0.5)
    assert first.status == status
    # Nobody but this process knows by now; it does not forget.
    busy(await shared.one.send(key))
    await mend(shared, store_front)
    again = await shared.retry(shared.one, lambda one: one.status != 409, key)
    if status == 201:
        stored(first, again)
    elif status == 503:
        assert (again.status, again.replayed) == (200, False)
    else:
        unknown(again)
    assert shared.count(key) == (2 if status == 503 else 1)


@pytest.mark.case("C186")
@pytest.mark.parametrize("how", AWAY)
async def test_store_that_is_away_longer_than_the_lease_costs_no_second_mail(
    shared: Lab, store_front: StoreProxy, how: str
) -> None:
    key, opened = fresh(), asyncio.Event()
    other = await shared.sidecar(routes(shared))
    shared.upstream.script(gate(opened))
    asked = ask(shared.one, key)
    await shared.upstream.reached(1)
    await fail(store_front, how)
    begin_s = time.monotonic()
    await elapsed(begin_s, LEASE_S + 0.3)
    unknown(await shared.retry(other, lambda one: one.status != 409, key))
    busy(await shared.one.send(key))
    opened.set()
    first = await asked
    assert first.status == 200
    await mend(shared, store_front)
    stored(first, await shared.retry(other, lambda one: one.status == 200, key))
    assert shared.count(key) == 1
    await other.close()


@pytest.mark.case("C185")
async def test_cut_connections_are_made_again_and_nothing_is_noticed(shared: Lab, store_front: StoreProxy) -> None:
    key, opened = fresh(), asyncio.Event()
    shared.upstream.script(gate(opened))
    asked = ask(shared.one, key)
    await shared.upstream.reached(1)
    for _ in range(3):
        store_front.cut()
        await until(lambda: not store_front._open)
        await until(lambda: len(store_front._open) >= 2)
    opened.set()
    first = await asked
    stored(first, await shared.retry(shared.one, lambda one: one.status == 200, key))
    assert shared.count(key) == 1


@pytest.mark.case("C187")
async def test_replies_never_reach_another_request_though_clients_leave(shared: Lab, store_front: StoreProxy) -> None:
    store_front.delay_s = 0.01
    shared.upstream.default = echo()
    keys = [fresh() for _ in range(200)]

    async def send(key: str) -> Parsed:
        return await shared.one.send(key, key.encode())

    async def leave(key: str, after_s: float) -> None:
        client = await Client.open(shared.one.base)
        begin_s = time.monotonic()
        await client.send(request(content=key.encode(), fields=FIELDS, key=key))
        await elapsed(begin_s, after_s)
        client.abort()

    await asyncio.gather(
        *(send(key) if number % 2 else leave(key, number % 20 / 1000) for number, key in enumerate(keys)),
        return_exceptions=True,
    )
    # One that left before the content had arrived whole was not sent; all others are settled now.
    await asyncio.gather(
        *(shared.retry(shared.one, lambda one: one.status == 200, key, content=key.encode()) for key in keys)
    )
    for _ in range(4):
        given = await asyncio.gather(*(send(key) for key in keys))
        assert [one.content for one in given] == [key.encode() for key in keys]
        assert all(one.replayed for one in given)
    assert [shared.count(key) for key in keys] == 200 * [1]


@pytest.mark.case("C187")
async def test_three_hundred_keys_at_once_over_a_slow_store_are_all_sent(shared: Lab, store_front: StoreProxy) -> None:
    # The time-out of the defaults: what is tried is that nobody waits for a free connection.
    only = {"mail": shared.route(lease=duration(3), timeout=times(total_s=8))}
    usual = await shared.sidecar(only, front=store_front, store={"timeout": duration(1)})
    before = len(store_front._open)
    store_front.delay_s = 0.05
    keys = [fresh() for _ in range(300)]
    given = await asyncio.gather(*(usual.send(key, deadline_s=20) for key in keys))
    assert [one.status for one in given] == 300 * [200]
    assert [shared.count(key) for key in keys] == 300 * [1]
    assert len(store_front._open) <= before + 2
    await usual.close()


@pytest.mark.case("C187")
async def test_client_that_leaves_while_the_store_is_asked_costs_no_second_mail(
    shared: Lab, store_front: StoreProxy
) -> None:
    store_front.delay_s = 0.1
    keys = [fresh() for _ in range(20)]
    for key in keys:
        client = await Client.open(shared.one.base)
        at = len(store_front.commands)
        await client.send(request(content=MAIL, fields=FIELDS, key=key))
        await passed(store_front, at)
        client.abort()
    store_front.delay_s = 0.0
    for key in keys:
        try:
            given = await shared.retry(shared.one, lambda one: one.status == 200, key)
        except NoAnswerError as exc:
            raise AssertionError(key) from exc
        assert given.status == 200
    assert [shared.count(key) for key in keys] == 20 * [1]
