"""The operator's words on the real server: every state by resolve and forget, fresh or not, forced or not, repeated."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
from harness import RedisServer
from harness.stores import HOLD, OK, REFUSED, RESEND, claim, connected, lapse, name, rival

from sidecar import config
from sidecar.config import Origin, Route
from sidecar.errors import OperatorError, Refusal, StoreError
from sidecar.flights import Flights
from sidecar.ledger import Ledger, nobody
from sidecar.logline import Log
from sidecar.message import Answer, RecordId
from sidecar.metrics import Metrics
from sidecar.record import (
    Completed,
    Held,
    Outstanding,
    Renewal,
    Reserved,
    Reused,
    Settled,
    Settlement,
    Shown,
    State,
    Verdict,
)
from sidecar.records import HOUR_MS, Evidence, Found, Position, Records
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


@pytest.fixture(autouse=True)
def every_key_expires(store: RedisServer) -> Iterator[None]:
    """After each test: no key without an expiry, lists included."""
    yield
    assert [key for key in store.keys() if store.command("PTTL", key) == -1] == []


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


def entries(store: RedisServer, one: Claim) -> tuple[list[object], list[object]]:
    """What stands in the two lists of the record's tag."""
    both = []
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


# Every state by every word.


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    ("state", "word"),
    [
        (OUTSTANDING, Settlement.OUTSTANDING),
        (OVER, Settlement.COMPLETED),
        (UNKNOWN, Settlement.COMPLETED),
        (COMPLETED, Settlement.SETTLED),
        (ABSENT, Settlement.ABSENT),
    ],
)
async def test_resolve_sent_in_each_state(
    records: Store, store: RedisServer, state: str, word: Settlement, forced: bool
) -> None:
    one = await standing(records, store, state)
    before = store.command("HGETALL", name(one))
    assert (await sent(records, operator(one), forced=forced)).word is word
    if word is not Settlement.COMPLETED:
        assert store.command("HGETALL", name(one)) == before
        return
    assert entries(store, one) == ([], [one.record.encode()])
    assert 3_599_000 < pttl(store, one) <= 3_600_000
    resolved = Completed(Answer(202, b"", (), b"id-7"), False, b"", resolved=True)
    assert await records.reserve(rival(one), RESEND) == resolved
    assert isinstance(await records.reserve(rival(one, fingerprint=b"other"), RESEND), Reused)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("ended_s", [QUIET_S - 2, QUIET_S + 1])
@pytest.mark.parametrize("state", STATES)
async def test_resolve_not_sent_in_each_state(
    records: Store, store: RedisServer, state: str, ended_s: float, forced: bool
) -> None:
    one = await standing(records, store, state, ended_s=ended_s)
    before = store.command("HGETALL", name(one))
    settled = await not_sent(records, operator(one), forced=forced)
    early = not forced and ended_s < QUIET_S
    expected = {
        OUTSTANDING: Settlement.OUTSTANDING,
        COMPLETED: Settlement.SETTLED,
        ABSENT: Settlement.ABSENT,
    }.get(state, Settlement.EARLY if early else Settlement.RELEASED)
    assert settled.word is expected
    if expected is Settlement.RELEASED:
        assert entries(store, one) == ([], [])
        assert isinstance(await records.reserve(rival(one), HOLD), Reserved)
        return
    assert store.command("HGETALL", name(one)) == before
    if expected is Settlement.EARLY:
        assert 1_000 < settled.left_ms <= 2_000
    if expected is Settlement.OUTSTANDING:
        assert 59_000 < settled.left_ms <= 60_000


@pytest.mark.parametrize("state", STATES)
async def test_forget_in_each_state(records: Store, store: RedisServer, state: str) -> None:
    one = await standing(records, store, state)
    settled = await Ledger(records).forget(operator(one))
    expected = {OUTSTANDING: Settlement.OUTSTANDING, ABSENT: Settlement.ABSENT}.get(state, Settlement.FORGOTTEN)
    assert settled.word is expected
    if expected is Settlement.FORGOTTEN:
        assert (store.command("EXISTS", name(one)), entries(store, one)) == (0, ([], []))
        assert (await reserved(records, rival(one))).attempt == 1
    if expected is Settlement.OUTSTANDING:
        assert 59_000 < settled.left_ms <= 60_000
        assert await records.renew(one) is Renewal.RENEWED


