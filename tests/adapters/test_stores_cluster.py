"""A cluster: every key at its node, a slot that moves, a node that dies, a map that is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from harness import RedisServer, StartSidecar, Upstream, default_config, echo, scaled, until
from harness.servers import RedisCluster, said
from harness.stores import HOLD, OK, REFUSED, RESEND, claim, connected, name, rival, trying

from sidecar.errors import StoreError
from sidecar.message import RecordId
from sidecar.reach import TAG_SLOTS, TAGS
from sidecar.record import Completed, Held, Outstanding, Renewal, Reserved, Verdict
from sidecar.store import Claim, Store

FAIL_OVER_S = 15.0
ODD_KEYS = ["{x", "a}b{c", "{}", "}{", "{a}{b}", "*", "?", "[a-z]", "a b", ":", "//", "%7B", "\\", "'\"x", "{00}"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three primaries."""
    made = RedisCluster().start()
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def empty(cluster: RedisCluster) -> None:
    """Nothing stands in it when a test begins."""
    for server in cluster.primaries:
        server.flush()


@pytest.fixture
async def records(cluster: RedisCluster) -> AsyncIterator[Store]:
    """A store on the cluster."""
    async with connected(cluster.url) as made:
        yield made


def at(tag: str) -> Claim:
    """A claim of its own under a tag."""
    one = claim()
    return claim(record=RecordId(tag + one.record[2:]))


async def complete(records: Store, one: Claim) -> Verdict:
    """With an answer."""
    return await records.complete(one, OK, kept=True, refusal=False, ttl_s=60, age_s=1)


async def reserved(records: Store, one: Claim) -> Claim:
    """Reserve and expect to own."""
    found = await records.reserve(one, HOLD)
    assert isinstance(found, Reserved)
    return one.owned(found)


async def test_every_tag_is_served_and_every_key_has_an_expiry(cluster: RedisCluster, records: Store) -> None:
    claims = [at(tag) for tag in TAGS]
    owned = await asyncio.gather(*(reserved(records, one) for one in claims))
    await asyncio.gather(*(complete(records, one) for one in owned))
    found = await asyncio.gather(*(records.reserve(rival(one), HOLD) for one in claims))
    assert all(isinstance(one, Completed) for one in found)
    for server in cluster.primaries:
        names = server.keys()
        assert len(names) > 100, "each node has its share"
        assert [one for one in names if server.command("PTTL", one) == -1] == []


async def test_transitions_are_those_of_one_server(records: Store) -> None:
    first = await reserved(records, claim())
    assert isinstance(await records.reserve(rival(first), HOLD), Outstanding)
    assert await records.renew(first) is Renewal.RENEWED
    assert await records.lose(first, seen=None, ttl_s=60, age_s=1) is Verdict.UNKNOWN
    assert await records.reserve(rival(first), HOLD) == Held("answer-lost", "")
    again = rival(first)
    found = await records.reserve(again, RESEND)
    assert isinstance(found, Reserved)
    again = again.owned(found)
    assert await records.complete(again, REFUSED, kept=True, refusal=True, ttl_s=60, age_s=1) is Verdict.UNKNOWN
    assert await records.release(rival(first)) is Verdict.STALE
    free = await reserved(records, claim())
    assert await records.release(free) is Verdict.RELEASED


async def test_scripts_unknown_to_a_node_are_run_by_their_text(cluster: RedisCluster, records: Store) -> None:
    owned = [await reserved(records, at(tag)) for tag in TAGS[:30]]
    for server in cluster.primaries:
        server.command("SCRIPT", "FLUSH")
    assert {await complete(records, one) for one in owned} == {Verdict.COMPLETED}


async def test_operators_commands_go_to_the_node_of_their_tag(records: Store) -> None:
    for tag in TAGS[:16]:
        one = await reserved(records, at(tag))
        assert await records.read("ZSCORE", tag, "mail:open", one.record) is not None


async def test_check_looks_at_every_primary(cluster: RedisCluster, records: Store) -> None:
    await records.check()
    (everywhere,) = (one for one in records.warnings if "appendfsync" in one)
    assert all(str(server.port) in everywhere for server in cluster.primaries)
    odd = cluster.primaries[1]
    odd.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        await records.check()
        (one,) = (warning for warning in records.warnings if "allkeys-lru" in warning)
        assert str(odd.port) in one
        assert str(cluster.primaries[0].port) not in one
    finally:
        odd.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


@pytest.fixture
def moving(cluster: RedisCluster) -> Iterator[Moving]:
    """A slot that a test moves; afterwards it is where it was."""
    owner, new, _ = cluster.primaries
    made = Moving(cluster, owner, new, next(tag for tag in TAGS if cluster.owner(TAG_SLOTS[tag]) is owner))
    yield made
    for server in cluster.primaries:
        server.flush()
    cluster.end_move(made.slot, owner)


class Moving:
    """One slot on its way from one node to another."""

    def __init__(self, cluster: RedisCluster, owner: RedisServer, new: RedisServer, tag: str) -> None:
        self.cluster, self.owner, self.new, self.tag = cluster, owner, new, tag
        self.slot = TAG_SLOTS[tag]

    def begin(self) -> None:
        """It leaves."""
        self.cluster.begin_move(self.slot, self.new)

    def keys(self) -> int:
        """What is in it goes; how many keys that were."""
        return self.cluster.move_keys(self.slot, self.owner, self.new)

    def end(self) -> None:
        """It has arrived."""
        self.cluster.end_move(self.slot, self.new)


