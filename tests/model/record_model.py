"""The contract's table of transitions, written a second time: one record as a value, one method an event.

Knows no Redis and no clock; `now` is seconds of a clock that only ever goes on. It was written from the table, not from
the scripts, so that a mistake has to be made twice to go unnoticed.

    absent · outstanding (its lease alive, or over: told by time, never written) · completed · unknown
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sidecar.errors import Sent
from sidecar.message import Answer
from sidecar.record import (
    Completed,
    Found,
    Held,
    Later,
    Outstanding,
    Renewal,
    Reserved,
    Reused,
    Settled,
    Settlement,
    Verdict,
)
from sidecar.store import Claim, Terms


@dataclass(frozen=True, slots=True)
class Record:
    """One record that is there. Times are seconds; `changed_s`: its last reserve, renew or change.

    `expires_s`: when it goes by itself. `spent_s`: an upper bound of the time from the first attempt to the beginning
    of this one.
    """

    state: str
    owner: bytes
    fingerprint: bytes
    attempt: int
    earlier: bool
    lease_s: float
    hold_s: float
    first_s: float
    spent_s: float
    native: bytes
    credential: bytes
    accept_encoding: bytes
    changed_s: float
    expires_s: float
    why: str = ""
    seen: str = ""
    answer: Answer | None = None
    kept: bool = True
    resolved: bool = False

    def lease_left_s(self, now: float) -> float:
        """Until the lease is over; below zero where it is."""
        return self.changed_s + self.lease_s - now


@dataclass(slots=True)
class Model:
    """What the store should hold under one key. `knows_time` is False where the account may not ask for TIME."""

    knows_time: bool = True
    record: Record | None = None
    # Not zero: a first attempt at that time is one nobody knows the time of.
    now: float = 1000.0
    # How often the store has lost something since the key's first attempt.
    losses: int = field(default=0)

    # Time, and the store's own doing.

    def wait(self, seconds: float) -> None:
        """Time goes on; a record whose time is over goes."""
        self.now += seconds
        if self.record is not None and self.record.expires_s <= self.now:
            self.record = None

    def lose_data(self, to: Record | None = None) -> None:
        """The store forgets: everything, or what happened since an earlier state."""
        self.losses += 1
        self.record = to
        self.wait(0)

    def _settle_unknown(self, record: Record, **changes: object) -> None:
        self._put(replace(record, state="unknown", **changes), record.hold_s)  # type: ignore[arg-type]

    def _put(self, record: Record, expires_in_s: float) -> None:
        self.record = replace(record, changed_s=self.now, expires_s=self.now + expires_in_s)

    def _fresh(self, state: str, claim: Claim, *, first_s: float) -> Record:
        """What a claim says of itself, as a record of its own."""
        return Record(
            state=state,
            owner=claim.token,
            fingerprint=claim.fingerprint,
            attempt=claim.attempt,
            earlier=claim.earlier_unknown,
            lease_s=claim.lease_s,
            hold_s=claim.hold_for_s,
            first_s=first_s,
            spent_s=claim.spent_ms / 1000,
            native=claim.native,
            credential=claim.credential,
            accept_encoding=claim.accept_encoding,
            changed_s=self.now,
            expires_s=self.now + claim.hold_for_s,
        )

    # Arrivals.

    def reserve(self, claim: Claim, terms: Terms) -> Found:
        """An arrival asks."""
        record = self.record
        if record is None:
            first_s = self.now if self.knows_time else 0.0
            made = replace(self._fresh("outstanding", claim, first_s=first_s), attempt=1, earlier=False, spent_s=0.0)
            self._put(made, claim.hold_for_s)
            return self._reserved(terms)
        if record.fingerprint != claim.fingerprint:
            refused = record.answer is not None and not _success(record.answer) and not record.earlier
            return Reused(Sent.NO if record.state == "completed" and refused else Sent.UNKNOWN)
        if record.state == "completed":
            assert record.answer is not None
            return Completed(record.answer, record.kept, record.accept_encoding, record.resolved)
        if record.state == "outstanding" and record.owner == claim.token:
            self._put(record, record.hold_s)
            return self._reserved(terms)
        if record.state == "outstanding" and record.lease_left_s(self.now) >= 0:
            return Outstanding(_ms(record.lease_left_s(self.now)))
        return self._after_unknown(record, claim, terms)

    def _after_unknown(self, record: Record, claim: Claim, terms: Terms) -> Found:
        """The outcome is unknown: by record, or since the lease is over."""
        lost_owner = record.state == "outstanding"
        ended_s = record.changed_s + (record.lease_s if lost_owner else 0.0)
        why = "owner-lost" if lost_owner else record.why
        left_s = self._window_left_s(record, terms)
        if not terms.resend or left_s == 0 or record.credential != claim.credential:
            return Held(why, record.seen)
        if self.now - ended_s < terms.resend_after_s:
            return Later(_ms(terms.resend_after_s - (self.now - ended_s)))
        again = replace(
            record,
            state="outstanding",
            owner=claim.token,
            attempt=record.attempt + 1,
            earlier=True,
            why=why,
            lease_s=claim.lease_s,
            hold_s=claim.hold_for_s,
            accept_encoding=claim.accept_encoding,
            spent_s=record.spent_s + terms.longest_s + self.now - record.changed_s,
        )
        self._put(again, claim.hold_for_s)
        return self._reserved(terms, left_s)

    def _reserved(self, terms: Terms, left_s: float | None = None) -> Found:
        record = self.record
        assert record is not None
        if left_s is None:
            left_s = self._window_left_s(record, terms)
        window_ms = -1 if terms.window_s is None else _ms(left_s)
        return Reserved(
            record.attempt, record.earlier, record.native, _ms(record.first_s), _ms(record.spent_s), window_ms
        )

    def _window_left_s(self, record: Record, terms: Terms) -> float:
        """What is left of the provider's window, less its margin. Without TIME an upper bound of what has passed."""
        if terms.window_s is None:
            return float("inf")
        passed_s = self.now - record.first_s
        if not self.knows_time or record.first_s == 0:
            passed_s = record.spent_s + terms.longest_s + self.now - record.changed_s
        return max(0.0, terms.window_s - terms.margin_s - passed_s)

    # The owner, and who was one.

    def renew(self, claim: Claim) -> Renewal:
        """The exchange still runs."""
        record = self.record
        if record is None:
            self.record = self._fresh("outstanding", claim, first_s=claim.first_ms / 1000)
            return Renewal.RESTORED
        if record.state == "outstanding" and record.owner == claim.token:
            self._put(record, record.hold_s)
            return Renewal.RENEWED
        return Renewal.STALE

    def complete(self, claim: Claim, answer: Answer, *, kept: bool, ttl_s: float, age_s: float) -> Verdict:
        """A final answer: 2xx, or a refusal."""
        record = self.record
        if record is None:
            if age_s >= ttl_s:
                return Verdict.STALE
            record = self._fresh("outstanding", claim, first_s=claim.first_ms / 1000)
        if record.state == "completed":
            return Verdict.COMPLETED if record.owner == claim.token else Verdict.STALE
        if not _success(answer):
            if record.owner != claim.token:
                return Verdict.STALE
            if record.earlier:
                # A refusal proves nothing about the attempt before.
                self._settle_unknown(record, why=record.why or "answer-lost")
                return Verdict.UNKNOWN
        done = replace(
            record,
            state="completed",
            owner=claim.token,
            answer=answer if kept else replace(answer, content=b""),
            kept=kept,
            accept_encoding=claim.accept_encoding,
            why="",
            seen="",
        )
        self._put(done, ttl_s)
        return Verdict.COMPLETED

    def release(self, claim: Claim) -> Verdict:
        """This attempt surely sent nothing, or its answer frees the key."""
        record = self.record
        if record is None:
            return Verdict.RELEASED
        if record.owner != claim.token or record.state == "completed":
            return Verdict.STALE
        if record.state == "unknown":
            # Its owner has said before that it lost its answer: a release behind that is one come late.
            return Verdict.UNKNOWN
        if record.earlier:
            self._settle_unknown(record, why=record.why or "owner-lost")
            return Verdict.UNKNOWN
        self.record = None
        return Verdict.RELEASED

    def lose(self, claim: Claim, *, seen: str, ttl_s: float, age_s: float) -> Verdict:
        """Bytes left, and no complete answer came."""
        record = self.record
        if record is None:
            if age_s >= ttl_s:
                return Verdict.STALE
            made = self._fresh("unknown", claim, first_s=claim.first_ms / 1000)
            self._settle_unknown(made, why="answer-lost", seen=seen)
            return Verdict.UNKNOWN
        if record.state == "completed":
            return Verdict.STALE
        if record.owner != claim.token:
            self.record = replace(record, earlier=True)
            return Verdict.STALE
        if record.state == "outstanding":
            self._settle_unknown(record, why="answer-lost", seen=seen)
        return Verdict.UNKNOWN

    # The operator.

    def sent(self, token: bytes, answer: Answer, *, ttl_s: float) -> Settled:
        """The operator knows that the mail was sent, and has no answer of the provider's."""
        record = self.record
        if record is None:
            return Settled(Settlement.ABSENT, 0)
        if record.state == "completed":
            return Settled(Settlement.AGAIN if record.resolved else Settlement.SETTLED, 0)
        if (left_s := self._alive_s(record)) is not None:
            return Settled(Settlement.OUTSTANDING, _ms(left_s))
        done = replace(
            record,
            state="completed",
            owner=token,
            answer=answer,
            kept=False,
            resolved=True,
            accept_encoding=b"",
            why="",
            seen="",
        )
        self._put(done, ttl_s)
        return Settled(Settlement.COMPLETED, 0)

    def not_sent(self, *, quiet_s: float) -> Settled:
        """The operator knows that nothing was sent; not believed before `quiet_s` from the last attempt's end."""
        record = self.record
        if record is None:
            return Settled(Settlement.ABSENT, 0)
        if record.state == "completed":
            return Settled(Settlement.SETTLED, 0)
        if (left_s := self._alive_s(record)) is not None:
            return Settled(Settlement.OUTSTANDING, _ms(left_s))
        ended_s = record.changed_s + (record.lease_s if record.state == "outstanding" else 0.0)
        if self.now - ended_s < quiet_s:
            return Settled(Settlement.EARLY, _ms(quiet_s - (self.now - ended_s)))
        self.record = None
        return Settled(Settlement.RELEASED, 0)

    def forget(self) -> Settled:
        """The operator frees the key, whatever is known of it."""
        record = self.record
        if record is None:
            return Settled(Settlement.ABSENT, 0)
        if (left_s := self._alive_s(record)) is not None:
            return Settled(Settlement.OUTSTANDING, _ms(left_s))
        self.record = None
        return Settled(Settlement.FORGOTTEN, 0)

    def _alive_s(self, record: Record) -> float | None:
        """What is left of a lease that runs: nobody settles what somebody may be sending right now."""
        left_s = record.lease_left_s(self.now)
        return left_s if record.state == "outstanding" and left_s >= 0 else None


def _success(answer: Answer) -> bool:
    return 200 <= answer.status < 300


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
