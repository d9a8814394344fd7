"""Twins: two sidecars on one store, requests at the same instant, waiters, and exactly one successor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from harness import Client, Parsed, Sidecar, answer, duration, gate, request, reset_after_content, slow, until
from harness.program import MAIL
from lab import FIELDS, LEASE_S, Lab, Settings, busy, elapsed, fresh, problem, retry_after, stored, times, unknown

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

SIDECARS = 2
LIMIT_S = 0.6
WAIT = {"concurrent": "wait", "timeout": times(total_s=5)}


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(timeout=times(total_s=5)),
        "wait": lab.route(**WAIT),
        "brief": lab.route(**WAIT, wait_limit=duration(LIMIT_S)),
        "rovela": lab.route("rovela", timeout=times(total_s=5)),
        "resend": lab.route("resend", timeout=times(total_s=5)),
        "wait-resend": lab.route("resend", **WAIT),
    }


def mail(key: str, target: str = "/mail/emails", content: bytes = MAIL) -> bytes:
    return request(target=target, content=content, fields=FIELDS, key=key)


async def at_once(data: bytes, *sidecars: Sidecar) -> list[Parsed]:
    """`data` to each of `sidecars` at the same instant."""
    clients = await asyncio.gather(*(Client.open(one.base) for one in sidecars))
    try:
        for client in clients:
            client.writer.write(data)
        return list(await asyncio.gather(*(client.answer() for client in clients)))
    finally:
        for client in clients:
            client.close()


def leave(clients: Sequence[Client]) -> None:
    for client in clients:
        client.abort()


async def waiting(count: int, *sidecars: Sidecar) -> None:
    """Until `sidecars` have `count` waiters in all."""

    async def reached() -> bool:
        return sum([await one.metric("sidecar_waiting") for one in sidecars]) == count

    await until(reached, what=f"{count} arrivals wait")


def one_mail(lab: Lab, key: str, given: Sequence[Parsed]) -> None:
    """One mail, one answer that is no replay, replays of it, and 409 for the others."""
    assert lab.count(key) == 1
    firsts = [one for one in given if one.status == 200 and not one.replayed]
    assert len(firsts) == 1
    for one in given:
        if one.replayed:
            stored(firsts[0], one)
        elif one is not firsts[0]:
            busy(one)


@pytest.mark.case("C158")
async def test_twins_at_two_processes_in_fifty_rounds_are_one_mail_each(shared: Lab) -> None:
    shared.upstream.default = slow(0.01)
    for _ in range(50):
        key = fresh()
        one_mail(shared, key, await at_once(mail(key), shared.one, shared.two))
    assert shared.upstream.count == 50


@pytest.mark.case("C158")
async def test_fifty_at_once_at_one_process_and_at_two_are_one_mail(shared: Lab) -> None:
    for sidecars in ([shared.one] * 50, [shared.one, shared.two] * 25):
        key = fresh()
        shared.upstream.script(slow(0.2))
        one_mail(shared, key, await at_once(mail(key), *sidecars))


@pytest.mark.case("C159")
async def test_duplicate_that_reaches_the_other_process_is_replayed_there(shared: Lab) -> None:
    key = fresh()
    first = await shared.one.send(key)
    stored(first, await shared.two.send(key))
    stored(first, await shared.one.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C159")
async def test_three_workers_that_walk_the_same_list_send_each_mail_once(shared: Lab) -> None:
    start = fresh()
    keys = [f"{start}:r{number}" for number in range(3)]
    shared.upstream.default = slow(0.1)

    async def worker(sidecar: Sidecar, number: int) -> list[Parsed]:
        await elapsed(begin_s, 0.03 * number)
        return [await sidecar.send(key, target="/wait/emails") for key in keys]

    begin_s = time.monotonic()
    walked = await asyncio.gather(*(worker((shared.one, shared.two)[n % 2], n) for n in range(3)))
    assert [shared.count(key) for key in keys] == [1, 1, 1]
    assert len({one.content for given in walked for one in given}) == 3
    assert {one.status for given in walked for one in given} == {200}


@pytest.mark.case("C160")
async def test_twin_is_refused_at_once_with_the_time_the_lease_still_has(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key))
    await shared.upstream.reached(1)
    for twin in (shared.one, shared.two):
        begin_s = time.monotonic()
        given = await twin.send(key)
        assert time.monotonic() - begin_s < 0.5
        assert busy(given) <= LEASE_S + 1
        assert given.first("content-type") == b"application/problem+json"
    given = await shared.two.send(key, MAIL.replace(b"hello", b"other"))
    problem(given, "key-reused", 422, sent="unknown", retryable=False)
    given = await shared.one.send(key, MAIL.replace(b"hello", b"other"))
    problem(given, "key-reused", 422, sent="unknown", retryable=False)
    opened.set()
    first = await asked
    stored(first, await shared.two.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C160")
async def test_twin_of_a_provider_route_gets_the_providers_own_409(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key, target="/resend/emails"))
    await shared.upstream.reached(1)
    given = await shared.two.send(key, target="/resend/emails")
    members = problem(given, "request-outstanding", 409, sent="unknown")
    assert (members["name"], members["statusCode"]) == ("concurrent_idempotent_requests", 409)
    retry_after(given)
    opened.set()
    assert (await asked).status == 200


@pytest.mark.case("C161")
async def test_slow_upstream_outlives_the_lease_and_twins_still_find_it_outstanding(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key))
    await shared.upstream.reached(1)
    begin_s = time.monotonic()
    for after_s in (0.5 * LEASE_S, 1.2 * LEASE_S, 2.2 * LEASE_S):
        await elapsed(begin_s, after_s)
        assert busy(await shared.two.send(key)) <= LEASE_S + 1
        busy(await shared.one.send(key))
    opened.set()
    first = await asked
    assert first.status == 200
    stored(first, await shared.two.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C162")
@pytest.mark.parametrize("target", ["/wait/emails", "/rovela/emails"])
async def test_waiters_at_both_processes_get_the_answer_as_a_replay(shared: Lab, target: str) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key, target=target))
    await shared.upstream.reached(1)
    twins = [asyncio.create_task(one.send(key, target=target)) for one in (shared.one, shared.two) * 3]
    await waiting(6, shared.one, shared.two)
    opened.set()
    first = await asked
    for twin in twins:
        stored(first, await twin)
    assert shared.count(key) == 1


@pytest.mark.case("C163")
async def test_two_hundred_waiters_do_not_delay_the_owner_nor_other_keys(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key, target="/wait/emails"))
    await shared.upstream.reached(1)
    clients = [await Client.open((shared.one, shared.two)[n % 2].base) for n in range(200)]
    for client in clients:
        client.writer.write(mail(key, "/wait/emails"))
    await waiting(200, shared.one, shared.two)
    begin_s = time.monotonic()
    assert (await shared.one.send(fresh())).status == 200
    assert (await shared.two.send(fresh())).status == 200
    assert time.monotonic() - begin_s < 1.0
    connected = shared.store.command("CLIENT", "LIST")
    assert isinstance(connected, bytes)
    assert connected.count(b" addr=") < 10
    opened.set()
    first = await asked
    for given in await asyncio.gather(*(client.answer() for client in clients)):
        stored(first, given)
    leave(clients)
    assert shared.count(key) == 1


@pytest.mark.case("C163")
async def test_waiters_whose_clients_left_are_freed_and_the_others_are_answered(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key, target="/wait/emails"))
    await shared.upstream.reached(1)
    clients = [await Client.open(one.base) for one in (shared.one, shared.two) * 10]
    for client in clients:
        client.writer.write(mail(key, "/wait/emails"))
    await waiting(20, shared.one, shared.two)
    leave(clients[:16])
    await waiting(4, shared.one, shared.two)
    opened.set()
    first = await asked
    for client in clients[16:]:
        stored(first, await client.answer())
    leave(clients[16:])
    assert shared.count(key) == 1


@pytest.mark.case("C162")
async def test_wait_ends_at_its_limit_with_409(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key, target="/brief/emails"))
    await shared.upstream.reached(1)
    for twin in (shared.one, shared.two):
        begin_s = time.monotonic()
        busy(await twin.send(key, target="/brief/emails"))
        assert time.monotonic() - begin_s >= LIMIT_S * 0.9
    assert shared.count(key) == 1
    opened.set()
    assert (await asked).status == 200


@pytest.mark.case("C164")
async def test_exactly_one_waiter_goes_on_after_a_release_until_one_succeeds(shared: Lab) -> None:
    """Three attempts are refused for now; each time one waiter alone becomes the owner; the fourth is the mail."""
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, answer(503, content=b"busy")), answer(429), answer(500), slow(0.1))
    asked = asyncio.create_task(shared.one.send(key, target="/wait/emails"))
    await shared.upstream.reached(1)
    twins = [asyncio.create_task(one.send(key, target="/wait/emails")) for one in (shared.one, shared.two) * 5]
    await waiting(10, shared.one, shared.two)
    opened.set()
    assert (await asked).content == b"busy"
    given = [await twin for twin in twins]
    assert sorted(one.status for one in given if one.status != 200) == [429, 500]
    assert sum(one.status == 200 and not one.replayed for one in given) == 1
    assert sum(one.replayed for one in given) == 7
    assert shared.count(key) == 4


@pytest.mark.case("C165")
async def test_waiters_of_a_lost_answer_get_504_and_none_goes_on(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, reset_after_content()))
    asked = asyncio.create_task(shared.one.send(key, target="/wait/emails"))
    await shared.upstream.reached(1)
    twins = [asyncio.create_task(one.send(key, target="/wait/emails")) for one in (shared.one, shared.two) * 3]
    await waiting(6, shared.one, shared.two)
    opened.set()
    unknown(await asked)
    for twin in twins:
        unknown(await twin)
    assert shared.count(key) == 1


@pytest.mark.case("C165")
async def test_exactly_one_waiter_goes_on_after_a_lost_answer_where_it_is_sent_again(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, reset_after_content()), slow(0.2))
    asked = asyncio.create_task(shared.one.send(key, target="/wait-resend/emails"))
    await shared.upstream.reached(1)
    twins = [asyncio.create_task(one.send(key, target="/wait-resend/emails")) for one in (shared.one, shared.two) * 5]
    await waiting(10, shared.one, shared.two)
    opened.set()
    unknown(await asked)
    given = [await twin for twin in twins]
    assert {one.status for one in given} == {200}
    assert sum(not one.replayed for one in given) == 1
    assert [one.first("idempotency-key") for one in shared.upstream.requests] == 2 * [key.encode()]


@pytest.mark.case("C162")
async def test_waiter_with_other_content_is_refused_and_does_not_wait(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key, target="/wait/emails"))
    await shared.upstream.reached(1)
    for twin in (shared.one, shared.two):
        given = await twin.send(key, b"other", "/wait/emails", deadline_s=1)
        problem(given, "key-reused", 422, sent="unknown", retryable=False)
    opened.set()
    assert (await asked).status == 200


@pytest.mark.case("C163")
async def test_busy_key_delays_no_other_key(shared: Lab) -> None:
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    key = fresh()
    asked = asyncio.create_task(shared.one.send(key))
    await shared.upstream.reached(1)
    begin_s = time.monotonic()
    given = await asyncio.gather(*(shared.one.send(fresh()) for _ in range(50)))
    assert {one.status for one in given} == {200}
    assert time.monotonic() - begin_s < 3.0
    opened.set()
    assert (await asked).status == 200
    assert shared.upstream.count == 51