@pytest.mark.parametrize("state", [OVER, UNKNOWN])
async def test_every_word_repeated_recognises_its_own_effect(records: Store, store: RedisServer, state: str) -> None:
    one = await standing(records, store, state, ended_s=QUIET_S + 1)
    assert [(await sent(records, operator(one))).word for _ in range(2)] == [Settlement.COMPLETED] * 2
    other = await standing(records, store, state, ended_s=QUIET_S + 1)
    words = [(await not_sent(records, operator(other))).word for _ in range(2)]
    assert words == [Settlement.RELEASED, Settlement.ABSENT]
    words = [(await Ledger(records).forget(operator(one))).word for _ in range(2)]
    assert words == [Settlement.FORGOTTEN, Settlement.ABSENT]


async def test_a_second_operator_is_told_what_the_first_one_said(records: Store) -> None:
    one = await lost(records)
    await sent(records, operator(one))
    assert (await sent(records, operator(one, "operator-2"))).word is Settlement.AGAIN
    assert (await not_sent(records, operator(one, "operator-2"), forced=True)).word is Settlement.SETTLED


async def test_sent_with_an_answer_is_replayed_byte_for_byte(records: Store) -> None:
    answer = Answer(201, b"", ((b"X-Id", b"caf\xe9"), (b"X-Id", b"")), bytes(range(256)))
    one = await lost(records)
    assert (await sent(records, operator(one), answer)).word is Settlement.COMPLETED
    assert await records.reserve(rival(one), HOLD) == Completed(answer, True, b"")


async def test_full_store_refuses_sent_whole_and_still_takes_not_sent_and_forget(private_store: RedisServer) -> None:
    async with connected(private_store.url) as records:
        one, other, third = await lost(records), await lost(records), await done(records)
        broken = claim()
        private_store.command("HSET", name(broken), "v", "9")
        private_store.command("PEXPIRE", name(broken), 60_000)
        private_store.command("CONFIG", "SET", "maxmemory", 1)
        for each in (one, broken):
            with pytest.raises(StoreError, match="OOM") as refused:
                await sent(records, operator(each))
            assert refused.value.applied is False
        assert not records.trouble, "what the operator is refused says nothing about mails"
        assert await records.reserve(rival(one), HOLD) == Held("answer-lost", "")
        assert private_store.command("HGET", name(broken), "v") == b"9"
        assert (await not_sent(records, operator(other), forced=True)).word is Settlement.RELEASED
        assert (await Ledger(records).forget(operator(third))).word is Settlement.FORGOTTEN


# An owner that lives on.


async def test_owner_that_ends_after_sent_is_told_that_it_is_not_the_owner(records: Store, store: RedisServer) -> None:
    one = await standing(records, store, OVER)
    await sent(records, operator(one))
    assert await records.renew(one) is Renewal.STALE
    assert await records.complete(one, OK, kept=True, refusal=False, ttl_s=3600, age_s=1) is Verdict.STALE
    assert await records.lose(one, seen=None, ttl_s=3600, age_s=1) is Verdict.STALE
    assert await records.release(one) is Verdict.STALE
    found = await records.reserve(rival(one), HOLD)
    assert isinstance(found, Completed)
    assert found.resolved


async def test_owner_that_ends_after_not_sent_adds_what_it_knows(records: Store, store: RedisServer) -> None:
    one, lost_later, renews = [await standing(records, store, OVER) for _ in range(3)]
    for each in (one, lost_later, renews):
        assert (await not_sent(records, operator(each), forced=True)).word is Settlement.RELEASED
    assert await records.complete(one, OK, kept=True, refusal=False, ttl_s=3600, age_s=1) is Verdict.COMPLETED
    assert await records.reserve(rival(one), HOLD) == Completed(OK, True, b"gzip")
    assert await records.lose(lost_later, seen=None, ttl_s=3600, age_s=1) is Verdict.UNKNOWN
    assert await records.renew(renews) is Renewal.RESTORED


