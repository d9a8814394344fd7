"""The fence before the first byte, what was given up on, what arrivals are told of a flight, and the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from flight_lab import LEASE_S, Lab, calls, field, lab_on, records, state
from harness import RedisServer, StoreProxy, scaled, until
from harness.stores import HOLD, RESEND, claim, lapse, rival

from sidecar.errors import NotSentError, Sent, StoreError
from sidecar.flights import Flight, running_s
from sidecar.record import Outstanding, Renewal, Reserved, Reused, Verdict
from sidecar.store import Claim


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


# What was given up on.


@pytest.mark.parametrize("fault", ["applied", "applied-late"])
async def test_reservation_given_up_on_is_released_so_that_the_next_is_granted(
    faulty: Lab, front: StoreProxy, private_store: RedisServer, fault: str
) -> None:
    one = claim(lease_s=LEASE_S)
    if fault == "applied":
        front.drop_replies = True
    else:
        front.freeze()
    with pytest.raises(StoreError) as caught:
        await faulty.reserve(one, HOLD, ttl_s=3600)
    assert caught.value.applied is None
    assert (state(private_store, one) is not None) is (fault == "applied")
    front.drop_replies = False
    front.thaw()
    await until(lambda: calls(private_store, "del") == 1, what="the release")
    assert isinstance(await faulty.reserve(rival(one), HOLD, ttl_s=3600), Flight)
    assert field(private_store, one, "owner") != one.token
    if fault == "applied":
        await until(lambda: not faulty._abandoned, 5)  # nothing is repeated for longer than needed


async def test_renewal_given_up_on_does_not_put_up_what_was_released(
    faulty: Lab, front: StoreProxy, private_store: RedisServer
) -> None:
    flight = await faulty.fly()
    front.drop_replies = True
    await until(lambda: flight.doubtful)
    front.drop_replies = False
    await until(lambda: not faulty.store.trouble)
    assert await faulty.settle(flight, faulty.release(flight)) is Verdict.RELEASED
    # As the network may have it: the renewal is applied only now.
    assert await faulty.store.renew(flight.claim) is Renewal.RESTORED
    await until(lambda: records(private_store) == [])


async def test_reservation_cut_short_by_the_end_is_released(
    faulty: Lab, front: StoreProxy, private_store: RedisServer
) -> None:
    one = claim(lease_s=LEASE_S)
    front.drop_replies = True
    asking = asyncio.get_running_loop().create_task(faulty.reserve(one, HOLD, ttl_s=3600))
    await until(lambda: state(private_store, one) == b"outstanding")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    front.drop_replies = False
    await until(lambda: records(private_store) == [], 2, what="no reservation that nobody owns")


async def test_flight_without_a_reservation_takes_the_one_given_up_on(
    faulty: Lab, front: StoreProxy, private_store: RedisServer
) -> None:
    one = claim(lease_s=LEASE_S)
    front.drop_replies = True
    with pytest.raises(StoreError):
        await faulty.reserve(one, HOLD, ttl_s=3600)
    flight = faulty.unreserved(one, ttl_s=3600)
    front.drop_replies = False
    await until(lambda: flight.lease_until_s > flight.reserved_at_s + LEASE_S)
    assert state(private_store, one) == b"outstanding"
    assert await faulty.settle(flight, faulty.complete(flight)) is Verdict.COMPLETED
    assert calls(private_store, "del") == 0


# The fence, and what arrivals are told.


def flight_of(one: Claim, *, ago_s: float = 0, window_left_s: float | None = None, protected: bool = True) -> Flight:
    """A flight that asked `ago_s` seconds ago."""
    asked_at_s = running_s() - ago_s
    return Flight(one, asked_at_s=asked_at_s, ttl_s=60, window_left_s=window_left_s, protected=protected)


async def test_fence_is_dead_when_the_lease_is_over() -> None:
    assert flight_of(claim(), ago_s=59).may_write()
    late = flight_of(claim(), ago_s=60.001)
    assert not late.may_write()
    assert not late.begun
    # Without a reservation there is no lease: the route says that it goes out all the same.
    assert flight_of(claim(), ago_s=61, protected=False).may_write()


async def test_fence_counts_from_before_the_store_was_asked(faulty: Lab, front: StoreProxy) -> None:
    front.delay_s = 0.05
    begin = running_s()
    flight = await faulty.fly(claim(lease_s=60))
    assert begin <= flight.reserved_at_s < begin + scaled(0.05)
    assert flight.lease_until_s == flight.reserved_at_s + 60


def test_running_clock_counts_suspension() -> None:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    assert 0 <= time.clock_gettime(clock) - running_s() + 1 <= 1.1


async def test_fence_is_renewed_where_this_process_still_owns_the_record(lab: Lab) -> None:
    flight = await lab.fly(claim(lease_s=60))
    flight.lease_until_s = running_s()
    assert not flight.may_write()
    await lab.renew_for_write(flight)
    assert flight.may_write()
    assert flight.begun


async def test_fence_is_not_renewed_where_another_attempt_owns_the_record(lab: Lab, store: RedisServer) -> None:
    flight = await lab.fly(claim(lease_s=60))
    lapse(store, flight.claim)
    assert isinstance(await lab.store.reserve(rival(flight.claim), RESEND), Reserved)
    flight.lease_until_s = running_s()
    with pytest.raises(NotSentError, match="another attempt"):
        await lab.renew_for_write(flight)
    assert not flight.may_write()


@pytest.mark.parametrize("fault", ["refused", "frozen"])
async def test_fence_is_not_renewed_where_the_store_cannot_be_asked(faulty: Lab, front: StoreProxy, fault: str) -> None:
    flight = await faulty.fly(claim(lease_s=60))
    flight.lease_until_s = running_s()
    if fault == "refused":
        await front.refuse()
    else:
        front.freeze()
    with pytest.raises(NotSentError, match="store does not answer"):
        await faulty.renew_for_write(flight)
    assert not flight.may_write()


async def test_window_of_the_provider_is_a_fence_of_its_own(lab: Lab) -> None:
    later = claim(earlier_unknown=True)
    assert flight_of(later, window_left_s=60).may_write()
    over = flight_of(later, window_left_s=1, ago_s=1)
    assert not over.may_write()
    with pytest.raises(NotSentError, match="window"):
        await lab.renew_for_write(over)
    # A first attempt has no window behind it, nor has a provider without a key of its own.
    assert flight_of(claim(), window_left_s=0).may_write()
    assert flight_of(later, window_left_s=None).may_write()


async def test_arrival_at_a_flight_is_told_of_the_lease_or_of_other_content() -> None:
    flight = flight_of(claim(), ago_s=20)
    found: Any = flight.found(b"fingerprint")
    assert 39_000 < found.left_ms <= 40_000
    assert flight.found(b"other") == Reused(Sent.UNKNOWN)
    assert flight_of(claim(), ago_s=99).found(b"fingerprint") == Outstanding(0)
    off = flight_of(replace(claim(), algorithm=b"off"))
    assert isinstance(off.found(b"other"), Outstanding)


# The end.


async def test_drain_waits_for_every_outcome_and_counts_what_is_left(lab: Lab) -> None:
    first, second = await lab.fly(), await lab.fly()
    assert await lab.drain(0) == 2
    assert await lab.drain(scaled(0.02)) == 2
    await lab.settle(first, lab.release(first))
    assert await lab.drain(scaled(0.02)) == 1
    waiting = asyncio.get_running_loop().create_task(lab.drain(scaled(5)))
    await asyncio.sleep(0)
    await lab.settle(second, lab.complete(second))
    assert await asyncio.wait_for(waiting, scaled(1)) == 0


async def test_drain_waits_until_a_reservation_given_up_on_is_released(
    faulty: Lab, front: StoreProxy, private_store: RedisServer
) -> None:
    front.drop_replies = True
    with pytest.raises(StoreError):
        await faulty.reserve(claim(lease_s=LEASE_S), HOLD, ttl_s=3600)
    assert await faulty.drain(0) == 1
    assert records(private_store) != []
    front.drop_replies = False
    assert await faulty.drain(scaled(5)) == 0
    assert records(private_store) == []
