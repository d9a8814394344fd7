"""The fixtures of `ledger_lab.py`: a module that wants them says `pytest_plugins = ("ledger_fixtures",)`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import pytest
from harness import RedisServer
from harness.stores import connected
from ledger_lab import ROUTES

from sidecar import config
from sidecar.flights import Flights
from sidecar.ledger import Ledger
from sidecar.logline import Log
from sidecar.metrics import Metrics
from sidecar.records import Records
from sidecar.store import Store


@pytest.fixture
async def records(store: RedisServer) -> AsyncIterator[Store]:
    """The store under test."""
    async with connected(store.url) as made:
        yield made


@pytest.fixture
def flights(records: Store) -> Flights:
    """This process's own flights: none."""
    return Flights(records, metrics=Metrics(), log=Log(config.Log()))


@pytest.fixture
def desk(records: Store, flights: Flights) -> Records:
    """What is tested."""
    return Records(Ledger(records), flights, routes=lambda: ROUTES, wall_ms=lambda: time.time_ns() // 1_000_000)


@pytest.fixture
def every_key_expires(store: RedisServer) -> Iterator[None]:
    """After each test: no key without an expiry, lists included."""
    yield
    names = store.keys()
    assert [key for key in names if store.command("PTTL", key) == -1] == []
