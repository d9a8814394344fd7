"""A fail-over under the real program while mails are in flight: some are refused for seconds, none is sent twice."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from harness import NoAnswerError, Sidecar, StartSidecar, Upstream, default_config, duration, gate, slow, until
from harness.servers import RedisCluster, Replicated, Sentinels, follows, leads, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FAIL_OVER_S = 20.0
# What a client may be told while the store changes hands; a 200 is always told.
ALLOWED = {200, 409, 503, 504}


@dataclass
class Clients:
    """Clients that send one mail after another, each until it is answered 200 or nobody knows, at either sidecar."""

    sidecars: list[Sidecar]
    statuses: dict[str, list[int]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    stopped: bool = False

    async def run(self, which: int) -> None:
        """One client."""
        while not self.stopped:
            key = f"K{next(self.numbers)}"
            self.statuses[key] = []
            for sidecar in itertools.islice(itertools.cycle(self.sidecars[which:] + self.sidecars[:which]), 40):
                status = (await sidecar.send(key, deadline_s=10)).status
                self.statuses[key].append(status)
                if status in (200, 504) or self.stopped:
                    break
                await asyncio.sleep(0.05)

    def answered(self, status: int) -> int:
        """How many answers had this status."""
        return sum(told.count(status) for told in self.statuses.values())


def judge(clients: Clients, upstream: Upstream) -> None:
    """No key reached the upstream twice, every 200 is of one that did, and nothing else was told than is allowed."""
    sent = Counter((one.first("idempotency-key") or b"").decode() for one in upstream.requests)
    assert [key for key, count in sent.items() if count > 1] == []
    told = {status for statuses in clients.statuses.values() for status in statuses}
    assert told <= ALLOWED, told
    assert [key for key, statuses in clients.statuses.items() if 200 in statuses and not sent[key]] == []
    print({status: clients.answered(status) for status in sorted(told)}, f"{upstream.count} sent")


async def all_fine_again(clients: Clients) -> None:
    """Fifty mails in a row are answered 200, without a restart."""

    async def fine() -> bool:
        before = {status: clients.answered(status) for status in ALLOWED}
        await until(lambda: clients.answered(200) >= before[200] + 50, FAIL_OVER_S)
        return all(clients.answered(status) == before[status] for status in ALLOWED - {200})

    await until(fine, FAIL_OVER_S)


async def run(sidecar: StartSidecar, upstream: Upstream, url: str, fault: object, *, replicas: int = 1) -> Clients:
    """Two sidecars and six clients through a fault, and until all is well again."""
    upstream.default = slow(0.02)
    settings = default_config(upstream, url)
    settings["store"] |= {"replicas": replicas, "timeout": duration(0.5)}
    clients = Clients([await sidecar(settings), await sidecar(settings)])
    tasks = [asyncio.get_running_loop().create_task(clients.run(number % 2)) for number in range(6)]
    try:
        await until(lambda: clients.answered(200) > 50)
        await asyncio.to_thread(fault)  # type: ignore[arg-type]
        await all_fine_again(clients)
    finally:
        clients.stopped = True
        await asyncio.gather(*tasks)
    judge(clients, upstream)
    return clients


async def every_key_again(clients: Clients, upstream: Upstream) -> None:
    """Each key once more at each sidecar: replayed, or nobody knows; nothing is sent."""
    sent = {one.first("idempotency-key") for one in upstream.requests}
    known = [key for key in clients.statuses if key.encode() in sent]
    for one in clients.sidecars:
        for key in known:
            given = await one.send(key)
            assert given.replayed or given.status in (409, 504), (key, given)
    judge(clients, upstream)


@pytest.fixture
def watched() -> Iterator[Sentinels]:
    """A primary, a replica and three sentinels."""
    servers = Replicated().start()
    sentinels = Sentinels(servers).start()
    yield sentinels
    sentinels.remove()
    servers.remove()


@pytest.mark.parametrize("how", ["kill", "pause", "pause-short"])
async def test_no_key_is_sent_twice_over_a_fail_over(
    sidecar: StartSidecar, upstream: Upstream, watched: Sentinels, how: str
) -> None:
    old, new = watched.watched.servers

    def fault() -> None:
        if how == "kill":
            old.kill()
            wait(lambda: watched.primary() is new, FAIL_OVER_S)
            old.start()  # as somebody's unit file would; the sentinels make a replica of it
            return
        old.pause()
        wait(lambda: watched.primary() is new, FAIL_OVER_S)
        if how == "pause":
            wait(lambda: leads(new))
        old.resume()  # it takes writes until somebody tells it; nobody of them holds a replica's word

    clients = await run(sidecar, upstream, watched.url, fault)
    wait(lambda: not leads(old), FAIL_OVER_S)
    await every_key_again(clients, upstream)


async def test_no_key_is_sent_twice_over_planned_fail_overs(
    sidecar: StartSidecar, upstream: Upstream, watched: Sentinels
) -> None:
    def there_and_back() -> None:
        for target in (watched.watched.replicas[0], watched.watched.primary):
            wait(lambda: watched.servers[0].command("SENTINEL", "FAILOVER", "main") == b"OK", FAIL_OVER_S)
            wait(partial(leads, target), FAIL_OVER_S)
            wait(partial(follows, next(one for one in watched.watched.servers if one is not target)), FAIL_OVER_S)

    clients = await run(sidecar, upstream, watched.url, there_and_back)
    await every_key_again(clients, upstream)


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_no_key_is_sent_twice_when_a_node_of_a_cluster_dies(
    sidecar: StartSidecar, upstream: Upstream, how: str
) -> None:
    cluster = RedisCluster(replicas=1).start()
    dead, heir = cluster.servers[0], cluster.servers[3]

    def fault() -> None:
        dead.kill() if how == "kill" else dead.pause()
        wait(lambda: leads(heir), FAIL_OVER_S)
        dead.start() if how == "kill" else dead.resume()

    try:
        clients = await run(sidecar, upstream, cluster.url, fault)
        await every_key_again(clients, upstream)
    finally:
        cluster.remove()


async def test_replica_that_is_gone_refuses_mails_and_releases_every_key(
    sidecar: StartSidecar, upstream: Upstream
) -> None:
    servers = Replicated().start()
    (replica,) = servers.replicas
    settings = default_config(upstream, servers.primary.url)
    settings["store"] |= {"replicas": 1, "timeout": duration(0.3)}
    try:
        one = await sidecar(settings)
        assert (await one.send("K1")).status == 200
        replica.pause()
        for key in ("K2", "K3"):
            given = await one.send(key)
            assert (given.status, given.slug, given.json()["sent"]) == (503, "store-unavailable", "no")
        assert (await one.send("K1")).replayed
        assert upstream.count == 1
        # Taken back at the primary, where it had been granted.
        await until(lambda: len(re.findall(r":[0-9a-f]{40}'", str(servers.primary.keys()))) == 1)
        replica.resume()
        for key in ("K2", "K3"):

            async def sent(key: str = key) -> bool:
                return (await one.send(key)).status == 200

            await until(sent)
        assert upstream.count == 3
        await one.close()
    finally:
        servers.remove()


async def test_mail_under_way_ends_though_its_primary_is_replaced(
    sidecar: StartSidecar, upstream: Upstream, watched: Sentinels
) -> None:
    opened = asyncio.Event()
    upstream.script(gate(opened))
    settings = default_config(upstream, watched.url)
    settings["store"] |= {"replicas": 1, "timeout": duration(0.5)}
    settings["routes"]["mail"]["timeout"]["total"] = duration(20)
    settings["routes"]["mail"]["ttl"] = duration(120)
    one, other = await sidecar(settings), await sidecar(settings)
    asked = asyncio.get_running_loop().create_task(one.send("K1", deadline_s=30))
    await upstream.reached(1)
    await asyncio.to_thread(watched.watched.primary.kill)

    async def told() -> bool:
        try:
            return (await other.send("K1")).status in (409, 504)
        except NoAnswerError:
            return False

    await until(told, FAIL_OVER_S)
    opened.set()
    first = await asked
    assert first.status == 200

    async def replayed() -> bool:
        return (await other.send("K1")).replayed

    await until(replayed, FAIL_OVER_S)
    assert upstream.count == 1
