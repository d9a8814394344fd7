"""Sentinels: who is asked, whom they name, and what a fail-over costs a store that runs over it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial

import pytest
from harness import RedisServer, scaled, until
from harness.servers import NAME, Replicated, Sentinel, Sentinels, information, leads, wait
from harness.stores import HOLD, OK, claim, connected, name, rival, trying

from sidecar.errors import StoreError
from sidecar.node import Line
from sidecar.record import Completed, Outstanding, Reserved
from sidecar.store import Store

# What the sentinels and the links may take: silence noticed, votes, promotion, a pause before the next connection.
FAIL_OVER_S = 15.0


@pytest.fixture(scope="module")
def watched() -> Iterator[Sentinels]:
    """A primary, a replica and three sentinels for tests that leave them as they are."""
    servers = Replicated().start()
    sentinels = Sentinels(servers).start()
    yield sentinels
    sentinels.remove()
    servers.remove()


@pytest.fixture
def failing() -> Iterator[Sentinels]:
    """The same for one test alone."""
    servers = Replicated().start()
    sentinels = Sentinels(servers).start()
    yield sentinels
    sentinels.remove()
    servers.remove()


def tried(store: Store) -> bool:
    """Whether there is a trouble by now."""
    return store.trouble not in ("", "not connected yet")


async def writes(store: Store) -> bool:
    """Whether a reservation is taken."""
    try:
        return isinstance(await store.reserve(claim(), HOLD), Reserved)
    except StoreError:
        return False


def where(store: Store) -> int:
    """The port of the server that arrivals are asked at."""
    ((_, node),) = store._nodes.primaries()
    return node._leads_to[Line.ASKING].port


async def test_record_lives_at_the_primary_that_the_sentinels_name(watched: Sentinels) -> None:
    async with connected(watched.url) as records:
        one = claim()
        found = await records.reserve(one, HOLD)
        assert isinstance(found, Reserved)
        await records.complete(one.owned(found), OK, kept=True, refusal=False, ttl_s=60, age_s=1)
        assert isinstance(await records.reserve(rival(one), HOLD), Completed)
        await records.check()
        assert any("store.replicas is 0" in warning for warning in records.warnings)


async def test_database_of_the_url_is_used(watched: Sentinels) -> None:
    async with connected(watched.url.removesuffix("/0") + "/5") as records:
        assert await writes(records)
    assert "db5" in information(watched.watched.primary, "keyspace")


async def test_one_sentinel_that_answers_is_enough(watched: Sentinels) -> None:
    silent, refused = watched.servers[0], "127.0.0.1:1"
    silent.pause()
    try:
        hosts = f"{silent.host}:{silent.port},{refused},{watched.servers[1].host}:{watched.servers[1].port}"
        begin = time.monotonic()
        async with connected(f"redis+sentinel://{hosts}/main") as records:
            assert time.monotonic() - begin < scaled(2)
            assert await writes(records)
    finally:
        silent.resume()


@pytest.mark.slow
async def test_sentinel_that_names_another_server_is_outvoted_by_a_later_epoch(
    failing: Sentinels, private_store: RedisServer
) -> None:
    new = failing.watched.replicas[0]
    failing.servers[0].command("SENTINEL", "FAILOVER", NAME)
    wait(lambda: {one.state("port") for one in failing.servers} == {str(new.port)}, what="a fail-over")
    cut_off = Sentinel(private_store).start()  # it has not heard of the fail-over, nor of the others
    try:
        async with connected(failing.url.replace("//", f"//{cut_off.host}:{cut_off.port},")) as records:
            assert await writes(records)
            assert where(records) == new.port
    finally:
        cut_off.remove()


async def test_name_that_no_sentinel_knows_is_the_trouble(watched: Sentinels) -> None:
    async with trying(watched.url.replace("/main/0", "/other/0")) as store:
        await until(lambda: "No such master" in store.trouble)
        with pytest.raises(StoreError) as caught:
            await store.reserve(claim(), HOLD)
        assert caught.value.applied is False


@pytest.mark.slow
async def test_sentinels_and_servers_are_asked_with_a_password_each() -> None:
    servers = Replicated(options={"requirepass": "of-data", "masterauth": "of-data"}, password="of-data").start()
    sentinels = Sentinels(servers, password="of-sentinels").start()
    try:
        data = sentinels.url.replace("//", "//:of-data@")
        async with connected(f"{data}?sentinel_password=of-sentinels") as records:
            assert await writes(records)
        for url in (data, f"{sentinels.url}?sentinel_password=of-sentinels", f"{data}?sentinel_password=of-nothing"):
            async with trying(url) as store:
                await until(partial(tried, store))
                assert re.search("password|AUTH|Authentication", store.trouble)
                assert not re.search("of-data|of-sentinels|of-nothing", store.trouble)
    finally:
        sentinels.remove()
        servers.remove()


async def test_no_sentinel_that_answers_is_the_trouble() -> None:
    async with trying("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main") as store:
        await until(lambda: "no sentinel names the primary" in store.trouble)


@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=pytest.mark.slow)])
async def test_fail_over_is_followed_without_a_restart(failing: Sentinels, how: str) -> None:
    old, new = failing.watched.servers
    async with connected(failing.url, scaled(0.5), replicas=0) as records:
        one = claim()
        found = await records.reserve(one, HOLD)
        assert isinstance(found, Reserved)
        old.kill() if how == "kill" else old.pause()
        begin = time.monotonic()
        await until(lambda: writes(records), FAIL_OVER_S)
        print(f"writes again after {time.monotonic() - begin:.1f} s")
        assert where(records) == new.port
        assert isinstance(await records.reserve(rival(one), HOLD), Outstanding)
        await until(lambda: not records.trouble)
        if how == "pause":
            old.resume()
            assert await writes(records)
            wait(lambda: not leads(old))
            assert await writes(records)


@pytest.mark.slow
async def test_old_primary_that_slept_too_short_for_a_time_out_is_left_once_another_is_named(
    failing: Sentinels,
) -> None:
    old, new = failing.watched.servers
    async with connected(failing.url, scaled(10)) as records:
        old.pause()
        await until(lambda: failing.primary() is new, FAIL_OVER_S)
        # With ten seconds for a command nothing has timed out: its connections still stand.
        old.resume()
        await until(lambda: writes(records), FAIL_OVER_S)
        await until(lambda: where(records) == new.port, FAIL_OVER_S)
        one = claim()
        assert isinstance(await records.reserve(one, HOLD), Reserved)
        wait(lambda: new.command("EXISTS", name(one)) == 1)


async def test_demoted_primary_at_a_fixed_address_is_away_until_it_is_primary_again(private_store: RedisServer) -> None:
    other = RedisServer().start()
    try:
        async with connected(private_store.url, scaled(0.5)) as records:
            private_store.command("REPLICAOF", other.host, other.port)
            with pytest.raises(StoreError) as caught:
                await records.reserve(claim(), HOLD)
            assert "READONLY" in caught.value.reason
            assert caught.value.applied is False
            await until(lambda: "replica" in records.trouble)
            private_store.command("REPLICAOF", "NO", "ONE")
            await until(lambda: writes(records), FAIL_OVER_S)
    finally:
        other.remove()