# What cannot be read.


DAMAGED = [("SET", "text"), ("HSET", "v", "2"), ("HSET", "v", "1"), ("HSET", "v", "2", "state", "outstanding")]


def damage(store: RedisServer, one: Claim, words: tuple[str, ...]) -> None:
    store.command("DEL", name(one))
    store.command(words[0], name(one), *words[1:])
    store.command("PEXPIRE", name(one), 60_000)


@pytest.mark.parametrize("words", DAMAGED)
async def test_what_cannot_be_read_is_settled_as_unknown_unless_it_may_be_outstanding(
    records: Store, store: RedisServer, words: tuple[str, ...]
) -> None:
    perhaps = "outstanding" in words
    one = await lost(records)
    damage(store, one, words)
    assert (await not_sent(records, operator(one))).word is Settlement.UNREADABLE
    if perhaps:
        assert (await sent(records, operator(one))).word is Settlement.UNREADABLE
        assert (await Ledger(records).forget(operator(one))).word is Settlement.UNREADABLE
    assert (await sent(records, operator(one), forced=perhaps)).word is Settlement.COMPLETED
    found = await records.reserve(rival(one), HOLD)
    assert isinstance(found, Completed), found
    damage(store, one, words)
    assert (await not_sent(records, operator(one), forced=True)).word is Settlement.RELEASED
    if not perhaps:
        damage(store, one, words)
        assert (await Ledger(records).forget(operator(one))).word is Settlement.FORGOTTEN


@pytest.mark.parametrize("words", DAMAGED)
async def test_what_cannot_be_read_is_shown_so_and_listed_as_unknown(
    records: Store, store: RedisServer, desk: Records, words: tuple[str, ...]
) -> None:
    one, fine = await lost(records), await lost(records)
    damage(store, one, words)
    shown = some(await Ledger(records).show(one.record))
    assert (shown.state, 59_000 < shown.expires_ms <= 60_000) == (State.UNREADABLE, True)
    listed = {found.shown.record: found.shown.state for found in (await desk.listed(State.UNKNOWN)).found}
    assert listed == {one.record: State.UNREADABLE, fine.record: State.UNKNOWN}
    assert (await desk.listed(State.OUTSTANDING)).found == ()


# Showing.


async def test_show_tells_each_state(records: Store, store: RedisServer) -> None:
    ledger = Ledger(records)
    now = {state: await standing(records, store, state) for state in STATES}
    assert await ledger.show(now[ABSENT].record) is None
    alive = some(await ledger.show(now[OUTSTANDING].record))
    assert (alive.state, alive.attempt, alive.owner) == (State.OUTSTANDING, 1, now[OUTSTANDING].token)
    assert 59_000 < alive.lease_left_ms <= 60_000
    assert 0 <= alive.now_ms - alive.first_ms < 10_000
    assert (alive.key_text, alive.algorithm, alive.earlier_unknown) == (b"K1", "1", False)
    over = some(await ledger.show(now[OVER].record))
    assert (over.state, over.why, over.lease_left_ms) == (State.UNKNOWN, "owner-lost", 0)
    gone = some(await ledger.show(now[UNKNOWN].record))
    assert (gone.state, gone.why, gone.seen, gone.status) == (State.UNKNOWN, "answer-lost", "", 0)
    final = some(await ledger.show(now[COMPLETED].record))
    assert (final.state, final.status, final.kept, final.content_bytes) == (State.COMPLETED, 200, True, 10)
    assert (final.answer, final.resolved) == (None, False)


async def test_show_tells_the_answer_only_where_asked(records: Store) -> None:
    one = await done(records, answer=REFUSED)
    assert some(await Ledger(records).show(one.record, content=True)).answer == REFUSED
    settled = await lost(records)
    await sent(records, operator(settled))
    shown = some(await Ledger(records).show(settled.record, content=True))
    assert (shown.resolved, shown.provider_id, shown.kept, shown.content_bytes) == (True, "id-7", False, 0)
    assert shown.answer == Answer(202, b"", (), b"")


