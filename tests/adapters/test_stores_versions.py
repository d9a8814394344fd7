"""Every transition of `test_store.py` on every other server that can be had, and a cluster and a replica of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_store
from harness import RedisServer
from harness.fetched import SOURCES, fetched
from harness.servers import RedisCluster, Replicated
from harness.stores import HOLD, claim, connected, name

from sidecar.record import Reserved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=sorted(SOURCES))
def version(request: pytest.FixtureRequest) -> str:
    """The name of a server."""
    return str(request.param)


@pytest.fixture(scope="module")
def running(version: str) -> Iterator[RedisServer]:
    """One server of that version."""
    server = RedisServer(executable=fetched(version)).start()
    yield server
    server.remove()


@pytest.fixture
def store(running: RedisServer) -> RedisServer:
    """It, empty."""
    running.flush()
    return running


@pytest.fixture
def private_store(version: str) -> Iterator[RedisServer]:
    """One of that version for one test alone."""
    server = RedisServer(executable=fetched(version)).start()
    yield server
    server.remove()


# The fixtures and the tests of the table, with the servers above.
for _name, _thing in vars(test_store).items():
    if _name.startswith("test_") or _name in ("records", "every_key_expires"):
        globals()[_name] = _thing


async def test_version_is_the_one_that_was_asked_for(version: str, store: RedisServer) -> None:
    told = store.command("INFO", "server")
    assert isinstance(told, bytes)
    family, number = version.split("-")
    field = "valkey_version" if family == "valkey" else "redis_version"
    assert f"{field}:{number}." in told.decode()


async def test_check_at_start_accepts_it(store: RedisServer) -> None:
    async with connected(store.url) as records:
        await records.check()
        assert [warning for warning in records.warnings if "appendfsync" not in warning] == []


async def test_replica_confirms_a_reservation(version: str) -> None:
    servers = Replicated(executable=fetched(version)).start()
    try:
        async with connected(servers.primary.url, replicas=1) as records:
            one = claim()
            assert isinstance(await records.reserve(one, HOLD), Reserved)
            assert servers.replicas[0].command("EXISTS", name(one)) == 1
    finally:
        servers.remove()


async def test_cluster_serves_every_tag(version: str) -> None:
    cluster = RedisCluster(executable=fetched(version)).start()
    try:
        async with connected(cluster.url) as records:
            for _ in range(256):
                assert isinstance(await records.reserve(claim(), HOLD), Reserved)
    finally:
        cluster.remove()
