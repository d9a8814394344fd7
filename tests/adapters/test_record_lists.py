"""Showing, listing and finding records on the real server, however many there are."""

from __future__ import annotations

import asyncio
import re

import pytest
from harness import RedisServer
from harness.stores import REFUSED, RESEND, claim, connected, name, rival
from ledger_lab import (
    ABSENT,
    COMPLETED,
    DAMAGED,
    OUTSTANDING,
    OVER,
    STATES,
    UNKNOWN,
    damage,
    done,
    lost,
    operator,
    reserved,
    sent,
    some,
    standing,
)

from sidecar.errors import OperatorError, Refusal
from sidecar.ledger import Ledger
from sidecar.message import Answer, RecordId
from sidecar.record import Reserved, Settlement, State
from sidecar.records import HOUR_MS, Found, Position, Records
from sidecar.store import Store

pytest_plugins = ("ledger_fixtures",)
pytestmark = pytest.mark.usefixtures("every_key_expires")


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
    seconds, micros = [int(one) for one in found if isinstance(one, bytes)]
    return seconds * 1000 + micros // 1000


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


@pytest.mark.parametrize("text", ["", "x", "12", "12-", "-" + "a" * 40, "²-" + "a" * 40, "1" * 17 + "-" + "a" * 40])
def test_a_cursor_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        Position.parse(text)
