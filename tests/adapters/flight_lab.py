"""The flights of one process over a store of their own, and looks at what the server holds then."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness import RedisServer, scaled
from harness.stores import HOLD, OK, claim, connected, name

from sidecar import config
from sidecar.config import LogFormat
from sidecar.flights import Flight, Flights, LastWord
from sidecar.logline import Log
from sidecar.metrics import Metrics
from sidecar.store import Claim, Store

LEASE_S = scaled(0.3)
TIMEOUT_S = scaled(0.2)


class Lab(Flights):
    """The flights of a process, with their log, metrics and store at hand."""

    def __init__(self, store: Store) -> None:
        self.stream = io.StringIO()
        self.metrics = Metrics()
        self.store = store
        super().__init__(store, metrics=self.metrics, log=Log(config.Log(format=LogFormat.TEXT), self.stream))

    async def fly(self, one: Claim | None = None, *, ttl_s: float = 3600) -> Flight:
        """A flight that was granted."""
        got = await self.reserve(one or claim(lease_s=LEASE_S), HOLD, ttl_s=ttl_s)
        assert isinstance(got, Flight)
        return got

    def release(self, flight: Flight) -> LastWord:
        return lambda _age_s: self.store.release(flight.claim)

    def complete(self, flight: Flight) -> LastWord:
        return lambda age_s: self.store.complete(
            flight.claim, OK, kept=True, refusal=False, ttl_s=flight.ttl_s, age_s=age_s
        )

    def lose(self, flight: Flight) -> LastWord:
        return lambda age_s: self.store.lose(flight.claim, seen=None, ttl_s=flight.ttl_s, age_s=age_s)


@asynccontextmanager
async def lab_on(url: str, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Lab]:
    """Flights over a store of their own connections. `timeout_s`: longer where no fault is to be waited for."""
    async with connected(url, timeout_s) as store:
        lab = Lab(store)
        lab.start()
        try:
            yield lab
        finally:
            await lab.close()


def field(server: RedisServer, one: Claim, of: str) -> bytes | None:
    value = server.command("HGET", name(one), of)
    assert value is None or isinstance(value, bytes)
    return value


def state(server: RedisServer, one: Claim) -> bytes | None:
    return field(server, one, "state")


def calls(server: RedisServer, command: str) -> int:
    """How often the server ran a command, those of scripts included."""
    stats = server.command("INFO", "commandstats")
    assert isinstance(stats, bytes)
    line = next((line for line in stats.decode().splitlines() if line.startswith(f"cmdstat_{command}:")), ":calls=0,")
    return int(line.split("calls=")[1].split(",")[0])


def records(server: RedisServer) -> list[bytes]:
    """The names of all records, without the lists."""
    names = server.keys()
    return [key for key in names if not key.endswith((b":open", b":done"))]
