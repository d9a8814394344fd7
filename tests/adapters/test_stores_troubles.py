"""The table "What trouble looks like" of docs/stores.md, row by row, with the real program."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio
from harness import (
    Parsed,
    RedisServer,
    Sidecar,
    Upstream,
    answer,
    default_config,
    duration,
    free_port,
    gate,
    scaled,
    until,
)
from harness.servers import information, wait

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 0.4
SLACK_S = 0.8
_numbers = itertools.count(1)


def fresh() -> str:
    """A key of its own."""
    return f"K{next(_numbers)}"


@dataclass(frozen=True)
class Trouble:
    """A store in trouble. `reason`: a word of `/readyz`; `replays`: whether a settled key is still answered."""

    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object]
    reason: str
    replays: bool = False


def load_slowly(server: RedisServer) -> None:
    """Start again over some hundred keys, 10 ms each."""
    for number in range(150):
        server.command("SET", f"k{number}", "v", "EX", 60)
    server.command("BGREWRITEAOF")
    wait(lambda: information(server, "persistence")["aof_rewrite_in_progress"] == "0")
    server.stop()
    server.options |= {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"}
    server.launch()


def loaded(server: RedisServer) -> None:
    """Once it has loaded."""
    server._await_ready()
    del server.options["key-load-delay"], server.options["loading-process-events-interval-bytes"]


TROUBLES = {
    "away": Trouble(RedisServer.kill, RedisServer.start, "refused|reset|closed|Connect"),
    "silent": Trouble(RedisServer.pause, RedisServer.resume, "time|answer"),
    "read-only": Trouble(
        lambda server: server.command("REPLICAOF", "127.0.0.1", free_port()),
        lambda server: server.command("REPLICAOF", "NO", "ONE"),
        "read-only|READONLY",
    ),
    "loading": Trouble(load_slowly, loaded, "(?i)loading"),
    "full": Trouble(
        lambda server: server.command("CONFIG", "SET", "maxmemory", 1),
        lambda server: server.command("CONFIG", "SET", "maxmemory", 0),
        "OOM",
        replays=True,
    ),
}


@dataclass
class Lab:
    """One sidecar on one store."""

    server: RedisServer
    upstream: Upstream
    sidecar: Sidecar

    async def send(self, key: str) -> Parsed:
        """One mail."""
        return await self.sidecar.send(key)

    async def under_way(self) -> tuple[str, asyncio.Event, asyncio.Task[Parsed]]:
        """A mail whose answer waits for an event."""
        key, opened = fresh(), asyncio.Event()
        self.upstream.script(gate(opened))
        count = self.upstream.count
        task = asyncio.get_running_loop().create_task(self.send(key))
        await self.upstream.reached(count + 1)
        return key, opened, task

    async def until_ok(self, key: str) -> Parsed:
        """Send it until it is answered 200."""
        told: list[Parsed] = []

        async def fine() -> bool:
            told.append(await self.send(key))
            return told[-1].status == 200

        await until(fine, 10)
        return told[-1]

    def count(self, key: str) -> int:
        """How often it was sent."""
        return sum(one.first("idempotency-key") == key.encode() for one in self.upstream.requests)

    async def readyz(self) -> tuple[int, str]:
        """Its status and text."""
        told = await self.sidecar.ask_admin("/readyz")
        return told.status, told.content.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """For all tests of the module; each leaves the store as it found it."""
    server = RedisServer().start()
    upstream = await Upstream.start(answer())
    settings = default_config(upstream, server.url)
    settings["store"]["timeout"] = duration(TIMEOUT_S)
    sidecar = Sidecar(tmp_path_factory.mktemp("troubles"), settings)
    await sidecar.run()
    yield Lab(server, upstream, sidecar)
    await sidecar.close()
    await upstream.stop()
    server.remove()


@pytest.mark.parametrize("kind", TROUBLES)
async def test_trouble_refuses_new_keys_and_costs_neither_a_mail_nor_a_second_one(lab: Lab, kind: str) -> None:
    trouble = TROUBLES[kind]
    settled, refused = fresh(), fresh()
    assert (await lab.send(settled)).status == 200
    running, opened, task = await lab.under_way()
    await asyncio.to_thread(trouble.begin, lab.server)

    begin = time.monotonic()
    given = await lab.send(refused)
    assert time.monotonic() - begin < scaled(TIMEOUT_S + SLACK_S)
    assert (given.status, given.slug, given.json()["sent"]) == (503, "store-unavailable", "no")
    assert given.first("retry-after") is not None
    given = await lab.send(settled)
    assert given.replayed if trouble.replays else given.status == 503

    async def told() -> bool:
        status, text = await lab.readyz()
        return status == 503 and re.search(trouble.reason, text) is not None

    await until(told, what=f"/readyz says {trouble.reason}")
    opened.set()
    first = await task
    assert first.status == 200
    assert (lab.count(refused), lab.count(running)) == (0, 1)

    await asyncio.to_thread(trouble.end, lab.server)
    await lab.until_ok(refused)

    async def ready() -> bool:
        return (await lab.readyz())[0] == 200

    await until(ready)
    assert (await lab.until_ok(running)).content == first.content
    assert (await lab.send(settled)).replayed
    assert [lab.count(key) for key in (settled, refused, running)] == [1, 1, 1]


async def test_store_slower_than_the_time_for_a_command_refuses_and_takes_late_reservations_back(lab: Lab) -> None:
    keys = [fresh() for _ in range(5)]
    lab.server.command("CLIENT", "PAUSE", round(scaled(2 * TIMEOUT_S) * 1000), "ALL")
    given = await asyncio.gather(*(lab.send(key) for key in keys))
    assert {one.slug for one in given} == {"store-unavailable"}
    for key in keys:
        await lab.until_ok(key)
    assert [lab.count(key) for key in keys] == [1] * 5


async def test_restart_is_noticed_by_nobody_who_waits_for_it(lab: Lab) -> None:
    settled = fresh()
    assert (await lab.send(settled)).status == 200
    running, opened, task = await lab.under_way()
    await asyncio.to_thread(lab.server.restart)
    assert (await lab.until_ok(settled)).replayed
    opened.set()
    assert (await task).status == 200
    assert (await lab.until_ok(running)).replayed
    assert [lab.count(key) for key in (settled, running)] == [1, 1]


def empty(server: RedisServer) -> None:
    """Another server at the same address, without its data."""
    server.kill()
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()


@pytest.mark.parametrize("forget", [RedisServer.flush, empty], ids=["flushed", "empty"])
async def test_store_that_forgets_sends_settled_keys_again_and_mails_under_way_once(
    lab: Lab, forget: Callable[[RedisServer], None]
) -> None:
    settled = fresh()
    assert (await lab.send(settled)).status == 200
    running, opened, task = await lab.under_way()
    await asyncio.to_thread(forget, lab.server)
    # The exception that the README names.
    assert not (await lab.until_ok(settled)).replayed
    assert (await lab.send(running)).slug == "request-outstanding"
    opened.set()
    assert (await task).status == 200
    assert (await lab.until_ok(running)).replayed
    assert (await lab.until_ok(settled)).replayed
    assert [lab.count(key) for key in (settled, running)] == [2, 1]
