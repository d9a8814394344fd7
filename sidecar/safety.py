"""What the store's server promises, read from its own words: eviction, persistence, replicas, version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sidecar.errors import StartError

# A question to the server; None where this account may not ask it.
Ask = Callable[..., Awaitable[Any]]
OLDEST = (6, 2)


async def unsafe(ask: Ask, report: Callable[[str], None], replicas: int = 0) -> tuple[str, ...]:
    """One sentence for each setting under which the store can forget what it acknowledged.

    `replicas`: how many a reservation waits for.

    `report` gets a sentence for each that cannot be read. Raises: StartError where the server is too old.
    """
    information = await _information(ask, report)
    version = information.get("valkey_version") or information.get("redis_version", "")
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if number and number < OLDEST:
        raise StartError(f"store: version {version} is too old; Redis 6.2 or Valkey 7.2 is the least")
    found = [
        await _eviction(ask, report, information),
        await _persistence(ask, information) if information else "",
        await _replication(ask, information, replicas),
    ]
    return tuple(sentence for sentence in found if sentence)


async def _information(ask: Ask, report: Callable[[str], None]) -> dict[str, str]:
    reply = await ask("INFO", "everything")
    if reply is None:
        report("INFO is refused, so what the store promises cannot be read")
        return {}
    lines = reply.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def _setting(ask: Ask, name: str) -> str | None:
    reply = await ask("CONFIG", "GET", name)
    if not reply or len(reply) < 2:
        return None
    value: bytes = reply[1]
    return value.decode("utf-8", "replace")


async def _eviction(ask: Ask, report: Callable[[str], None], information: dict[str, str]) -> str:
    policy = information.get("maxmemory_policy") or await _setting(ask, "maxmemory-policy")
    if policy is None:
        report("the eviction policy cannot be read; it must be noeviction")
    elif policy != "noeviction":
        return f"the eviction policy is {policy}: reservations can vanish; set maxmemory-policy noeviction"
    return ""


async def _persistence(ask: Ask, information: dict[str, str]) -> str:
    if information.get("aof_enabled") != "1":
        if await _setting(ask, "save"):
            return "there is no append-only file: a crash forgets the last minutes; set appendonly yes"
        return "nothing is persisted: a restart forgets every key; set appendonly yes"
    fsync = await _setting(ask, "appendfsync")
    if fsync not in (None, "always"):
        return f"appendfsync is {fsync}: a power cut forgets the last moments; set appendfsync always"
    return ""


async def _replication(ask: Ask, information: dict[str, str], waited_for: int) -> str:
    replicas = int(information.get("connected_slaves", "0"))
    if waited_for > replicas and information:
        return f"store.replicas is {waited_for} and there are {replicas} replicas: nothing can be reserved"
    if 0 < waited_for < replicas:
        return (
            f"store.replicas is {waited_for} and there are {replicas} replicas: one that lacks a reservation may be"
            " promoted; set store.replicas to their number"
        )
    if replicas and not waited_for and await _setting(ask, "min-replicas-to-write") == "0":
        return (
            "there are replicas, store.replicas is 0 and min-replicas-to-write is 0: a fail-over can forget"
            " reservations"
        )
    return ""


def together(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The sentences about all servers, each once, with the servers it is true of where they have names."""
    servers: dict[str, list[str]] = {}
    for name, sentence in found:
        servers.setdefault(sentence, []).append(name)
    return tuple(
        f"{sentence} (at {', '.join(names)})" if any(names) else sentence for sentence, names in servers.items()
    )
