"""What start-up says of a store's promises, on real servers with those settings, and what each account may read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from harness import RedisServer, scaled, until

from sidecar import config
from sidecar.errors import StartError, StoreError
from sidecar.safety import unsafe
from sidecar.store import Store

SAFE = {"appendfsync": "always"}
READS = ("+@connection", "+eval", "+evalsha", "+script|load", "+@read", "+@write", "~*")


@contextmanager
def running(**options: str) -> Iterator[RedisServer]:
    """A server with these settings beside the safe ones."""
    server = RedisServer(SAFE | {name.replace("_", "-"): value for name, value in options.items()}).start()
    try:
        yield server
    finally:
        server.remove()


@asynccontextmanager
async def checked(url: str, *, strict: bool = False) -> AsyncIterator[tuple[Store, list[str]]]:
    """A store that serves, and what it reports."""
    said: list[str] = []
    store = Store(
        config.Store(url=url, strict=strict, timeout_s=scaled(1)),
        wall_ms=lambda: 0,
        report=said.append,
        observe=lambda _name, _took_s: None,
    )
    store.start()
    try:
        await until(lambda: not store.trouble)
        yield store, said
    finally:
        await store.close()


async def warnings(server: RedisServer) -> tuple[str, ...]:
    """What `check` finds."""
    async with checked(server.url) as (store, said):
        await store.check()
        assert said == list(store.warnings)
        return store.warnings


async def test_safe_server_gets_no_warning() -> None:
    with running() as server:
        assert await warnings(server) == ()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
async def test_policy_that_evicts_is_named(policy: str) -> None:
    with running(maxmemory_policy=policy) as server:
        (warning,) = await warnings(server)
    assert policy in warning
    assert "noeviction" in warning


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"appendonly": "no"}, ("nothing is persisted", "appendonly yes")),
        ({"appendonly": "no", "save": "60 1"}, ("no append-only file", "appendonly yes")),
        ({"appendfsync": "everysec"}, ("everysec", "appendfsync always")),
        ({"appendfsync": "no"}, ("appendfsync is no", "appendfsync always")),
    ],
    ids=["nothing", "snapshots", "everysec", "never"],
)
async def test_persistence_that_forgets_is_named(options: dict[str, str], words: tuple[str, ...]) -> None:
    with running(**options) as server:
        (warning,) = await warnings(server)
    assert all(word in warning for word in words)


async def test_replicas_that_nobody_waits_for_are_named() -> None:
    with running() as primary, running() as replica:
        replica.command("REPLICAOF", primary.host, primary.port)
        await until(lambda: "connected_slaves:1" in str(primary.command("INFO", "replication")), 10)
        (warning,) = await warnings(primary)
        assert "min-replicas-to-write" in warning
        primary.command("CONFIG", "SET", "min-replicas-to-write", "1")
        assert await warnings(primary) == ()


async def test_every_unsafe_setting_is_named_and_strict_refuses_to_start() -> None:
    with running(maxmemory_policy="allkeys-lru", appendfsync="everysec") as server:
        assert len(await warnings(server)) == 2
        async with checked(server.url, strict=True) as (store, _said):
            with pytest.raises(StartError, match=r"store\.strict: .*allkeys-lru"):
                await store.check()


async def test_account_that_may_not_ask_is_told_what_cannot_be_read() -> None:
    with running() as server:
        server.command("ACL", "SETUSER", "ada", "on", ">pass", *READS, "-info", "-config")
        async with checked(server.url.replace("//", "//ada:pass@")) as (store, said):
            await store.check()
            assert store.warnings == ()
    assert any("INFO" in sentence for sentence in said)
    assert any("eviction" in sentence for sentence in said)


async def test_account_that_may_read_info_alone_is_still_warned() -> None:
    with running(maxmemory_policy="allkeys-lru") as server:
        server.command("ACL", "SETUSER", "ada", "on", ">pass", *READS, "+info", "-config")
        async with checked(server.url.replace("//", "//ada:pass@")) as (store, _said):
            await store.check()
            (warning,) = store.warnings
    assert "allkeys-lru" in warning


async def test_account_without_scripts_is_an_error_that_names_the_right() -> None:
    with running() as server:
        server.command("ACL", "SETUSER", "ada", "on", ">pass", "+@all", "-@scripting", "~*")
        async with checked(server.url.replace("//", "//ada:pass@")) as (store, _said):
            with pytest.raises(StartError, match="EVAL"):
                await store.check()


async def test_store_that_is_away_is_not_an_error_of_its_settings(private_store: RedisServer) -> None:
    async with checked(private_store.url, strict=True) as (store, _said):
        private_store.pause()
        with pytest.raises(StoreError):
            await store.check()


VERSIONS = [
    ("redis_version:6.0.16", False),
    ("redis_version:5.0.3", False),
    ("redis_version:6.2.0", True),
    ("redis_version:7.0.15", True),
    ("redis_version:10.0.1", True),
    ("redis_version:7.2.4\r\nvalkey_version:7.2.5", True),
    ("redis_version:255.255.255", True),
    ("redis_version:unknown", True),
    ("", True),
]


@pytest.mark.parametrize(("information", "fits"), VERSIONS)
async def test_version_below_the_least_is_an_error_that_names_both(information: str, fits: bool) -> None:
    async def ask(*words: str) -> object:
        """What a server of that version says."""
        return f"# Server\r\n{information}\r\naof_enabled:1\r\n".encode() if words[0] == "INFO" else None

    said: list[str] = []
    if fits:
        assert await unsafe(ask, said.append) == ()
        return
    version = information.removeprefix("redis_version:")
    with pytest.raises(StartError, match=version) as caught:
        await unsafe(ask, said.append)
    assert "6.2" in str(caught.value)
