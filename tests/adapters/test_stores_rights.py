"""The account with the least rights, as docs/stores.md lists it: everything works with them, and each one is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RedisServer, until
from harness.servers import RedisCluster, Replicated, Sentinels
from harness.stores import HOLD, OK, REFUSED, RESEND, claim, connected, rival, trying
from harness.waiting import scaled

from sidecar.errors import StartError, StoreError
from sidecar.ledger import Ledger, nobody
from sidecar.node import Line
from sidecar.record import Completed, Held, Renewal, Reserved, Verdict
from sidecar.store import Store

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "stores.md"
TEXT = DOCUMENT.read_text("utf-8")


def rights(title: str) -> list[str]:
    """The rules of one listing of the document."""
    found = re.search(rf"<!-- rights: {title} -->\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert found, title
    return found[1].replace("\\\n", " ").split()


LEAST = rights("least")
EXTRA = {name: rights(name) for name in ("checks", "replicas", "cluster", "database")}
SENTINELS = rights("sentinels")


def give(server: RedisServer, rules: list[str]) -> None:
    """Make the account, with a password."""
    server.command("ACL", "SETUSER", "sidecar", "reset", "on", ">secret", *rules)


def with_account(url: str) -> str:
    """The URL with that account."""
    return url.replace("//", "//sidecar:secret@", 1)


async def everything(records: Store) -> None:
    """Each script, in each way that writes or reads something of its own, and what the operator asks."""
    one = claim()
    found = await records.reserve(one, HOLD)
    assert isinstance(found, Reserved)
    one = one.owned(found)
    assert await records.renew(one, confirmed=True) is Renewal.RENEWED
    assert await records.lose(one, seen=200, ttl_s=60, age_s=1) is Verdict.UNKNOWN
    assert isinstance(await records.reserve(rival(one), HOLD), Held)
    again = rival(one)
    found = await records.reserve(again, RESEND)
    assert isinstance(found, Reserved)
    again = again.owned(found)
    assert await records.complete(again, REFUSED, kept=True, refusal=True, ttl_s=60, age_s=1) is Verdict.UNKNOWN
    assert await records.complete(one, OK, kept=True, refusal=False, ttl_s=60, age_s=1) is Verdict.COMPLETED
    assert isinstance(await records.reserve(rival(one), HOLD), Completed)
    free = claim()
    await records.reserve(free, HOLD)
    assert await records.release(free) is Verdict.RELEASED
    await operators(records)


async def takes_writes_again(records: Store) -> None:
    """The write that a refusal is followed by, until it is taken."""
    ((_, node), *_) = records._nodes.primaries()
    node.refused = "OOM"
    await until(lambda: not node.refused, 3)


async def operators(records: Store) -> None:
    """Lists, look-ups, and settling."""
    ledger, one = Ledger(records), claim()
    await records.reserve(one, HOLD)
    await records.lose(one, seen=None, ttl_s=60, age_s=1)
    assert await ledger.show(one.record, content=True) is not None
    assert await ledger.holds(one.record, "mail")
    assert await ledger.newest(one.record[:2], "mail", "open", most_ms=None, least_ms=0, skip=0, count=5)
    assert (await ledger.find(one.record[:2], "mail", "open", b"K1", skip=0, count=5))[1]
    said = nobody(one.record, route="mail", token=b"operator", lease_s=15, hold_for_s=600)
    await ledger.sent(said, None, status=200, provider_id="", ttl_s=60, forced=True)
    await ledger.forget(said)
    await records.reserve(one, HOLD)
    await records.lose(one, seen=None, ttl_s=60, age_s=1)
    await ledger.not_sent(said, quiet_s=0, forced=True)


async def test_least_rights_are_enough_for_one_server(private_store: RedisServer) -> None:
    give(private_store, LEAST)
    async with connected(with_account(private_store.url)) as records:
        await everything(records)
        private_store.command("SCRIPT", "FLUSH")
        await everything(records)
        await takes_writes_again(records)
        assert log(private_store) == []
        await records.check()
        assert records.warnings == ()


def log(server: RedisServer) -> list[str]:
    """What the server refused."""
    entries = server.command("ACL", "LOG")
    assert isinstance(entries, list)
    told = []
    for entry in entries:
        assert isinstance(entry, list)
        fields = dict(zip(entry[::2], entry[1::2], strict=True))
        told.append(bytes(fields[b"object"]).decode())  # type: ignore[arg-type]
    return told


async def a_whole_life(records: Store) -> None:
    """From the first connection on."""
    await until(lambda: not records.trouble, 0.5)
    await records.check()
    await everything(records)
    await takes_writes_again(records)


@pytest.mark.slow
@pytest.mark.parametrize("right", [rule for rule in LEAST if rule.startswith("+")])
async def test_each_of_the_least_rights_is_needed_or_said_to_be_missed(private_store: RedisServer, right: str) -> None:
    give(private_store, [rule for rule in LEAST if rule != right])
    async with trying(with_account(private_store.url), scaled(0.3)) as records:
        if f"without `{right}`" in TEXT:
            await until(lambda: not records.trouble)
            await everything(records)
            assert set(log(private_store)) == {right.removeprefix("+")}
            return
        with pytest.raises((AssertionError, StartError, StoreError)) as caught:
            await a_whole_life(records)
        assert not isinstance(caught.value, StartError) or right in ("+eval", "+evalsha")


async def test_checks_say_everything_with_the_rights_for_them(private_store: RedisServer) -> None:
    give(private_store, [*LEAST, *EXTRA["checks"]])
    private_store.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    async with connected(with_account(private_store.url)) as records:
        await records.check()
        assert any("allkeys-lru" in warning for warning in records.warnings)
        assert any("appendfsync" in warning for warning in records.warnings)
    assert log(private_store) == []


async def test_database_needs_a_right_of_its_own(private_store: RedisServer) -> None:
    give(private_store, [*LEAST, *EXTRA["database"]])
    url = with_account(private_store.url).removesuffix("/0") + "/3"
    async with connected(url) as records:
        await everything(records)


async def test_replicas_need_a_right_of_their_own() -> None:
    servers = Replicated().start()
    try:
        give(servers.primary, [*LEAST, *EXTRA["replicas"]])
        async with connected(with_account(servers.primary.url), replicas=1) as records:
            await everything(records)
    finally:
        servers.remove()


@pytest.mark.slow
async def test_cluster_needs_rights_of_its_own() -> None:
    cluster = RedisCluster().start()
    try:
        for server in cluster.servers:
            give(server, [*LEAST, *EXTRA["cluster"]])
        async with connected(with_account(cluster.url)) as records:
            for _ in range(8):  # of as many tags
                await everything(records)
            await takes_writes_again(records)
    finally:
        cluster.remove()


@pytest.fixture
def watched() -> Iterator[Sentinels]:
    """A primary, a replica and three sentinels."""
    servers = Replicated().start()
    sentinels = Sentinels(servers).start()
    yield sentinels
    sentinels.remove()
    servers.remove()


@pytest.mark.slow
async def test_sentinels_need_one_right_and_their_primary_one_more(watched: Sentinels) -> None:
    for sentinel in watched.servers:
        sentinel.command("ACL", "SETUSER", "asker", "reset", "on", ">asks", *SENTINELS)
    for server in watched.watched.servers:
        give(server, [*LEAST, *EXTRA["replicas"]])
    url = f"{with_account(watched.url)}?sentinel_user=asker&sentinel_password=asks"
    async with connected(url, replicas=1) as records:
        await everything(records)
        ((_, node),) = records._nodes.primaries()
        assert not node.link(Line.ASKING).trouble
    give(watched.watched.primary, [rule for rule in LEAST if rule != "+role"])
    async with trying(url) as records:
        await until(lambda: "ROLE" in records.trouble)


async def test_foreign_names_are_out_of_reach(private_store: RedisServer) -> None:
    give(private_store, LEAST)
    async with trying(with_account(private_store.url), prefix="other") as records:
        await until(lambda: not records.trouble)
        with pytest.raises(StoreError, match=r"(?i)no permission|NOPERM"):
            await records.reserve(claim(), HOLD)