async def test_moved_slot_is_followed(moving: Moving, records: Store) -> None:
    running, done = await reserved(records, at(moving.tag)), await reserved(records, at(moving.tag))
    await complete(records, done)
    moving.begin()
    assert moving.keys() == 4  # two records, two lists
    # All has arrived, and the old owner still says so for each command alone (ASK).
    assert isinstance(await records.reserve(rival(done), HOLD), Completed)
    assert await records.renew(running) is Renewal.RENEWED
    # A new record of this slot meets TRYAGAIN for as long as it moves: the record is absent, the lists are not.
    fresh = asyncio.get_running_loop().create_task(records.reserve(at(moving.tag), HOLD))
    await asyncio.wait([fresh], timeout=0.05)
    assert not fresh.done()
    moving.end()
    assert isinstance(await fresh, Reserved)
    assert await complete(records, running) is Verdict.COMPLETED
    assert isinstance(await records.reserve(rival(running), HOLD), Completed)
    assert moving.new.command("EXISTS", name(running)) == 1


async def test_slot_that_moves_for_too_long_is_the_store_away(cluster: RedisCluster, moving: Moving) -> None:
    async with connected(cluster.url, scaled(0.5)) as records:
        await reserved(records, at(moving.tag))
        moving.begin()
        begin = time.monotonic()
        with pytest.raises(StoreError, match="TRYAGAIN") as caught:
            await records.reserve(at(moving.tag), HOLD)
        assert caught.value.applied is False
        assert time.monotonic() - begin < scaled(1)
        moving.keys()
        moving.end()
        await until(lambda: writes(records, at(moving.tag)))
        await until(lambda: not records.trouble)


async def writes(records: Store, one: Claim) -> bool:
    """Whether a reservation is taken."""
    try:
        return isinstance(await records.reserve(one, HOLD), Reserved)
    except StoreError:
        return False


async def test_slot_that_nobody_serves_is_the_trouble_until_somebody_does(cluster: RedisCluster) -> None:
    owner = cluster.primaries[2]
    tag = next(tag for tag in TAGS if cluster.owner(TAG_SLOTS[tag]) is owner)
    slot = TAG_SLOTS[tag]
    try:
        for server in cluster.primaries:
            server.command("CLUSTER", "DELSLOTS", slot)
        async with trying(cluster.url) as records:
            await until(lambda: f"slot {slot}" in records.trouble or "CLUSTERDOWN" in records.trouble)
            with pytest.raises(StoreError) as caught:
                await records.reserve(at(tag), HOLD)
            assert caught.value.applied is False
            assert "CLUSTERDOWN" in caught.value.reason
            owner.command("CLUSTER", "ADDSLOTS", slot)
            await until(lambda: not records.trouble, FAIL_OVER_S)
            assert isinstance(await records.reserve(at(tag), HOLD), Reserved)
    finally:
        if "cluster_slots_assigned:16384" not in said(owner, "CLUSTER", "INFO"):
            owner.command("CLUSTER", "ADDSLOTS", slot)


async def test_store_starts_from_any_node_that_answers(cluster: RedisCluster) -> None:
    last = cluster.primaries[2]
    async with connected(f"redis+cluster://127.0.0.1:1,{last.host}:{last.port}") as records:
        assert isinstance(await records.reserve(claim(), HOLD), Reserved)


async def test_no_node_that_answers_is_the_trouble() -> None:
    async with trying("redis+cluster://:hunter2@127.0.0.1:1") as records:
        await until(lambda: "127.0.0.1:1" in records.trouble)
        assert "hunter2" not in records.trouble
        with pytest.raises(StoreError) as caught:
            await records.reserve(claim(), HOLD)
        assert caught.value.applied is False


async def test_hundred_keys_twice_through_the_sidecar(
    sidecar: StartSidecar, upstream: Upstream, cluster: RedisCluster
) -> None:
    upstream.default = echo()
    one = await sidecar(default_config(upstream, cluster.url))
    keys = [*(f"K{number}" for number in range(100 - len(ODD_KEYS))), *ODD_KEYS]

    async def send(number: int) -> tuple[int, bytes, bool]:
        quoted = '"' + keys[number].replace("\\", "\\\\").replace('"', '\\"') + '"'
        given = await one.send(quoted, b"%d" % number)
        return given.status, given.content, given.replayed

    assert len(set(keys)) == 100
    first = await asyncio.gather(*(send(number) for number in range(100)))
    assert first == [(200, b"%d" % number, False) for number in range(100)]
    again = await asyncio.gather(*(send(number) for number in range(100)))
    assert again == [(200, b"%d" % number, True) for number in range(100)]
    assert upstream.count == 100
    assert b"{x" not in b" ".join(cluster.keys())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_node_that_dies_is_replaced_without_a_restart(how: str) -> None:
    cluster = RedisCluster(replicas=1).start()
    try:
        async with connected(cluster.url, scaled(0.5), replicas=1) as records:
            owned = {tag: await reserved(records, at(tag)) for tag in TAGS[::8]}
            dead = cluster.primaries[0]
            lost = next(tag for tag in owned if cluster.owner(TAG_SLOTS[tag]) is dead)
            kept = next(tag for tag in owned if cluster.owner(TAG_SLOTS[tag]) is not dead)
            dead.kill() if how == "kill" else dead.pause()
            # The other nodes serve at once; that one's records once its replica was promoted.
            assert await complete(records, owned[kept]) is Verdict.COMPLETED

            async def completed() -> bool:
                try:
                    return await complete(records, owned[lost]) is Verdict.COMPLETED
                except StoreError:
                    return False

            await until(completed, FAIL_OVER_S)
            for one in owned.values():
                assert await complete(records, one) is Verdict.COMPLETED
            await until(lambda: not records.trouble, FAIL_OVER_S)
            if how == "pause":
                dead.resume()
                for one in owned.values():
                    assert isinstance(await records.reserve(rival(one), HOLD), Completed)
    finally:
        cluster.remove()
