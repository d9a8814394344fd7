"""Fixtures that every test may use, all of them real: `upstream`, `store`, `sidecar`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import RedisServer, Sidecar, StartSidecar, StoreProxy, Upstream, default_config

SIDECARS = pytest.StashKey[list[Sidecar]]()
LOG_LINES_SHOWN = 200


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """A scripted upstream that answers 200."""
    started = await Upstream.start()
    yield started
    await started.stop()


@pytest.fixture(scope="session")
def session_store() -> Iterator[RedisServer]:
    """The server that `store` empties for each test. Settings, pauses and kills belong on one from `private_store`."""
    server = RedisServer().start()
    yield server
    server.remove()


@pytest.fixture
def store(session_store: RedisServer) -> RedisServer:
    """A running, empty store."""
    session_store.flush()
    return session_store


@pytest.fixture
def private_store() -> Iterator[RedisServer]:
    """A store of this test alone, for faults; it runs already."""
    server = RedisServer().start()
    yield server
    server.remove()


@pytest.fixture
async def front(private_store: RedisServer) -> AsyncIterator[StoreProxy]:
    """A front before `private_store`."""
    proxy = await StoreProxy.start(private_store)
    yield proxy
    await proxy.stop()


@pytest.fixture
async def sidecar(
    request: pytest.FixtureRequest, tmp_path: Path, upstream: Upstream, store: RedisServer
) -> AsyncIterator[StartSidecar]:
    """Starts sidecars: `await sidecar()`, `await sidecar(lease="2s")`, `await sidecar(config)`. Ends them all."""
    started = request.node.stash.setdefault(SIDECARS, [])

    async def start(
        config: dict[str, Any] | str | None = None,
        *,
        store: str | None = None,
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        **changes: object,
    ) -> Sidecar:
        if config is None:
            config = default_config(upstream, store or shared_url, **changes)
        one = Sidecar(tmp_path / f"sidecar-{len(started) + 1}", config, env)
        started.append(one)
        await one.run(ready=ready)
        return one

    shared_url = store.url
    yield start
    for one in started:
        await one.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the log of every sidecar of a failed test."""
    report = yield
    if report.failed:
        started: list[Sidecar] = item.stash.get(SIDECARS, [])
        for number, one in enumerate(started, 1):
            tail = "\n".join(one.log().splitlines()[-LOG_LINES_SHOWN:])
            report.sections.append((f"log of sidecar {number} ({one.base})", tail))
    return report
