"""The attempts of one process on the real server: renewals, and last words that are told until they are taken."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
from flight_lab import LEASE_S, TIMEOUT_S, Lab, calls, field, lab_on, records, state
from harness import RedisServer, StoreProxy, scaled, until
from harness.stores import HOLD, RESEND, claim, connected, lapse, name, rival

from sidecar.errors import StoreError
from sidecar.flights import SHORTEST_TICK_S, running_s
from sidecar.record import Outstanding, Renewal, Reserved, Verdict
from sidecar.store import Claim, Store


@pytest.fixture
async def lab(store: RedisServer) -> AsyncIterator[Lab]:
    """Flights on the shared server, for what needs no fault."""
    async with lab_on(store.url, scaled(5)) as made:
        yield made


@pytest.fixture
async def faulty(front: StoreProxy) -> AsyncIterator[Lab]:
    """Flights through the front."""
    async with lab_on(front.url) as made:
        yield made


# Renewing.


async def test_first_flight_is_renewed_before_its_lease_is_over(lab: Lab) -> None:
    flight = await lab.fly()
    until_s = flight.lease_until_s
    await until(lambda: flight.lease_until_s > until_s)
    assert flight.lease_until_s - LEASE_S < until_s  # asked while the lease still stood


async def test_one_task_renews_all_at_a_third_of_the_lease(lab: Lab, store: RedisServer) -> None:
    flights = [await lab.fly() for _ in range(5)]
    await until(lambda: flights[-1].lease_until_s > flights[-1].reserved_at_s + LEASE_S)
    before, begin = calls(store, "evalsha"), time.monotonic()
    await until(lambda: calls(store, "evalsha") - before >= 40)
    periods = (time.monotonic() - begin) / (LEASE_S / 3)
    assert 7 <= periods < 20  # eight renewals each: none before its third, and not much behind it
    for flight in flights:
        left = store.command("PTTL", name(flight.claim))
        assert isinstance(left, int)
        assert flight.claim.hold_for_s * 1000 - left < flight.claim.lease_s * 1000
        assert isinstance(await lab.store.reserve(rival(flight.claim), HOLD), Outstanding)
        await lab.settle(flight, lab.release(flight))
    assert records(store) == []


async def test_flushed_record_is_restored_by_its_renewal(lab: Lab, store: RedisServer) -> None:
    flight = await lab.fly()
    store.flush()
    await until(lambda: field(store, flight.claim, "owner") == flight.claim.token)
    assert state(store, flight.claim) == b"outstanding"
    await until(lambda: "record-restored" in lab.stream.getvalue())


@pytest.mark.parametrize(("word", "after"), [("complete", b"completed"), ("lose", b"unknown")])
async def test_flushed_record_is_restored_by_its_last_word(
    lab: Lab, store: RedisServer, word: str, after: bytes
) -> None:
    flight = await lab.fly(claim(lease_s=60))
    store.flush()
    assert await lab.settle(flight, getattr(lab, word)(flight)) == after.decode()
    assert state(store, flight.claim) == after
    assert flight.settled.done()
    assert len(lab) == 0


@pytest.mark.parametrize("meet", [False, True], ids=["apart", "in-one-tick"])
async def test_two_reservations_after_a_flush_leave_one_flight_and_its_record(
    lab: Lab, store: RedisServer, meet: bool
) -> None:
    flight = await lab.fly()
    store.flush()
    if meet:
        flight.renew_at_s = 0  # the renewal is due with the release of the second reservation
    found = await lab.reserve(rival(flight.claim), HOLD, ttl_s=3600)
    assert isinstance(found, Outstanding)
    assert lab.get(flight.claim.record) is flight
    assert len(lab) == 1
    await until(lambda: field(store, flight.claim, "owner") == flight.claim.token)
    await lab.settle(flight, lab.release(flight))
    await until(lambda: records(store) == [])


async def test_fault_of_one_flight_does_not_end_the_renewals_of_the_others(store: RedisServer) -> None:
    poisoned = claim(lease_s=LEASE_S)

    class Broken(Store):
        async def renew(self, claim: Claim, *, confirmed: bool = False) -> Renewal:
            if claim.record == poisoned.record:
                raise ValueError("a fault of ours")
            return await super().renew(claim, confirmed=confirmed)

    async with connected(store.url, TIMEOUT_S) as made:
        made.__class__ = Broken
        lab = Lab(made)
        lab.start()
        await lab.fly(poisoned)
        other = await lab.fly()
        for _ in range(3):
            until_s = other.lease_until_s
            await until(lambda: other.lease_until_s > until_s, what="a further renewal of the other flight")  # noqa: B023
        await lab.close()


# Last words.


async def test_settled_flights_leave_no_reservation_behind(lab: Lab, store: RedisServer) -> None:
    chance = random.Random(11)
    freed: list[Claim] = []

    async def one_flight() -> None:
        flight = await lab.fly(claim(lease_s=scaled(0.06)))
        await asyncio.sleep(chance.random() * scaled(0.15))
        word = chance.choice([lab.release, lab.release, lab.complete, lab.lose])
        if word == lab.release:
            freed.append(flight.claim)
        await lab.settle(flight, word(flight))

    await asyncio.gather(*(one_flight() for _ in range(300)))
    assert len(freed) > 100
    assert len(lab) == 0
    before = calls(store, "evalsha")
    # A renewal behind a last word would have come by the next tick.
    await asyncio.sleep(3 * SHORTEST_TICK_S)
    assert calls(store, "evalsha") == before
    assert {name(one).encode() for one in freed} & set(records(store)) == set()
    states = {store.command("HGET", record, "state") for record in records(store)}
    assert states == {b"completed", b"unknown"}


async def test_settled_flights_leave_no_reservation_behind_a_store_that_resets(
    faulty: Lab, front: StoreProxy, private_store: RedisServer
) -> None:
    chance = random.Random(12)
    front.delay_s = 0.003

    async def one_flight() -> None:
        try:
            flight = await faulty.fly(claim(lease_s=scaled(0.1)))
        except StoreError:
            return  # given up on
        await asyncio.sleep(chance.random() * scaled(0.2))
        await faulty.settle(flight, faulty.release(flight))

    running = [asyncio.get_running_loop().create_task(one_flight()) for _ in range(150)]
    for _ in range(6):
        await asyncio.sleep(scaled(0.03))
        front.cut()
    await asyncio.gather(*running)
    await until(lambda: len(faulty) == 0 and not faulty._abandoned, 10)
    assert records(private_store) == []


async def test_renewal_that_waited_behind_the_last_word_is_not_sent(lab: Lab, store: RedisServer) -> None:
    flight = await lab.fly(claim(lease_s=60))
    refused = iter([StoreError("READONLY", applied=False)])

    async def word(_age_s: float) -> Verdict:
        await asyncio.sleep(0)  # as long as a round trip takes
        for error in refused:
            raise error
        return await lab.store.release(flight.claim)

    # The exchange speaks and is refused, and would renew; the tick of the same turn waits behind it and is taken.
    await asyncio.gather(lab.settle(flight, word), lab._attend(flight, running_s()))
    assert flight.settled.done()
    assert records(store) == []


@pytest.mark.parametrize("fault", ["frozen", "refused", "silent"])
async def test_last_word_is_repeated_until_the_store_takes_it(
    faulty: Lab, front: StoreProxy, private_store: RedisServer, fault: str
) -> None:
    flights = [await faulty.fly() for _ in range(3)]
    words = (faulty.release, faulty.complete, faulty.lose)
    if fault == "frozen":
        front.freeze()
    elif fault == "refused":
        await front.refuse()
    else:
        front.drop_replies = True
    told = [faulty.settle(flight, word(flight)) for flight, word in zip(flights, words, strict=True)]
    assert await asyncio.gather(*told) == [None, None, None]
    assert (faulty.unsettled, len(faulty)) == (3, 3)
    assert [flight.settled.done() for flight in flights] == [False, False, False]
    front.drop_replies = False
    front.thaw()
    if fault == "refused":
        await front.accept()
    await asyncio.wait_for(asyncio.gather(*(flight.settled for flight in flights)), scaled(5))
    states = [state(private_store, flight.claim) for flight in flights]
    assert states == [None, b"completed", b"unknown"]
    assert faulty.unsettled == 0
    assert faulty.metrics.counters["sidecar_store_errors"][("settle",)] >= 3


async def test_last_word_outlives_a_killed_server(private_store: RedisServer) -> None:
    async with lab_on(private_store.url) as lab:
        flight = await lab.fly()
        private_store.kill()
        assert await lab.settle(flight, lab.complete(flight)) is None
        await asyncio.to_thread(private_store.start)
        await asyncio.wait_for(flight.settled, scaled(5))
        assert state(private_store, flight.claim) == b"completed"


async def test_full_store_keeps_the_record_ours_until_it_takes_the_last_word(private_store: RedisServer) -> None:
    async with lab_on(private_store.url) as lab:
        flight = await lab.fly()
        private_store.command("CONFIG", "SET", "maxmemory", "1")
        assert await lab.settle(flight, lab.complete(flight)) is None
        until_s = flight.lease_until_s
        await until(lambda: flight.lease_until_s > until_s + LEASE_S)
        assert isinstance(await lab.store.reserve(rival(flight.claim), HOLD), Outstanding)
        private_store.command("CONFIG", "SET", "maxmemory", "0")
        await asyncio.wait_for(flight.settled, scaled(5))
        assert state(private_store, flight.claim) == b"completed"


async def test_last_word_is_given_up_when_the_ttl_is_over(faulty: Lab, front: StoreProxy) -> None:
    flight = await faulty.fly(claim(lease_s=scaled(0.1)), ttl_s=scaled(0.1))
    await front.refuse()
    assert await faulty.settle(flight, faulty.complete(flight)) is None
    await asyncio.wait_for(flight.settled, scaled(5))
    assert running_s() - flight.reserved_at_s > flight.ttl_s
    assert len(faulty) == 0
    assert "outcome-not-recorded" in faulty.stream.getvalue()


async def test_stale_last_word_ends_the_flight_and_is_said(lab: Lab, store: RedisServer) -> None:
    flight = await lab.fly(claim(lease_s=60))
    lapse(store, flight.claim)
    assert isinstance(await lab.store.reserve(rival(flight.claim), RESEND), Reserved)
    assert await lab.settle(flight, lab.release(flight)) is Verdict.STALE
    assert flight.settled.done()
    assert lab.metrics.counters["sidecar_leases_lost"][("mail",)] == 1
    assert "lease-lost" in lab.stream.getvalue()
