"""Records in every state on the real server, and an operator's words about them."""

from __future__ import annotations

from typing import TypeVar

from harness import RedisServer
from harness.server import Reply
from harness.stores import HOLD, OK, claim, lapse, name

from sidecar import config
from sidecar.config import Origin, Route
from sidecar.ledger import Ledger, nobody
from sidecar.message import Answer
from sidecar.record import Reserved, Settled, Verdict
from sidecar.store import Claim, Store

T = TypeVar("T")

QUIET_S = 30.0
ROUTES = {
    route: Route(
        name=route,
        upstream=Origin("https", "api.example.com", 443),
        sends=(),
        timeout=config.Timeout(total_s=QUIET_S),
        accepted=accepted,
    )
    for route, accepted in (("mail", 202), ("other", 200))
}
OUTSTANDING, OVER, UNKNOWN, COMPLETED, ABSENT = "outstanding", "lease over", "unknown", "completed", "absent"
STATES = (OUTSTANDING, OVER, UNKNOWN, COMPLETED, ABSENT)


def some(value: T | None) -> T:
    assert value is not None
    return value


async def reserved(records: Store, one: Claim) -> Claim:
    found = await records.reserve(one, HOLD)
    assert isinstance(found, Reserved)
    return one.owned(found)


async def lost(records: Store, one: Claim | None = None) -> Claim:
    made = await reserved(records, one or claim())
    assert await records.lose(made, seen=None, ttl_s=3600, age_s=1) is Verdict.UNKNOWN
    return made


async def done(records: Store, one: Claim | None = None, answer: Answer = OK) -> Claim:
    made = await reserved(records, one or claim())
    refusal = answer.status >= 300
    assert await records.complete(made, answer, kept=True, refusal=refusal, ttl_s=3600, age_s=1) is Verdict.COMPLETED
    return made


async def standing(records: Store, store: RedisServer, state: str, *, ended_s: float = 0) -> Claim:
    """A record in this state, whose last attempt's end, or lease, is `ended_s` ago."""
    match state:
        case "absent":
            return claim()
        case "outstanding":
            return await reserved(records, claim())
        case "lease over":
            one = await reserved(records, claim())
            lapse(store, one, beyond_s=ended_s)
            return one
        case "unknown":
            one = await lost(records)
            store.command("PEXPIRE", name(one), round((one.hold_for_s - ended_s) * 1000))
            return one
    return await done(records)


def pttl(store: RedisServer, one: Claim) -> int:
    left = store.command("PTTL", name(one))
    assert isinstance(left, int)
    return left


def entries(store: RedisServer, one: Claim) -> tuple[list[Reply], list[Reply]]:
    """What stands in the two lists of the record's tag."""
    both: list[list[Reply]] = []
    for part in ("open", "done"):
        found = store.command("ZRANGE", f"sidecar:{{{one.record[:2]}}}:{one.route}:{part}", 0, -1)
        assert isinstance(found, list)
        both.append(found)
    return both[0], both[1]


def operator(one: Claim, word: str = "operator-1") -> Claim:
    return nobody(one.record, route=one.route, token=word.encode(), lease_s=15, hold_for_s=600)


async def sent(records: Store, by: Claim, answer: Answer | None = None, *, forced: bool = False) -> Settled:
    return await Ledger(records).sent(by, answer, status=202, provider_id="id-7", ttl_s=3600, forced=forced)


async def not_sent(records: Store, by: Claim, *, forced: bool = False) -> Settled:
    return await Ledger(records).not_sent(by, quiet_s=QUIET_S, forced=forced)


DAMAGED = [("SET", "text"), ("HSET", "v", "2"), ("HSET", "v", "1"), ("HSET", "v", "2", "state", "outstanding")]


def damage(store: RedisServer, one: Claim, words: tuple[str, ...]) -> None:
    store.command("DEL", name(one))
    store.command(words[0], name(one), *words[1:])
    store.command("PEXPIRE", name(one), 60_000)
