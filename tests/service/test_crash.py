"""SIGKILL at each step of the walk: never a second mail, and nothing is stuck beyond the lease except as unknown."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
from harness import Parsed, RedisServer, Sidecar, StoreProxy, answer, duration, embedded, gate, scaled, slow, until
from lab import Lab, Settings, busy, elapsed, fresh, passed, times, unknown

pytest_plugins = ("lab_fixtures",)

TIMEOUT_S = 0.3
LEASE_S = 1.0
STORE = {"timeout": duration(TIMEOUT_S)}


def routes(lab: Lab) -> dict[str, Settings]:
    quick = {"lease": duration(LEASE_S), "timeout": times(total_s=3, connect_s=3)}
    return {
        "mail": lab.route(**quick),
        "resend": lab.route("resend", **quick),
        "wait": lab.route(**quick, concurrent="wait"),
    }


async def pair(lab: Lab) -> StoreProxy:
    """A sidecar behind a front, which is killed, and one with the same routes that lives on."""
    front = await lab.front()
    await asyncio.gather(
        lab.sidecar(routes(lab), front=front, store=STORE),
        lab.sidecar(routes(lab), store=STORE),
    )
    return front


async def held(lab: Lab, key: str, killed_at_s: float, target: str = "/mail/emails") -> None:
    """Within the lease 409 with a short Retry-After, after it 504, from whichever sidecar is asked."""
    given = await lab.two.send(key, target=target)
    if given.status == 409:
        assert busy(given) <= max(1, LEASE_S) + 1
        given = await lab.retry(lab.two, lambda one: one.status != 409, key, target=target)
        assert time.monotonic() - killed_at_s > scaled(0.3 * LEASE_S)
    assert time.monotonic() - killed_at_s < scaled(LEASE_S + 1.0)
    unknown(given)
    unknown(await lab.two.send(key, target=target))


async def killed(lab: Lab, asked: asyncio.Task[Parsed]) -> float:
    """SIGKILL the first sidecar; when."""
    await lab.one.kill()
    at_s = time.monotonic()
    await asyncio.gather(asked, return_exceptions=True)
    assert asked.exception() is not None, "the client was answered before the kill"
    return at_s


async def settled(lab: Lab, sidecar: Sidecar, key: str) -> Parsed:
    """The first answer of the route `resend` that is not 409."""
    return await lab.retry(sidecar, lambda one: one.status != 409, key, target="/resend/emails")


def ask(sidecar: Sidecar, key: str, target: str = "/mail/emails") -> asyncio.Task[Parsed]:
    return asyncio.create_task(sidecar.send(key, target=target))


@pytest.mark.case("C170")
async def test_killed_before_the_reservation_reached_the_store_frees_the_key_at_once(lab: Lab) -> None:
    front = await pair(lab)
    front.black_hole = True
    key = fresh()
    at = len(front.commands)
    asked = ask(lab.one, key)
    await passed(front, at)
    await killed(lab, asked)
    assert (await lab.two.send(key)).status == 200
    assert lab.count(key) == 1


@pytest.mark.case("C171")
@pytest.mark.parametrize("target", ["/mail/emails", "/resend/emails"])
async def test_killed_with_the_reservation_made_and_its_reply_unread(lab: Lab, target: str) -> None:
    front = await pair(lab)
    front.drop_replies = True
    key = fresh()
    asked = ask(lab.one, key, target)
    await lab.until_state(key, "outstanding")
    at_s = await killed(lab, asked)
    if target == "/mail/emails":
        await held(lab, key, at_s)
        assert lab.count(key) == 0
    else:
        busy(await lab.two.send(key, target=target))
        assert (await lab.retry(lab.two, lambda one: one.status != 409, key, target=target)).status == 200
        assert lab.count(key) == 1


@pytest.mark.case("C171")
async def test_killed_while_it_connects_after_the_reservation(lab: Lab) -> None:
    """The upstream takes the connection and says nothing, as under TLS: not a byte of the request is written."""
    mute = await StoreProxy.start(cast(RedisServer, lab.upstream))
    lab.fronts.append(mute)
    mute.freeze()
    only = routes(lab)
    only["mail"]["upstream"] = f"https://127.0.0.1:{mute.port}"
    await lab.sidecar(only, store=STORE)
    await lab.sidecar(routes(lab), store=STORE)
    key = fresh()
    asked = ask(lab.one, key)
    await lab.until_state(key, "outstanding")
    await until(lambda: mute.connections == 1)
    await held(lab, key, await killed(lab, asked))
    assert lab.upstream.begun == []


@pytest.mark.case("C172")
async def test_killed_after_the_request_was_sent_is_held(lab: Lab) -> None:
    await pair(lab)
    opened = asyncio.Event()
    lab.upstream.script(gate(opened))
    key = fresh()
    asked = ask(lab.one, key)
    await lab.upstream.reached(1)
    at_s = await killed(lab, asked)
    busy(await lab.two.send(key))
    await held(lab, key, at_s)
    opened.set()
    # Nothing changes later: the sidecar that comes back knows no more than the record.
    await lab.one.run()
    unknown(await lab.one.send(key))
    assert lab.count(key) == 1


@pytest.mark.case("C172")
async def test_killed_after_the_request_was_sent_is_sent_again_with_its_key_where_the_provider_guards_it(
    lab: Lab,
) -> None:
    await pair(lab)
    lab.upstream.script(gate(asyncio.Event()))
    key = fresh()
    asked = ask(lab.one, f'"{key}"', "/resend/emails")
    await lab.upstream.reached(1)
    await killed(lab, asked)
    busy(await lab.two.send(key, target="/resend/emails"))
    assert lab.upstream.count == 1
    given = await lab.retry(lab.two, lambda one: one.status != 409, key, target="/resend/emails")
    assert (given.status, given.replayed) == (200, False)
    assert (await lab.two.send(key, target="/resend/emails")).replayed
    assert [one.first("idempotency-key") for one in lab.upstream.requests] == 2 * [f'"{key}"'.encode()]


@pytest.mark.case("C173")
async def test_killed_with_the_answer_in_hand_and_not_recorded_is_held(lab: Lab) -> None:
    front = await pair(lab)
    opened = asyncio.Event()
    lab.upstream.script(gate(opened))
    key = fresh()
    asked = ask(lab.one, key)
    await lab.upstream.reached(1)
    front.black_hole = True
    at = len(front.commands)
    opened.set()
    await passed(front, at, b"upstream-1")
    await held(lab, key, await killed(lab, asked))
    assert lab.count(key) == 1


@pytest.mark.case("C174")
async def test_killed_with_the_answer_recorded_and_not_delivered_is_replayed_at_once(lab: Lab) -> None:
    front = await pair(lab)
    opened = asyncio.Event()
    lab.upstream.script(gate(opened, answer(201, [("X-Id", "1")], b"made")))
    key = fresh()
    asked = ask(lab.one, key)
    await lab.upstream.reached(1)
    front.drop_replies = True
    opened.set()
    await lab.until_state(key, "completed")
    await killed(lab, asked)
    given = await lab.two.send(key)
    assert (given.status, given.replayed, given.content, given.first("x-id")) == (201, True, b"made", b"1")
    assert lab.count(key) == 1


@pytest.mark.case("C174")
async def test_killed_with_the_key_freed_and_the_refusal_not_delivered(lab: Lab) -> None:
    front = await pair(lab)
    opened = asyncio.Event()
    lab.upstream.script(gate(opened, answer(503)))
    key = fresh()
    asked = ask(lab.one, key)
    await lab.upstream.reached(1)
    front.drop_replies = True
    opened.set()
    await lab.until_state(key, "")
    await killed(lab, asked)
    assert (await lab.two.send(key)).status == 200
    assert lab.count(key) == 2


@pytest.mark.case("C175")
async def test_waiters_of_a_killed_owner_elsewhere_are_told_after_the_lease(lab: Lab) -> None:
    await pair(lab)
    lab.upstream.script(gate(asyncio.Event()))
    key = fresh()
    asked = ask(lab.one, key, "/wait/emails")
    await lab.upstream.reached(1)
    waiters = [ask(lab.two, key, "/wait/emails") for _ in range(5)]

    async def waiting() -> bool:
        return await lab.two.metric("sidecar_waiting") == 5

    await until(waiting)
    at_s = await killed(lab, asked)
    for waiter in waiters:
        unknown(await waiter)
    assert time.monotonic() - at_s < scaled(LEASE_S + 2.0)
    assert lab.count(key) == 1


@pytest.mark.case("C176")
async def test_killed_at_any_moment_no_key_is_sent_twice_and_every_key_is_settled(lab: Lab) -> None:
    """Six kills, a little later each time, under a load of new keys."""
    await pair(lab)
    lab.upstream.default = slow(0.01)
    keys: list[str] = []
    answered: dict[str, Parsed] = {}

    async def one_mail(key: str) -> None:
        keys.append(key)
        answered[key] = await lab.one.send(key)

    for number in range(6):
        begin_s = time.monotonic()
        asked = [asyncio.create_task(one_mail(fresh())) for _ in range(10)]
        await elapsed(begin_s, 0.005 * number)
        await lab.one.kill()
        await asyncio.gather(*asked, return_exceptions=True)
        await lab.one.run()
    begin_s = time.monotonic()
    await elapsed(begin_s, LEASE_S)
    for key in keys:
        given = await lab.two.send(key)
        if given.status != 200:
            unknown(given)
        if key in answered:
            assert (given.replayed, given.content) == (True, answered[key].content)
        assert lab.count(key) <= 1
    assert len(keys) == 60


@pytest.mark.case("C177")
@pytest.mark.parametrize("policy", ["hold", "resend"])
async def test_embedded_store_remembers_over_a_kill_and_its_orphan_is_ended(lab: Lab, policy: str) -> None:
    target = "/mail/emails" if policy == "hold" else "/resend/emails"
    url = {**STORE, "url": embedded(lab.directory)}
    await lab.sidecar(routes(lab), store=url)
    first, key = fresh(), fresh()
    done = await lab.one.send(first, target=target)
    lab.upstream.script(gate(asyncio.Event()))
    asked = ask(lab.one, key, target)
    await lab.upstream.reached(2)
    at_s = await killed(lab, asked)
    await lab.one.run()
    again = await lab.one.send(first, target=target)
    assert (again.replayed, again.content) == (True, done.content)
    given = await lab.retry(lab.one, lambda one: one.status != 409, key, target=target)
    if policy == "hold":
        unknown(given)
    else:
        assert (given.status, given.replayed) == (200, False)
    assert time.monotonic() - at_s < scaled(LEASE_S + 3.0)
    assert lab.count(key) == (1 if policy == "hold" else 2)
    assert lab.count(first) == 1


@pytest.mark.case("C172")
async def test_kills_in_a_row_leave_one_unknown_outcome(lab: Lab) -> None:
    """Each of three owners is killed with the request sent; under `resend` each attempt carries the first one's key."""
    await pair(lab)
    key = fresh()
    for number in (1, 2, 3):
        lab.upstream.script(gate(asyncio.Event()))
        asked = asyncio.create_task(settled(lab, lab.one, key))
        await lab.upstream.reached(number)
        await killed(lab, asked)
        await lab.one.run()
    given = await settled(lab, lab.two, key)
    assert given.status == 200
    assert [one.first("idempotency-key") for one in lab.upstream.requests] == 4 * [key.encode()]
