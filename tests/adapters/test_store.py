"""Every transition of every script, and every stale caller, on the real server: the README's table by cells."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from harness import RedisServer
from harness.stores import HOLD, OK, REFUSED, RESEND, claim, connected, lapse, name, rival

from sidecar.errors import Sent, StoreError
from sidecar.message import Answer
from sidecar.record import (
    Completed,
    Held,
    Later,
    Outstanding,
    Renewal,
    Reserved,
    Reused,
    Unreadable,
    Verdict,
)
from sidecar.store import Claim, Store, Terms


@pytest.fixture
async def records(store: RedisServer) -> AsyncIterator[Store]:
    """The store under test."""
    async with connected(store.url) as made:
        yield made


@pytest.fixture(autouse=True)
def every_key_expires(store: RedisServer) -> Iterator[None]:
    """After each test: no key without an expiry, lists included."""
    yield
    names = store.keys()
    assert [name for name in names if store.command("PTTL", name) == -1] == []


async def reserve(records: Store, one: Claim, terms: Terms = HOLD) -> Claim:
    """Reserve and expect to own; the claim as it is renewed and settled with."""
    found = await records.reserve(one, terms)
    assert isinstance(found, Reserved)
    return one.owned(found)


async def complete(records: Store, one: Claim, answer: Answer = OK, *, age_s: float = 1, kept: bool = True) -> Verdict:
    """Complete with an hour's ttl."""
    refusal = not 200 <= answer.status < 300
    return await records.complete(one, answer, kept=kept, refusal=refusal, ttl_s=3600, age_s=age_s)


async def lose(records: Store, one: Claim, *, seen: int | None = None, age_s: float = 1) -> Verdict:
    """Lose with an hour's ttl."""
    return await records.lose(one, seen=seen, ttl_s=3600, age_s=age_s)


async def unknown(records: Store) -> Claim:
    """A record whose first attempt lost its answer."""
    first = await reserve(records, claim())
    assert await lose(records, first) is Verdict.UNKNOWN
    return first


async def second(records: Store) -> tuple[Claim, Claim]:
    """Two attempts under one record: the first is unknown, the second owns it now."""
    first = await unknown(records)
    return first, await reserve(records, rival(first), RESEND)


def pttl(store: RedisServer, one: Claim) -> int:
    """What is left of a record, in ms."""
    left = store.command("PTTL", name(one))
    assert isinstance(left, int)
    return left


# Arrivals.


async def test_reserve_of_an_absent_record_is_granted(records: Store) -> None:
    found = await records.reserve(claim(), HOLD)
    assert isinstance(found, Reserved)
    assert (found.attempt, found.earlier_unknown, found.native, found.window_left_ms) == (1, False, b"native-1", -1)
    assert found.first_ms > 0


async def test_reserve_repeated_recognises_its_own_reservation(records: Store) -> None:
    one = claim()
    first = await records.reserve(one, HOLD)
    assert await records.reserve(one, HOLD) == first


async def test_reserve_while_the_lease_lives_is_refused_with_what_is_left_of_it(records: Store) -> None:
    one = await reserve(records, claim())
    found = await records.reserve(rival(one), HOLD)
    assert isinstance(found, Outstanding)
    assert 59_000 < found.left_ms <= 60_000


