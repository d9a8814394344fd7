"""The faults from outside: processes that end or freeze, a store that goes away, connections that break."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from harness import RedisServer, Sidecar, StoreProxy, Upstream

from storm.history import Fault, History
from storm.mix import LEASE_S, STORE_TIMEOUT_S, Mix, draw, some_s, source
from storm.provider import Provider


class Faults:
    """Makes faults until it is cancelled; whatever it has begun it mends, also then."""

    def __init__(
        self,
        sidecars: Sequence[Sidecar],
        fronts: Sequence[StoreProxy],
        store: RedisServer,
        provider: Provider,
        history: History,
        mix: Mix,
        seed: int,
    ) -> None:
        """`fronts`: one before the store for each sidecar."""
        self.exits = Counter[int]()
        self._sidecars = sidecars
        self._fronts = fronts
        self._store = store
        self._provider = provider
        self._upstream: Upstream = provider.upstream
        self._history = history
        self._mix = mix
        self._rng = source(seed, "faults")
        # One fault at a time on one sidecar, one on the store, one on the upstream; those of different ones overlap.
        self._busy = [asyncio.Lock() for _ in sidecars]
        self._store_busy = asyncio.Lock()
        self._upstream_busy = asyncio.Lock()
        self._front_busy = [asyncio.Lock() for _ in sidecars]
        self.store_up = True

    async def run(self, until_s: float) -> None:
        """Fault after fault until `until_s` by the loop's clock; returns once all of them are over."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while loop.time() < until_s:
                kind = draw(self._rng, self._mix.faults)
                number = self._rng.randrange(len(self._sidecars))
                group.create_task(self._make(kind, number, random.Random(self._rng.random())))
                await asyncio.sleep(some_s(self._rng, 0.05, self._mix.pause_s))

    async def _make(self, kind: str, number: int, rng: random.Random) -> None:
        lock, make = self._table(kind, number)
        if lock.locked():
            return
        async with lock:
            ours = kind.startswith(("store-", "upstream-"))
            fault = Fault(kind, -1 if ours else number, asyncio.get_running_loop().time())
            self._history.faults.append(fault)
            try:
                made = await make(rng)
                fault.code = made if isinstance(made, int) else None
            finally:
                fault.end_s = asyncio.get_running_loop().time()

    def _table(self, kind: str, number: int) -> tuple[asyncio.Lock, Callable[[random.Random], Awaitable[object]]]:
        one, front = self._sidecars[number], self._fronts[number]
        if kind.startswith("front-"):
            made = {
                "front-cut": lambda rng: _now(front.cut),
                "front-freeze": lambda rng: self._while(rng, front.freeze, front.thaw),
                "front-delay": lambda rng: self._delay(front, rng),
                "front-deaf": lambda rng: self._deaf(front, rng),
                "front-loses": lambda rng: _now(lambda: front.lose_reply(b"EVALSHA")),
            }
            return self._front_busy[number], made[kind]
        if kind.startswith("store-"):
            stored = {"store-kill": self._kill_store, "store-pause": self._pause_store}
            return self._store_busy, stored[kind]
        if kind.startswith("upstream-"):
            far = {
                "upstream-refuses": self._refuse,
                "upstream-resets": self._reset,
                "upstream-drops": lambda rng: self._upstream.drop(),
            }
            return self._upstream_busy, far[kind]
        ends = {
            "kill": lambda rng: self._end(one, rng, signal.SIGKILL),
            "term": lambda rng: self._end(one, rng, signal.SIGTERM),
            "now": lambda rng: self._end(one, rng, signal.SIGTERM, signal.SIGTERM),
            "stop": lambda rng: self._while(rng, one.pause, one.resume),
            "doze": lambda rng: self._doze(one, front, rng),
        }
        return self._busy[number], ends[kind]

    def _some_s(self, rng: random.Random, low_s: float) -> float:
        """How long a fault lasts: shorter than a lease, or longer."""
        short = rng.random() < self._mix.short
        return some_s(rng, low_s, LEASE_S) if short else some_s(rng, LEASE_S, self._mix.fault_s)

    async def _while(self, rng: random.Random, begin: Callable[[], None], end: Callable[[], None]) -> None:
        begin()
        try:
            await asyncio.sleep(self._some_s(rng, 0.1))
        finally:
            end()

    # Sidecars.

    async def _end(self, one: Sidecar, rng: random.Random, *signals: signal.Signals) -> int:
        for number, sent in enumerate(signals):
            if number:
                await asyncio.sleep(some_s(rng, 0.0, 0.4))
            with suppress(ProcessLookupError):
                one.send_signal(sent)
        asked = " and ".join(it.name for it in signals)
        try:
            code = await one.wait_exit()
        except AssertionError:
            self._history.faults_of_ours.append(f"did not end after {asked}")
            await one.kill()
            code = -signal.SIGKILL
        self.exits[code] += 1
        # A process that has not begun to listen, or has just ended, has no handler for SIGTERM.
        if code not in ((-9,) if signal.SIGKILL in signals else (0, 1, -15)):
            self._history.faults_of_ours.append(f"exit code {code} after {asked}")
        await asyncio.sleep(some_s(rng, 0.0, 0.5))
        await one.run(ready=False)
        # Until it serves it is no target; while the store is away it may not be ready for long.
        with suppress(AssertionError, TimeoutError):
            await one.ready(4.0)
        return code

    async def _doze(self, one: Sidecar, front: StoreProxy, rng: random.Random) -> None:
        front.freeze()
        await asyncio.sleep(some_s(rng, 0.01, STORE_TIMEOUT_S / 2))
        one.pause()
        front.thaw()
        try:
            await asyncio.sleep(some_s(rng, 0.5 * STORE_TIMEOUT_S, 2 * STORE_TIMEOUT_S))
        finally:
            one.resume()

    # The store, and what is before it.

    async def _kill_store(self, rng: random.Random) -> None:
        self.store_up = False
        await asyncio.to_thread(self._store.kill)
        await asyncio.sleep(some_s(rng, 0.0, 1.0))
        await asyncio.to_thread(self._store.start)
        self.store_up = True

    async def _pause_store(self, rng: random.Random) -> None:
        self.store_up = False
        await self._while(rng, self._store.pause, self._store.resume)
        self.store_up = True

    async def _delay(self, front: StoreProxy, rng: random.Random) -> None:
        front.delay_s = rng.uniform(0.02, 0.4)
        await asyncio.sleep(self._some_s(rng, 0.3))
        front.delay_s = 0.0

    async def _deaf(self, front: StoreProxy, rng: random.Random) -> None:
        front.drop_replies = True
        await asyncio.sleep(some_s(rng, 0.1, LEASE_S))
        front.cut()  # what lost a reply and stands would be out of step, and no network does that
        front.drop_replies = False

    # The upstream.

    async def _refuse(self, rng: random.Random) -> None:
        await self._upstream.refuse()
        await asyncio.sleep(some_s(rng, 0.1, 0.8))
        await self._upstream.accept()

    async def _reset(self, rng: random.Random) -> None:
        self._provider.resets = True
        await asyncio.sleep(some_s(rng, 0.05, 0.4))
        self._provider.resets = False


async def _now(act: Callable[[], None]) -> None:
    act()
