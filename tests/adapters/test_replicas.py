"""`store.replicas`: nothing is reserved that fewer replicas hold, and nobody else waits for their word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from harness import RedisServer, StoreProxy, scaled, until
from harness.servers import Replicated, information
from harness.stores import HOLD, OK, RESEND, claim, connected, lapse, name, rival

from sidecar.errors import StoreError
from sidecar.record import Completed, Held, Outstanding, Renewal, Reserved, Verdict
from sidecar.store import Claim, Store

TIMEOUT_S = scaled(0.5)
SLACK_S = scaled(0.4)


@pytest.fixture(scope="module")
def servers() -> Iterator[Replicated]:
    """A primary and a replica."""
    made = Replicated().start()
    yield made
    made.remove()


@pytest.fixture
def replica(servers: Replicated) -> Iterator[RedisServer]:
    """The replica, which runs again after the test."""
    (made,) = servers.replicas
    yield made
    made.resume()


@pytest.fixture
async def records(servers: Replicated, replica: RedisServer) -> AsyncIterator[Store]:
    """A store that waits for the replica."""
    async with connected(servers.primary.url, TIMEOUT_S, replicas=1) as made:
        yield made


async def refused(work: object) -> StoreError:
    """The error of a call that no replica confirmed, in time."""
    begin = time.monotonic()
    with pytest.raises(StoreError) as caught:
        await work  # type: ignore[misc]
    assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
    return caught.value


async def complete(records: Store, one: Claim) -> Verdict:
    """With an answer."""
    return await records.complete(one, OK, kept=True, refusal=False, ttl_s=60, age_s=1)


def waits(server: RedisServer) -> int:
    """How many WAITs it has got."""
    told = information(server, "commandstats").get("cmdstat_wait", "calls=0")
    return int(told.split(",")[0].removeprefix("calls="))


async def test_reservation_is_at_the_replica_when_it_is_granted(records: Store, replica: RedisServer) -> None:
    for _ in range(50):
        one = claim()
        assert isinstance(await records.reserve(one, HOLD), Reserved)
        assert replica.command("HGET", name(one), "owner") == one.token


async def test_reservation_that_no_replica_confirms_is_refused_in_time(records: Store, replica: RedisServer) -> None:
    one = claim()
    replica.pause()
    error = await refused(records.reserve(one, HOLD))
    # It stands at the primary, so whoever asked for it must release it.
    assert error.applied is None
    assert "store.replicas" in error.reason
    assert isinstance(await records.reserve(rival(one), HOLD), Outstanding)
    # The same attempt asks again: its own reservation is no more at the replica than before.
    assert (await refused(records.reserve(one, HOLD))).applied is None
    replica.resume()
    assert isinstance(await records.reserve(one, HOLD), Reserved)
    assert replica.command("HGET", name(one), "owner") == one.token


async def test_further_attempt_is_confirmed_as_the_first_one(
    records: Store, servers: Replicated, replica: RedisServer
) -> None:
    one = claim()
    await records.reserve(one, HOLD)
    lapse(servers.primary, one)
    replica.pause()
    assert (await refused(records.reserve(rival(one), RESEND))).applied is None
    replica.resume()


async def test_nobody_else_waits_while_a_replica_is_silent(records: Store, replica: RedisServer) -> None:
    done, held, running = claim(), claim(), claim()
    for one in (done, held, running):
        assert isinstance(await records.reserve(one, HOLD), Reserved)
    await complete(records, done)
    await records.lose(held, seen=None, ttl_s=60, age_s=1)
    replica.pause()
    asked = [asyncio.get_running_loop().create_task(records.reserve(claim(), HOLD)) for _ in range(20)]
    begin = time.monotonic()
    for _ in range(20):
        assert isinstance(await records.reserve(rival(done), HOLD), Completed)
        assert isinstance(await records.reserve(rival(held), HOLD), Held)
        assert isinstance(await records.reserve(rival(running), HOLD), Outstanding)
        assert await records.renew(running) is Renewal.RENEWED
    assert await complete(records, running) is Verdict.COMPLETED
    assert time.monotonic() - begin < TIMEOUT_S / 2
    for task in asked:
        await refused(task)
    assert records.trouble == "", "a WAIT in vain ends no connection"


async def test_reservations_of_one_moment_share_a_wait(records: Store, servers: Replicated) -> None:
    before = waits(servers.primary)
    found = await asyncio.gather(*(records.reserve(claim(), HOLD) for _ in range(500)))
    assert all(isinstance(one, Reserved) for one in found)
    assert 1 <= waits(servers.primary) - before <= 25


async def test_replays_and_refusals_ask_for_no_wait(records: Store, servers: Replicated) -> None:
    one = claim()
    await records.reserve(one, HOLD)
    await complete(records, one)
    before = waits(servers.primary)
    for _ in range(10):
        assert isinstance(await records.reserve(rival(one), HOLD), Completed)
    assert waits(servers.primary) == before


async def test_one_replica_more_than_there_is_refuses_everything(servers: Replicated, replica: RedisServer) -> None:
    async with connected(servers.primary.url, TIMEOUT_S, replicas=2) as records:
        assert (await refused(records.reserve(claim(), HOLD))).applied is None
        await records.check()
        assert any("there are 1 replicas" in warning for warning in records.warnings)


async def test_renewal_before_the_first_byte_is_confirmed_and_a_later_one_is_not(
    records: Store, replica: RedisServer
) -> None:
    one = claim()
    await records.reserve(one, HOLD)
    assert await records.renew(one, confirmed=True) is Renewal.RENEWED
    replica.pause()
    assert await records.renew(one) is Renewal.RENEWED
    assert (await refused(records.renew(one, confirmed=True))).applied is None
    replica.resume()
    assert await records.renew(one, confirmed=True) is Renewal.RENEWED
    assert await records.renew(rival(one), confirmed=True) is Renewal.STALE


async def test_scripts_flushed_are_run_by_their_text(records: Store, servers: Replicated, replica: RedisServer) -> None:
    for _ in range(3):
        servers.primary.command("SCRIPT", "FLUSH")
        one = claim()
        assert isinstance(await records.reserve(one, HOLD), Reserved)
        assert replica.command("EXISTS", name(one)) == 1


async def test_caller_that_leaves_takes_nothing_from_the_others(records: Store) -> None:
    one, other = claim(), claim()
    leaving = asyncio.get_running_loop().create_task(records.reserve(one, HOLD))
    staying = asyncio.get_running_loop().create_task(records.reserve(other, HOLD))
    await asyncio.sleep(0)
    leaving.cancel()
    assert isinstance(await staying, Reserved)


async def test_silent_primary_fails_in_time_and_comes_back(servers: Replicated, records: Store) -> None:
    servers.primary.pause()
    await refused(records.reserve(claim(), HOLD))
    servers.primary.resume()
    await until(lambda: not records.trouble)
    assert isinstance(await records.reserve(claim(), HOLD), Reserved)


@pytest.mark.parametrize("alive", [True, False], ids=["replica", "no-replica"])
async def test_wait_lost_with_its_connection_is_no_word_of_a_replica_and_asked_again(
    servers: Replicated, replica: RedisServer, alive: bool
) -> None:
    proxy = await StoreProxy.start(servers.primary)
    try:
        async with connected(proxy.url, TIMEOUT_S, replicas=1) as records:
            proxy.lose_reply(b"WAIT")
            if not alive:
                replica.pause()
                assert (await refused(records.reserve(claim(), HOLD))).applied is None
            else:
                one = claim()
                assert isinstance(await records.reserve(one, HOLD), Reserved)
                assert replica.command("EXISTS", name(one)) == 1
            assert proxy.lost == 1
    finally:
        await proxy.stop()


async def test_warning_of_fewer_waited_for_than_may_be_promoted() -> None:
    servers = Replicated(2, {"appendfsync": "always"}).start()
    try:
        for count, told in ((0, "store.replicas is 0"), (1, "there are 2 replicas"), (2, ""), (3, "nothing can be")):
            async with connected(servers.primary.url, TIMEOUT_S, replicas=count) as records:
                await records.check()
                assert [told in warning for warning in records.warnings] == ([True] if told else []), records.warnings
    finally:
        servers.remove()