async def test_show_tells_a_cut_answer_and_an_earlier_attempt(records: Store) -> None:
    one = await reserved(records, claim())
    await records.lose(one, seen=200, ttl_s=3600, age_s=1)
    assert some(await Ledger(records).show(one.record)).seen == "200"
    found = await records.reserve(rival(one), RESEND)
    assert isinstance(found, Reserved)
    again = some(await Ledger(records).show(one.record))
    assert (again.state, again.attempt, again.earlier_unknown, again.why) == (State.OUTSTANDING, 2, True, "")


async def test_show_without_the_right_to_ask_for_time(records: Store, store: RedisServer) -> None:
    store.command("ACL", "SETUSER", "timeless", "on", ">secret", "~*", "+@all", "-time")
    async with connected(store.url.replace("redis://", "redis://timeless:secret@")) as plain:
        one = await lost(plain)
        shown = some(await Ledger(plain).show(one.record))
        assert (shown.state, shown.now_ms, shown.first_ms) == (State.UNKNOWN, 0, 0)
        assert (await sent(plain, operator(one))).word is Settlement.COMPLETED
    store.command("ACL", "DELUSER", "timeless")


# Lists.


def ids(found: tuple[Found, ...]) -> list[RecordId]:
    return [one.shown.record for one in found]


async def test_lists_tell_states_apart_and_count_a_lease_that_is_over_as_unknown(
    records: Store, store: RedisServer, desk: Records
) -> None:
    now = {state: await standing(records, store, state) for state in STATES}
    assert set(ids((await desk.listed(State.UNKNOWN)).found)) == {now[OVER].record, now[UNKNOWN].record}
    assert ids((await desk.listed(State.OUTSTANDING)).found) == [now[OUTSTANDING].record]
    assert ids((await desk.listed(State.COMPLETED)).found) == [now[COMPLETED].record]


async def test_lists_are_by_route_and_newest_first(records: Store, store: RedisServer, desk: Records) -> None:
    made = []
    for number in range(6):
        one = claim(record=RecordId(f"{(number * 37) % 6:02x}{number:038x}"), route="mail" if number % 3 else "other")
        made.append(await lost(records, one))
        await _next_ms(store)
    newest = [one.record for one in reversed(made)]
    assert ids((await desk.listed(State.UNKNOWN)).found) == newest
    by_route = await desk.listed(State.UNKNOWN, "other")
    assert ids(by_route.found) == [one.record for one in reversed(made) if one.route == "other"]
    assert {found.route for found in by_route.found} == {"other"}
    assert (await desk.listed(State.UNKNOWN, "gone")).found == ()


async def _next_ms(store: RedisServer) -> None:
    """Until the server's clock shows another millisecond."""
    begin = now = _server_ms(store)
    while now == begin:
        await asyncio.sleep(0)
        now = _server_ms(store)


def _server_ms(store: RedisServer) -> int:
    found = store.command("TIME")
    assert isinstance(found, list)
    return int(found[0]) * 1000 + int(found[1]) // 1000


@pytest.mark.parametrize("limit", [1, 7, 50])
async def test_pages_hold_every_record_once(records: Store, desk: Records, limit: int) -> None:
    made = await asyncio.gather(*(lost(records) for _ in range(60)))
    found: list[RecordId] = []
    after: Position | None = None
    while True:
        listed = await desk.listed(State.UNKNOWN, limit=limit, after=after)
        assert len(listed.found) <= limit
        found += ids(listed.found)
        if listed.rest is None:
            break
        after = Position.parse(str(listed.rest))
    assert sorted(found) == sorted(one.record for one in made)


async def test_entries_at_one_time_are_paged_too(records: Store, store: RedisServer, desk: Records) -> None:
    made = [await lost(records, claim(record=RecordId(f"aa{number:038x}"))) for number in range(30)]
    at_ms = _server_ms(store) + 100_000
    for one in made:
        store.command("ZADD", "sidecar:{aa}:mail:open", at_ms, one.record)
    first = await desk.listed(State.UNKNOWN, limit=13)
    rest = await desk.listed(State.UNKNOWN, limit=50, after=first.rest)
    assert len(first.found) == 13
    assert sorted(ids(first.found) + ids(rest.found)) == sorted(one.record for one in made)