async def test_reserve_after_the_lease_is_held_as_owner_lost(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    lapse(store, one)
    assert await records.reserve(rival(one), HOLD) == Held("owner-lost", "")


async def test_reserve_after_a_lost_answer_is_held_as_answer_lost(records: Store) -> None:
    one = await reserve(records, claim())
    await lose(records, one, seen=200)
    assert await records.reserve(rival(one), HOLD) == Held("answer-lost", "200")


async def test_reserve_of_a_completed_record_gets_the_answer(records: Store) -> None:
    one = await reserve(records, claim())
    assert await complete(records, one) is Verdict.COMPLETED
    assert await records.reserve(rival(one), HOLD) == Completed(OK, True, b"gzip")


async def test_reserve_gets_fields_and_content_byte_for_byte(records: Store) -> None:
    fields = ((b"X-A", b"caf\xe9"), (b"x-a", b""), (b"Set-Cookie", b"a: b"), (b"Set-Cookie", b"c"))
    answer = Answer(207, b"Caf\xe9", fields, bytes(range(256)))
    one = await reserve(records, claim())
    await complete(records, one, answer)
    assert await records.reserve(rival(one), HOLD) == Completed(answer, True, b"gzip")


async def test_completed_without_content_says_so(records: Store) -> None:
    one = await reserve(records, claim())
    await complete(records, one, kept=False)
    found = await records.reserve(rival(one), HOLD)
    assert isinstance(found, Completed)
    assert (found.kept, found.answer.status, found.answer.content) == (False, 200, b"")


async def test_another_fingerprint_goes_before_everything_else(records: Store) -> None:
    outstanding = await reserve(records, claim())
    lost = await unknown(records)
    done = await reserve(records, claim())
    await complete(records, done)
    refused = await reserve(records, claim())
    await complete(records, refused, REFUSED)
    for one, sent in ((outstanding, Sent.UNKNOWN), (lost, Sent.UNKNOWN), (done, Sent.UNKNOWN), (refused, Sent.NO)):
        assert await records.reserve(rival(one, fingerprint=b"other"), RESEND) == Reused(sent)


@pytest.mark.parametrize("off", ["theirs", "mine"])
async def test_a_side_without_a_fingerprint_fits_every_request(records: Store, off: str) -> None:
    one = await reserve(records, claim(algorithm=b"off" if off == "theirs" else b"1"))
    other = rival(one, fingerprint=b"other", algorithm=b"off" if off == "mine" else b"1")
    assert isinstance(await records.reserve(other, HOLD), Outstanding)


async def test_a_fingerprint_of_another_algorithm_is_not_misread(records: Store) -> None:
    one = await reserve(records, claim())
    await complete(records, one)
    assert await records.reserve(rival(one, algorithm=b"2"), HOLD) == Unreadable()


# A further attempt.


async def test_resend_after_an_unknown_attempt_carries_the_first_native_key(records: Store) -> None:
    first = await unknown(records)
    found = await records.reserve(rival(first, native=b'"native-1"'), RESEND)
    assert isinstance(found, Reserved)
    assert (found.attempt, found.earlier_unknown, found.native) == (2, True, b"native-1")
    assert 3_500_000 < found.window_left_ms < 3_600_000


async def test_resend_after_an_owner_was_lost(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    lapse(store, one)
    assert (await reserve(records, rival(one), RESEND)).attempt == 2
    assert await records.renew(one) is Renewal.STALE


async def test_resend_under_another_credential_is_held(records: Store) -> None:
    first = await unknown(records)
    assert await records.reserve(rival(first, credential=b"other"), RESEND) == Held("answer-lost", "")


async def test_resend_after_the_window_is_held(records: Store, store: RedisServer) -> None:
    first = await unknown(records)
    earlier = store.command("HGET", name(first), "first")
    assert isinstance(earlier, bytes)
    store.command("HSET", name(first), "first", int(earlier) - 3_599_500)
    assert await records.reserve(rival(first), RESEND) == Held("answer-lost", "")


async def test_resend_too_early_is_told_when(records: Store, store: RedisServer) -> None:
    first = await unknown(records)
    terms = replace(RESEND, resend_after_s=30)
    found = await records.reserve(rival(first), terms)
    assert isinstance(found, Later)
    assert 29_000 < found.left_ms <= 30_000
    store.command("PEXPIRE", name(first), round((first.hold_for_s - 31) * 1000))
    assert (await reserve(records, rival(first), terms)).attempt == 2


async def test_resend_after_counts_from_the_end_of_a_lost_owners_lease(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    terms = replace(RESEND, resend_after_s=30)
    lapse(store, one, beyond_s=10)
    assert isinstance(await records.reserve(rival(one), terms), Later)
    lapse(store, one, beyond_s=31)
    assert (await reserve(records, rival(one), terms)).attempt == 2


# Owners and former owners.


async def test_renew_by_the_owner_begins_the_lease_anew(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    lapse(store, one, beyond_s=100)
    assert await records.renew(one) is Renewal.RENEWED
    assert isinstance(await records.reserve(rival(one), RESEND), Outstanding)


async def test_renew_of_a_record_the_store_lost_puts_it_back(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    store.flush()
    assert await records.renew(one) is Renewal.RESTORED
    assert isinstance(await records.reserve(rival(one), HOLD), Outstanding)
    assert await records.reserve(rival(one, fingerprint=b"other"), HOLD) == Reused(Sent.UNKNOWN)


@pytest.mark.parametrize("end", ["complete", "lose"])
async def test_renew_of_a_settled_record_changes_nothing(records: Store, end: str) -> None:
    one = await reserve(records, claim())
    await (complete(records, one) if end == "complete" else lose(records, one))
    assert await records.renew(one) is Renewal.STALE
    assert not isinstance(await records.reserve(rival(one), HOLD), Outstanding)


async def test_complete_repeated_recognises_itself(records: Store) -> None:
    one = await reserve(records, claim())
    assert [await complete(records, one), await complete(records, one)] == [Verdict.COMPLETED] * 2


async def test_complete_after_the_lease_and_after_a_loss_still_counts(records: Store, store: RedisServer) -> None:
    late = await reserve(records, claim())
    lapse(store, late)
    lost = await unknown(records)
    for one in (late, lost):
        assert await complete(records, one) is Verdict.COMPLETED
        assert isinstance(await records.reserve(rival(one), HOLD), Completed)


async def test_success_of_a_former_owner_completes_the_record(records: Store) -> None:
    first, now = await second(records)
    assert await complete(records, first) is Verdict.COMPLETED
    assert await complete(records, now, Answer(200, b"OK", (), b"second")) is Verdict.STALE
    assert await records.reserve(rival(first), HOLD) == Completed(OK, True, b"gzip")


async def test_refusal_of_a_former_owner_changes_nothing(records: Store) -> None:
    first, now = await second(records)
    assert await complete(records, first, REFUSED) is Verdict.STALE
    assert await records.renew(now) is Renewal.RENEWED


async def test_refusal_after_an_unknown_attempt_leaves_it_unknown(records: Store) -> None:
    _, now = await second(records)
    assert await complete(records, now, REFUSED) is Verdict.UNKNOWN
    assert await complete(records, now, REFUSED) is Verdict.UNKNOWN
    assert await records.reserve(rival(now), HOLD) == Held("answer-lost", "")


async def test_refusal_of_the_first_attempt_is_kept(records: Store) -> None:
    one = await reserve(records, claim())
    assert await complete(records, one, REFUSED) is Verdict.COMPLETED
    assert await records.reserve(rival(one), RESEND) == Completed(REFUSED, True, b"gzip")


@pytest.mark.parametrize(("age_s", "verdict"), [(3599, Verdict.COMPLETED), (3600, Verdict.STALE)])
async def test_complete_on_an_absent_record_counts_while_younger_than_ttl(
    records: Store, store: RedisServer, age_s: float, verdict: Verdict
) -> None:
    one = await reserve(records, claim())
    store.flush()
    assert await complete(records, one, age_s=age_s) is verdict
    assert isinstance(await records.reserve(rival(one), HOLD), Completed) is (verdict is Verdict.COMPLETED)


async def test_refusal_on_an_absent_record_after_an_unknown_attempt_is_unknown(
    records: Store, store: RedisServer
) -> None:
    _, now = await second(records)
    store.flush()
    assert await complete(records, now, REFUSED) is Verdict.UNKNOWN
    assert isinstance(await records.reserve(rival(now), HOLD), Held)


async def test_release_frees_the_key(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    assert await records.release(one) is Verdict.RELEASED
    assert await records.release(one) is Verdict.RELEASED
    assert store.command("EXISTS", name(one)) == 0
    assert (await reserve(records, rival(one))).attempt == 1


async def test_release_after_the_lease_frees_the_key(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    lapse(store, one)
    assert await records.release(one) is Verdict.RELEASED


async def test_release_after_an_unknown_attempt_leaves_it_unknown(records: Store) -> None:
    _, now = await second(records)
    assert await records.release(now) is Verdict.UNKNOWN
    assert await records.release(now) is Verdict.UNKNOWN
    assert await records.reserve(rival(now), HOLD) == Held("answer-lost", "")


async def test_release_by_another_changes_nothing(records: Store) -> None:
    one = await reserve(records, claim())
    assert await records.release(rival(one)) is Verdict.STALE
    await complete(records, one)
    assert await records.release(one) is Verdict.STALE
    assert isinstance(await records.reserve(rival(one), HOLD), Completed)


async def test_lose_by_a_former_owner_is_remembered_and_prolongs_nothing(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    lapse(store, one)
    now = await reserve(records, rival(one), RESEND)
    store.command("HSET", name(now), "earlier", 0)
    store.command("PEXPIRE", name(now), 580_000)
    assert await lose(records, one) is Verdict.STALE
    assert store.command("HGET", name(now), "earlier") == b"1"
    assert pttl(store, now) <= 580_000
    assert await complete(records, now, REFUSED) is Verdict.UNKNOWN


async def test_lose_on_an_absent_record_makes_it_unknown(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    store.flush()
    assert await lose(records, one) is Verdict.UNKNOWN
    assert await records.reserve(rival(one), HOLD) == Held("answer-lost", "")
    store.flush()
    assert await lose(records, one, age_s=3600) is Verdict.STALE


async def test_lose_of_a_completed_record_changes_nothing(records: Store) -> None:
    one = await reserve(records, claim())
    await complete(records, one)
    assert await lose(records, one) is Verdict.STALE
    assert isinstance(await records.reserve(rival(one), HOLD), Completed)


# Times.


async def test_times_of_a_record_in_each_state(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    assert 599_000 < pttl(store, one) <= 600_000
    await complete(records, one)
    assert 3_599_000 < pttl(store, one) <= 3_600_000
    store.command("PEXPIRE", name(one), 1_000_000)
    await records.reserve(rival(one), HOLD)
    assert pttl(store, one) <= 1_000_000, "a replay prolongs nothing"
    lost = await unknown(records)
    assert 599_000 < pttl(store, lost) <= 600_000


async def test_lists_hold_what_is_unsettled_and_what_is_settled(records: Store, store: RedisServer) -> None:
    one = claim()
    opened, done = (f"sidecar:{{{one.record[:2]}}}:mail:{part}" for part in ("open", "done"))
    one = await reserve(records, one)
    assert store.command("ZRANGE", opened, 0, -1) == [one.record.encode()]
    await complete(records, one)
    assert store.command("ZRANGE", opened, 0, -1) == []
    assert store.command("ZRANGE", done, 0, -1) == [one.record.encode()]


# What cannot be read, and what the account may not do.


@pytest.mark.parametrize("words", [("SET", "text"), ("HSET", "v", "2"), ("HSET", "v", "1"), ("HSET", "other", "x")])
async def test_a_record_that_cannot_be_read_is_held_and_gets_an_expiry(
    records: Store, store: RedisServer, words: tuple[str, ...]
) -> None:
    one = claim()
    store.command(words[0], name(one), *words[1:])
    assert await records.reserve(one, RESEND) == Unreadable()
    assert await records.renew(one) is Renewal.STALE
    assert await complete(records, one) is Verdict.STALE
    assert await records.release(one) is Verdict.STALE
    assert await lose(records, one) is Verdict.STALE


async def test_without_the_right_to_ask_for_time_leases_and_windows_still_hold(
    records: Store, store: RedisServer
) -> None:
    store.command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-time")
    async with connected(store.url.replace("redis://", "redis://plain:secret@")) as plain:
        one = await reserve(plain, claim())
        assert one.first_ms == 0
        assert isinstance(await plain.reserve(rival(one), RESEND), Outstanding)
        await lose(plain, one)
        now = await plain.reserve(rival(one), RESEND)
        assert isinstance(now, Reserved)
        assert 3_590_000 < now.window_left_ms < 3_599_000
        await complete(plain, rival(one).owned(now))
        assert isinstance(await plain.reserve(rival(one), HOLD), Completed)
    store.command("ACL", "DELUSER", "plain")


async def test_scripts_flushed_are_run_by_their_text(records: Store, store: RedisServer) -> None:
    one = await reserve(records, claim())
    store.command("SCRIPT", "FLUSH")
    assert await complete(records, one) is Verdict.COMPLETED


async def test_full_store_renews_releases_and_replays(private_store: RedisServer) -> None:
    async with connected(private_store.url) as records:
        done = await reserve(records, claim())
        await complete(records, done)
        free, kept = await reserve(records, claim()), await reserve(records, claim())
        _, again = await second(records)
        private_store.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(StoreError, match="OOM") as refused:
            await records.reserve(claim(), HOLD)
        assert refused.value.applied is False
        with pytest.raises(StoreError, match="OOM"):
            await complete(records, kept)
        assert await records.renew(kept) is Renewal.RENEWED
        assert isinstance(await records.reserve(rival(done), HOLD), Completed)
        assert await records.release(free) is Verdict.RELEASED
        assert await records.release(again) is Verdict.UNKNOWN
        assert isinstance(await records.reserve(rival(again), HOLD), Held)
        private_store.command("CONFIG", "SET", "maxmemory", 0)
        assert await complete(records, kept) is Verdict.COMPLETED


@pytest.mark.case("C294")
@pytest.mark.parametrize("behind_s", [-600, 600])
async def test_wall_clocks_that_differ_by_minutes_change_nothing(
    records: Store, store: RedisServer, behind_s: int
) -> None:
    async with connected(store.url) as other:
        # Of this process alone: what is asked of `other` is told by a clock minutes away.
        other._wall_ms = lambda: (time.time_ns() // 1_000_000) - behind_s * 1000
        one = await reserve(records, claim())
        found = await other.reserve(rival(one), HOLD)
        assert isinstance(found, Outstanding)
        assert 59_000 < found.left_ms <= 60_000
        lapse(store, one)
        assert await other.reserve(rival(one), HOLD) == Held("owner-lost", "")
        later = await reserve(other, rival(one), RESEND)
        assert await records.renew(one) is Renewal.STALE
        assert await complete(other, later) is Verdict.COMPLETED
        assert isinstance(await records.reserve(rival(one), HOLD), Completed)
        assert 3_599_000 < pttl(store, one) <= 3_600_000
