"""The operator's words on the real server: every state by resolve and forget, fresh or not, forced or not, repeated."""

from __future__ import annotations

import pytest
from harness import RedisServer
from harness.stores import HOLD, OK, RESEND, claim, connected, lapse, name, rival
from ledger_lab import (
    ABSENT,
    COMPLETED,
    DAMAGED,
    OUTSTANDING,
    OVER,
    QUIET_S,
    STATES,
    UNKNOWN,
    damage,
    done,
    entries,
    lost,
    not_sent,
    operator,
    pttl,
    reserved,
    sent,
    some,
    standing,
)

from sidecar.errors import OperatorError, Refusal, StoreError
from sidecar.flights import Flight, Flights
from sidecar.ledger import Ledger
from sidecar.message import Answer
from sidecar.record import Completed, Held, Renewal, Reserved, Reused, Settlement, Verdict
from sidecar.records import Evidence, Records
from sidecar.store import Store

pytest_plugins = ("ledger_fixtures",)
pytestmark = pytest.mark.usefixtures("every_key_expires")

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


# Settling, by the route's settings.


async def test_sent_takes_status_and_ttl_of_the_route(records: Store, store: RedisServer, desk: Records) -> None:
    one = await lost(records)
    assert (await desk.resolve_sent(one.record, Evidence("id-7"))).word is Settlement.COMPLETED
    shown = some(await Ledger(records).show(one.record))
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
    assert isinstance(flight, Flight)
    one = flight.claim
    lapse(store, one, beyond_s=QUIET_S + 1)
    assert (await desk.get(one.record)).here
    said = {
        "sent": lambda: desk.resolve_sent(one.record, Evidence(), forced=True),
        "not-sent": lambda: desk.resolve_not_sent(one.record, forced=True),
        "forget": lambda: desk.forget(one.record),
    }
    with pytest.raises(OperatorError) as refused:
        await said[word]()
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