async def test_entries_without_a_record_are_left_out(records: Store, store: RedisServer, desk: Records) -> None:
    one, gone, strange = await lost(records), await lost(records), await lost(records)
    store.command("DEL", name(gone))
    store.command("ZADD", f"sidecar:{{{strange.record[:2]}}}:mail:open", 10**15, "no-record")
    assert set(ids((await desk.listed(State.UNKNOWN)).found)) == {one.record, strange.record}
    long_ago = _server_ms(store) - 2 * HOUR_MS
    store.command("ZADD", f"sidecar:{{{gone.record[:2]}}}:mail:open", long_ago, gone.record)
    assert set(ids((await desk.listed(State.UNKNOWN)).found)) == {one.record, strange.record}


def commands(store: RedisServer) -> int:
    """How many commands clients have sent, whatever the scripts did inside."""
    text = store.command("INFO", "commandstats")
    assert isinstance(text, bytes)
    found = re.findall(rb"cmdstat_(evalsha|eval|zrevrangebyscore|zscore):calls=(\d+)", text)
    return sum(int(calls) for _, calls in found)


async def test_a_list_takes_as_many_commands_in_a_big_store_as_in_a_small_one(
    records: Store, store: RedisServer, desk: Records
) -> None:
    async def asked() -> int:
        before = commands(store)
        assert len((await desk.listed(State.UNKNOWN, "mail", limit=20)).found) == 20
        return commands(store) - before

    async def fill(count: int) -> None:
        for begin in range(0, count, 200):
            many = range(begin, min(begin + 200, count))
            await asyncio.gather(*(lost(records, claim(record=_spread())) for _ in many))

    await fill(60)
    small = await asked()
    await fill(4_000)
    assert await asked() <= small + 10
    assert small <= 256 + 32 + 32 + 10


def _spread() -> RecordId:
    """An id whose tag is that of a digest."""
    number = claim().record
    return RecordId(f"{int(number, 16) * 149 % 256:02x}{number[2:]}")


