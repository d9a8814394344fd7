"""Two sidecars on one store behind a balancer that follows /readyz: restarted in turn, under load, unnoticed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from balancer import Balancer
from harness import Client, Parsed, duration, request, scaled, slow, until
from lab import FIELDS, Lab, fresh, times

pytest_plugins = ("lab_fixtures",)

WORKERS = 24


@dataclass(slots=True)
class Load:
    """Applications that send through the balancer until `over`; each mail twice, its retry perhaps elsewhere."""

    base: str
    over: bool = False
    answers: list[tuple[str, Parsed]] = field(default_factory=list)

    async def run(self) -> None:
        """Raises: whatever one of them meets."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._application())

    async def more(self, count: int) -> None:
        """Wait until so many more answers have come."""
        enough = len(self.answers) + count
        await until(lambda: len(self.answers) >= enough, 20)

    async def _application(self) -> None:
        async with await Client.open(self.base) as client:
            while not self.over:
                key = fresh()
                data = request(content=b'{"n":"%b"}' % key.encode(), fields=FIELDS, key=key)
                for _ in range(2):
                    self.answers.append((key, await client.ask(data)))


@pytest.fixture
async def two(lab: Lab) -> Lab:
    """Two sidecars with a drain of several looks of the balancer; an upstream that takes its time."""
    lab.upstream.default = slow(0.02)
    for _ in range(2):
        # Times that a busy machine keeps: this is about hand-overs, not about a slow store.
        route = lab.route(lease=duration(4), timeout=times(total_s=3))
        await lab.sidecar({"mail": route}, drain=duration(0.6), store={"timeout": duration(1)}, ready=False)
    await asyncio.gather(lab.one.ready(), lab.two.ready())
    return lab


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.case("C335", "C336")
async def test_rolling_restart_fails_no_request_and_sends_nothing_twice(two: Lab) -> None:
    balancer = await Balancer.start(two.sidecars)
    load = Load(balancer.base)
    running = asyncio.create_task(load.run())
    try:
        for backend in balancer.backends * 2:
            await load.more(100)
            begin_s = time.monotonic()
            assert await backend.sidecar.stop() == 0
            assert time.monotonic() - begin_s > scaled(0.5)
            await backend.sidecar.run()
            await balancer.until_ready(backend)
        await load.more(100)
    finally:
        load.over = True
        await running
        await balancer.stop()
    assert balancer.failed == []
    assert Counter((got.status, got.slug) for _, got in load.answers) == {(200, ""): len(load.answers)}
    by_key: dict[str, set[bytes]] = {}
    for key, got in load.answers:
        by_key.setdefault(key, set()).add(got.content)
    assert [key for key, contents in by_key.items() if len(contents) > 1] == []
    sent = Counter(one.first("idempotency-key") for one in two.upstream.requests)
    assert (max(sent.values()), len(sent)) == (1, len(by_key))
    assert all(backend.served > 100 for backend in balancer.backends)
    assert [line for one in two.sidecars for line in one.log_lines(level="error")] == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.case("C337")
async def test_killed_sidecar_costs_only_what_it_had_in_hand_and_nothing_is_sent_twice(two: Lab) -> None:
    balancer = await Balancer.start(two.sidecars)
    load = Load(balancer.base)
    running = asyncio.create_task(load.run())
    try:
        await load.more(200)
        await two.one.kill()
        await until(lambda: not balancer.backends[0].ready)
        await load.more(300)
    finally:
        load.over = True
        await running
        await balancer.stop()
    # What the balancer cannot know: requests on connections that ended under it. Their retry is told the truth.
    statuses = Counter(got.status for _, got in load.answers)
    assert set(statuses) <= {200, 502, 504, 409}
    assert statuses[502] <= 2 * WORKERS
    assert statuses[409] + statuses[504] <= 2 * WORKERS
    assert max(Counter(one.first("idempotency-key") for one in two.upstream.requests).values()) == 1


@pytest.mark.case("C338")
async def test_balancer_asks_another_one_only_where_connecting_failed(two: Lab) -> None:
    """The judge is judged: a balancer that repeated more would hide what the others have to show."""
    balancer = await Balancer.start(two.sidecars)
    try:
        keys = [fresh() for _ in range(4)]
        data = [request(fields=FIELDS, content=b"{}", key=key) for key in keys]
        async with await Client.open(balancer.base) as client:
            assert [(await client.ask(one)).status for one in data[:2]] == [200, 200]
            two.upstream.script(slow(1.0), slow(1.0))
            others = [await Client.open(balancer.base) for _ in range(2)]
            for other, one in zip(others, data[2:], strict=True):
                await other.send(one)
            await until(lambda: two.upstream.count == 4)
            await two.one.kill()
            statuses = sorted([(await other.answer()).status for other in others])
            assert (statuses, len(balancer.failed), two.upstream.count) == ([200, 502], 1, 4)
            # Where nobody listens, the other one is asked at once, whatever the last look said.
            balancer.backends[0].ready = True
            again = [(await client.ask(one)).status for one in data[:2] * 2]
            assert (again, len(balancer.failed), two.upstream.count) == ([200] * 4, 1, 4)
            for other in others:
                other.close()
    finally:
        await balancer.stop()
