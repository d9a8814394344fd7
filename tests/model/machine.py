"""Hypothesis decides who does what when; model and store do it together and must say the same after every step.

Beside the comparison stand the promises themselves, looked at in the store alone: they hold even where model and
scripts should agree on something wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from harness.stores import claim, name
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.attempts import (
    HOLD_S,
    LEASE_S,
    NEAR_S,
    OWNERS,
    QUIET_S,
    STEP_S,
    TERMS,
    TTL_S,
    Attempt,
    answers,
    owners,
)
from model.record_model import Model, Record
from model.world import Image, World
from sidecar.message import Answer
from sidecar.record import Found, Later, Outstanding, Renewal, Reserved, Settled, Settlement, Verdict


class RecordMachine(RuleBasedStateMachine):
    """Several attempts under one key, on the store of `world`, which a class of its own names for each run."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(knows_time=self.world.knows_time)
        self.attempts: list[Attempt] = []
        self.base = replace(claim(), lease_s=LEASE_S, hold_for_s=HOLD_S)
        self.name = name(self.base)
        self.saved: tuple[Image, Record | None, float] | None = None
        # What the promises are measured by: who said that its answer was lost, and whether somebody interfered.
        self.doubts: set[bytes] = set()
        self.operated = False
        self.listed_until_s = 0.0
        self.before: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.world.server.flush()

    @initialize(forgets=st.sampled_from((False, False, True)), operates=st.sampled_from((False, False, True)))
    def choose(self, forgets: bool, operates: bool) -> None:
        """Most runs leave the promises unconditional: a store that keeps its word, and no operator."""
        self.forgets, self.operates = forgets, operates

    def _attempt(self, number: int) -> Attempt:
        return self.attempts[number % len(self.attempts)]

    def _look(self) -> None:
        self.before = self.world.record(self.name)

    # Arrivals.

    @precondition(lambda self: len(self.attempts) < OWNERS)
    @rule(terms=st.sampled_from(sorted(TERMS)), other=st.sampled_from(("", "", "", "", "content", "account")))
    def arrive(self, terms: str, other: str) -> None:
        """A new attempt asks."""
        number = len(self.attempts) + 1
        made = replace(
            self.base,
            token=b"attempt-%d" % number,
            native=b"native-%d" % number,
            accept_encoding=b"coding-%d" % number,
            fingerprint=b"other" if other == "content" else self.base.fingerprint,
            credential=b"other" if other == "account" else self.base.credential,
        )
        one = Attempt(made, made, made, TERMS[terms], self.model.now)
        self.attempts.append(one)
        found = self._reserve(one)
        if isinstance(found, Reserved):
            one.granted = True
            one.alive_until_s = self.model.now + LEASE_S
            told = self.model.record
            assert told is not None
            one.real = one.real.owned(found)
            first_ms, spent_ms = round(told.first_s * 1000), round(told.spent_s * 1000)
            one.told = replace(one.real, first_ms=first_ms, spent_ms=spent_ms)

    @precondition(lambda self: self.attempts)
    @rule(number=owners)
    def ask_again(self, number: int) -> None:
        """The reserve of an attempt is applied once more, or only now: its reply was lost, or it was given up on."""
        one = self._attempt(number)
        found = self._reserve(one)
        if isinstance(found, Reserved) and one.granted and not one.ended:
            one.alive_until_s = self.model.now + LEASE_S

    @precondition(lambda self: len(self.attempts) < OWNERS)
    @rule()
    def take_over(self) -> None:
        """The step that most stories need: the lease ends, and another attempt begins."""
        self._wait(4 * STEP_S)
        self._as_it_was()
        self.arrive("anyway", "")

    def _reserve(self, one: Attempt) -> Found:
        self._look()
        real = self.world.do(self.world.store.reserve(one.asked, one.terms))
        told = self.model.reserve(one.asked, one.terms)
        self._same_found(real, told)
        mine = self.before.get("owner") == one.real.token and self.before.get("state") == "outstanding"
        if isinstance(real, Reserved) and not mine:
            self.listed_until_s = self.model.now + HOLD_S
            if self.before.get("state") in ("outstanding", "unknown"):
                assert one.terms.resend, "under hold what was outstanding or unknown is never reserved anew"
        return real

    def _same_found(self, real: Found, told: Found) -> None:
        """Equal, but for the ms that pass while the real one is asked."""
        assert type(real) is type(told), (real, told)
        if isinstance(real, Outstanding | Later):
            assert isinstance(told, Outstanding | Later)
            assert abs(real.left_ms - told.left_ms) < NEAR_S * 1000, (real, told)
        elif isinstance(real, Reserved):
            assert isinstance(told, Reserved)
            same = ("attempt", "earlier_unknown", "native")
            assert [getattr(real, it) for it in same] == [getattr(told, it) for it in same], (real, told)
            assert abs(real.spent_ms - told.spent_ms) < NEAR_S * 1000, (real, told)
            self._same_window(real.window_left_ms, told.window_left_ms, exactly=real.earlier_unknown)
        else:
            assert real == told

    def _same_window(self, real_ms: int, told_ms: int, *, exactly: bool) -> None:
        """Of a first attempt it only matters whether there is a window."""
        assert (real_ms == -1) == (told_ms == -1), (real_ms, told_ms)
        if exactly:
            assert abs(real_ms - told_ms) < NEAR_S * 1000, (real_ms, told_ms)

    # Owners, and who was one. Any of them may say anything at any time: a command given up on is applied when it likes.

    @precondition(lambda self: any(one.granted for one in self.attempts))
    @rule(number=owners)
    def renew(self, number: int) -> None:
        """The exchange of an attempt still runs, or a renewal comes late."""
        one = self._granted(number)
        self._look()
        real = self.world.do(self.world.store.renew(one.real))
        assert real is self.model.renew(one.told)
        if real is not Renewal.STALE and not one.ended:
            one.alive_until_s = self.model.now + LEASE_S
        self._not_the_owner(one)

    @precondition(lambda self: any(one.granted for one in self.attempts))
    @rule(number=owners, answer=answers, kept=st.booleans())
    def complete(self, number: int, answer: Answer, kept: bool) -> None:
        """A final answer came."""
        one = self._granted(number)
        age_s = self.model.now - one.born_s
        success = answer.status < 300
        given = answer if kept else replace(answer, content=b"")
        self._look()
        real = self.world.do(
            self.world.store.complete(one.real, given, kept=kept, refusal=not success, ttl_s=TTL_S, age_s=age_s)
        )
        assert real is self.model.complete(one.told, given, kept=kept, ttl_s=TTL_S, age_s=age_s)
        one.ended = True
        after = self.world.record(self.name)
        if success and (self.before or age_s < TTL_S):
            assert after["state"] == "completed", "a success is a fact, whoever brings it"
        if not success:
            self._not_the_owner(one)
            settled = after.get("state") == "completed" and self.before.get("state") != "completed"
            if settled and not self._disturbed:
                assert not self.doubts - {one.real.token}, "a refusal settled a key that may have been accepted"

    @precondition(lambda self: any(one.granted for one in self.attempts))
    @rule(number=owners, seen=st.sampled_from((None, 200, 502)))
    def lose(self, number: int, seen: int | None) -> None:
        """The answer of an attempt was lost."""
        one = self._granted(number)
        age_s = self.model.now - one.born_s
        self._look()
        real = self.world.do(self.world.store.lose(one.real, seen=seen, ttl_s=TTL_S, age_s=age_s))
        told = self.model.lose(one.told, seen="" if seen is None else str(seen), ttl_s=TTL_S, age_s=age_s)
        assert real is told
        one.ended = True
        if self.before and self.before["state"] != "completed":
            self.doubts.add(one.real.token)
        self._not_the_owner(one)

    @precondition(lambda self: self.attempts)
    @rule(number=owners)
    def release(self, number: int) -> None:
        """An attempt surely sent nothing; also one whose reserve was given up on."""
        one = self._attempt(number)
        self._look()
        real = self.world.do(self.world.store.release(one.real))
        assert real is self.model.release(one.told)
        one.ended = True
        if real is Verdict.RELEASED and not self._disturbed and self.before:
            assert not self.doubts - {one.real.token}, "a key that may have been accepted was freed"
        self._not_listed_when(real is Verdict.RELEASED)
        self._not_the_owner(one)

    def _not_listed_when(self, freed: bool) -> None:
        if freed and self.before:
            assert self.world.listed(self.base.record, self.base.route) == (False, False)

    def _granted(self, number: int) -> Attempt:
        granted = [one for one in self.attempts if one.granted]
        return granted[number % len(granted)]

    def _not_the_owner(self, one: Attempt) -> None:
        """Who is not the owner never frees and never prolongs."""
        before = self.before
        if not before or before["owner"] == one.real.token:
            return
        after = self.world.record(self.name)
        assert after, "freed by somebody else"
        assert after["left_s"] < before["left_s"] + NEAR_S, "prolonged by somebody else"
        assert (after["state"], after["owner"]) == (before["state"], before["owner"])

    # Time, and the store's own doing.

    @rule(steps=st.integers(1, 6))
    def wait(self, steps: int) -> None:
        """Time goes on: leases end, windows close, records expire."""
        self._wait(steps * STEP_S)

    def _wait(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.model.wait(seconds)
        for one in self.attempts:
            if one.real.first_ms:
                one.real = replace(one.real, first_ms=one.real.first_ms - round(seconds * 1000))

    @rule()
    def let_the_lease_end(self) -> None:
        """Whoever owns the record owns it no more."""
        self._wait(4 * STEP_S)

    @rule()
    def let_the_window_end(self) -> None:
        """And the time of an answer, though not that of what is unsettled."""
        self._wait(18 * STEP_S)

    @precondition(lambda self: self.forgets)
    @rule()
    def forget_everything(self) -> None:
        """The store is flushed, or replaced by an empty one."""
        self.world.server.flush()
        self.model.lose_data()

    @precondition(lambda self: self.forgets and self.saved is None)
    @rule()
    def remember(self) -> None:
        """A replica has everything up to here."""
        self.saved = (self.world.image(), self.model.record, self.model.now)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def fall_back(self) -> None:
        """The replica takes over."""
        assert self.saved is not None
        image, record, at_s = self.saved
        self.world.become(image, self.model.now - at_s)
        self.model.lose_data(record)
        self.saved = None

    # The operator.

    @precondition(lambda self: self.operates)
    @rule()
    def resolve_sent(self) -> None:
        """The operator says that the mail was sent."""
        operator = replace(self.base, token=b"operator", algorithm=b"off", fingerprint=b"")
        real = self.world.do(
            self.world.ledger.sent(operator, None, status=200, provider_id="p-1", ttl_s=TTL_S, forced=False)
        )
        # The same person's word a second time is another command: only a repeat has the same token.
        record = self.model.record
        repeated = record is not None and record.owner == b"operator"
        told = self.model.sent(b"operator", Answer(200, b"", (), b"p-1"), ttl_s=TTL_S)
        self._same_settled(real, Settled(Settlement.COMPLETED) if repeated else told)

    @precondition(lambda self: self.operates)
    @rule()
    def resolve_not_sent(self) -> None:
        """The operator says that nothing was sent."""
        self._look()
        real = self.world.do(self.world.ledger.not_sent(replace(self.base, token=b"op"), quiet_s=QUIET_S, forced=False))
        self._same_settled(real, self.model.not_sent(quiet_s=QUIET_S))
        self._not_listed_when(real.word is Settlement.RELEASED)

    @precondition(lambda self: self.operates)
    @rule()
    def forget(self) -> None:
        """The operator frees the key."""
        self._look()
        real = self.world.do(self.world.ledger.forget(replace(self.base, token=b"op")))
        self._same_settled(real, self.model.forget())
        self._not_listed_when(real.word is Settlement.FORGOTTEN)

    def _same_settled(self, real: Settled, told: Settled) -> None:
        self.operated = True
        assert real.word is told.word
        assert abs(real.left_ms - told.left_ms) < NEAR_S * 1000, (real, told)

    # After each step.

    @property
    def _disturbed(self) -> bool:
        return self.operated or self.model.losses > 0

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        """Every field and the expiry."""
        real, told = self.world.record(self.name), self.model.record
        if told is None:
            assert real == {}, real
            return
        assert real, told
        left_s = real.pop("left_s")
        assert real == {field: getattr(told, field) for field in real}
        assert abs(left_s - (told.expires_s - self.model.now)) < NEAR_S, (left_s, told)

    @invariant()
    def every_key_expires(self) -> None:
        """Lists included."""
        assert self.world.eternal() == []

    @invariant()
    def a_record_is_in_the_list_of_its_state(self) -> None:
        """And in no other."""
        told = self.model.record
        # A renewal keeps a record and does not touch its list: minutes, after the weeks of `hold_for`.
        if told is None or (told.state != "completed" and self.model.now >= self.listed_until_s):
            return
        settled = told.state == "completed"
        assert self.world.listed(self.base.record, self.base.route) == (not settled, settled)

    @invariant()
    def never_two_owners_that_may_write(self) -> None:
        """As their own clocks show it, which is all that the fence asks."""
        alive = [one for one in self.attempts if one.granted and not one.ended and one.alive_until_s > self.model.now]
        assert len(alive) <= 1 or self._disturbed, alive

    @invariant()
    def a_completed_answer_never_changes(self) -> None:
        """Nor is it prolonged; it goes by its own expiry, or the operator's word."""
        self._as_it_was()

    def _as_it_was(self) -> None:
        now = self.world.record(self.name)
        was, self.last = self.last, now
        if not now:
            self.doubts.clear()  # what comes under this key is a new mail
        if was.get("state") == "completed" and now and not self._disturbed:
            assert now["left_s"] < was["left_s"] + NEAR_S
            assert {**now, "left_s": 0} == {**was, "left_s": 0}