async def test_a_list_of_what_is_not_there_stops_and_says_where(
    records: Store, desk: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.records.LOOKED_AT", 40)
    await asyncio.gather(*(reserved(records, claim()) for _ in range(100)))
    one = await lost(records)
    found: list[RecordId] = []
    parts = 0
    after: Position | None = None
    while True:
        listed = await desk.listed(State.UNKNOWN, after=after)
        found += ids(listed.found)
        parts += 1
        if listed.rest is None:
            break
        after = listed.rest
    assert found == [one.record]
    assert parts == 2


# Look-ups.


async def test_records_of_a_key_are_found_in_every_state_credential_and_route(
    records: Store, store: RedisServer, desk: Records
) -> None:
    text = b"order:{4711}/*"
    made = [
        await lost(records, claim(key_text=text)),
        await done(records, claim(key_text=text, route="other")),
        await reserved(records, claim(key_text=text)),
    ]
    await lost(records, claim(key_text=b"order"))
    await lost(records, claim(key_text=b""))
    store.command("SET", name(await lost(records)), "damaged", "PX", 60_000)
    assert set(ids((await desk.by_key(text)).found)) == {one.record for one in made}
    assert ids((await desk.by_key(text, "other")).found) == [made[1].record]
    assert (await desk.by_key(b"")).found == ()


async def test_a_key_is_found_beyond_what_is_looked_at_in_one_go(
    records: Store, desk: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.records.IN_ONE_GO", 5)
    for number in range(17):
        await lost(records, claim(record=RecordId(f"bb{number:038x}"), key_text=b"key-%d" % number))
    for number in (0, 5, 16):
        found = (await desk.by_key(b"key-%d" % number)).found
        assert ids(found) == [f"bb{number:038x}"]


async def test_a_record_is_found_by_its_id_with_its_route(records: Store, store: RedisServer, desk: Records) -> None:
    one = await lost(records, claim(route="other"))
    found = await desk.get(one.record)
    assert (found.route, found.here, found.shown.record) == ("other", False, one.record)
    renamed = await lost(records, claim(route="renamed"))
    assert (await desk.get(renamed.record)).route == ""
    assert (await desk.get(renamed.record, "renamed")).route == "renamed"
    with pytest.raises(OperatorError) as refused:
        await desk.get(claim().record)
    assert refused.value.slug is Refusal.RECORD_ABSENT


# Settling, by the route's settings.


async def test_sent_takes_status_and_ttl_of_the_route(records: Store, store: RedisServer, desk: Records) -> None:
    one = await lost(records)
    assert (await desk.resolve_sent(one.record, Evidence("id-7"))).word is Settlement.COMPLETED
    shown: Shown = some(await Ledger(records).show(one.record))
    assert (shown.status, shown.provider_id, shown.resolved) == (202, "id-7", True)
    assert 86_390_000 < pttl(store, one) <= 86_400_000
    assert (await desk.resolve_sent(one.record, Evidence())).word is Settlement.AGAIN


async def test_not_sent_waits_for_the_total_of_the_route(records: Store, store: RedisServer, desk: Records) -> None:
    one = await standing(records, store, UNKNOWN, ended_s=QUIET_S - 10)
    with pytest.raises(OperatorError) as refused:
        await desk.resolve_not_sent(one.record)
    assert (refused.value.slug, refused.value.status) == (Refusal.RECORD_FRESH, 409)
    assert refused.value.retry_after_s == 10
    assert (await desk.resolve_not_sent(one.record, forced=True)).word is Settlement.RELEASED


async def test_a_record_of_a_route_that_is_no_more_is_settled_by_its_id(records: Store, desk: Records) -> None:
    one, other = await lost(records, claim(route="renamed")), await lost(records, claim(route="renamed"))
    assert (await desk.resolve_sent(one.record, Evidence(), "renamed")).word is Settlement.COMPLETED
    assert (await desk.resolve_not_sent(other.record, forced=True)).word is Settlement.RELEASED
    assert some(await Ledger(records).show(one.record)).status == 200


@pytest.mark.parametrize("word", ["sent", "not-sent", "forget"])
async def test_what_runs_in_this_process_is_not_settled(
    records: Store, store: RedisServer, desk: Records, flights: Flights, word: str
) -> None:
    flight = await flights.reserve(claim(), HOLD, ttl_s=3600)
    assert not isinstance(flight, Outstanding | Held | Reserved | Completed)
    one = replace(claim(), record=RecordId(next(iter(flights._flights))))
    lapse(store, one, beyond_s=QUIET_S + 1)
    assert (await desk.get(one.record)).here
    with pytest.raises(OperatorError) as refused:
        if word == "forget":
            await desk.forget(one.record)
        elif word == "sent":
            await desk.resolve_sent(one.record, Evidence(), forced=True)
        else:
            await desk.resolve_not_sent(one.record, forced=True)
    assert refused.value.slug is Refusal.RECORD_OUTSTANDING
    assert store.command("HGET", name(one), "state") == b"outstanding"


async def test_refusals_carry_their_reasons(records: Store, store: RedisServer, desk: Records) -> None:
    alive, final = await reserved(records, claim()), await done(records)
    odd = await lost(records)
    damage(store, odd, ("HSET", "v", "2"))
    told = []
    for record, ask in (
        (alive.record, desk.forget),
        (alive.record, desk.resolve_not_sent),
        (final.record, desk.resolve_not_sent),
        (odd.record, desk.resolve_not_sent),
        (claim().record, desk.forget),
    ):
        with pytest.raises(OperatorError) as refused:
            await ask(record)
        told.append(refused.value.slug)
    assert told == [
        Refusal.RECORD_OUTSTANDING,
        Refusal.RECORD_OUTSTANDING,
        Refusal.RECORD_COMPLETED,
        Refusal.RECORD_UNREADABLE,
        Refusal.RECORD_ABSENT,
    ]


@pytest.mark.parametrize("text", ["", "x", "12", "12-", "-" + "a" * 40, "²-" + "a" * 40, "1" * 17 + "-" + "a" * 40])
def test_a_cursor_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        Position.parse(text)
