"""What the store found at `reserve`, and what to do about it: pure, no store and no clock.

The transitions themselves are the Lua scripts in `lua/`, one file each; nothing here repeats them. This file
knows the words both sides use and turns what was found into one decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sidecar.config import Concurrent
from sidecar.errors import Outcome, ProblemError, Sent
from sidecar.message import Answer, Field, Fields, RecordId


class Why(StrEnum):
    """Why an outcome is unknown: its owner vanished, or its answer did."""

    OWNER_LOST = "owner-lost"
    ANSWER_LOST = "answer-lost"


class Verdict(StrEnum):
    """What the store says a record is after an owner's last word."""

    COMPLETED = "completed"
    RELEASED = "released"
    UNKNOWN = "unknown"
    STALE = "stale"


class State(StrEnum):
    """What a record is to the operator: outstanding with its lease over counts as unknown."""

    OUTSTANDING = "outstanding"
    UNKNOWN = "unknown"
    COMPLETED = "completed"
    UNREADABLE = "unreadable"


class Settlement(StrEnum):
    """What the store says to the operator who settles or forgets a record."""

    COMPLETED = "completed"
    RELEASED = "released"
    FORGOTTEN = "forgotten"
    ABSENT = "absent"
    AGAIN = "again"
    SETTLED = "settled"
    OUTSTANDING = "outstanding"
    EARLY = "early"
    UNREADABLE = "unreadable"


class Renewal(StrEnum):
    """What the store says to an owner whose exchange still runs."""

    RENEWED = "renewed"
    RESTORED = "restored"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Reserved:
    """The caller owns the record for one attempt.

    `native`: the key the first attempt handed to the provider. `window_left_ms`: how long the provider still
    knows it, -1 without such a window. `first_ms`: the first attempt's time by the server's clock, 0 where unknown.
    """

    attempt: int
    earlier_unknown: bool
    native: bytes
    first_ms: int
    spent_ms: int
    window_left_ms: int


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Another attempt runs; its lease ends in `left_ms` unless renewed."""

    left_ms: int


@dataclass(frozen=True, slots=True)
class Later:
    """The outcome is unknown and may be tried again, but not before `left_ms`."""

    left_ms: int


@dataclass(frozen=True, slots=True)
class Held:
    """The outcome is unknown and nothing may be sent. `seen`: the status of a cut answer, if any."""

    why: str
    seen: str


@dataclass(frozen=True, slots=True)
class Completed:
    """The first final answer. `kept` is False where its content was not stored.

    `resolved`: nobody has the answer, the operator said that the mail was sent; then the answer's content is the
    provider's id of the mail, as far as the operator told it.
    """

    answer: Answer
    kept: bool
    accept_encoding: bytes
    resolved: bool = False


@dataclass(frozen=True, slots=True)
class Reused:
    """The record is of another request. `sent`: whether a mail may have left under this key."""

    sent: Sent


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The record is of a foreign version or corrupt: it counts as unknown, and nothing is sent."""


Found = Reserved | Outstanding | Later | Held | Completed | Reused | Unreadable


@dataclass(frozen=True, slots=True)
class Shown:
    """One record as the operator sees it; of one that cannot be read only `record`, `state` and `expires_ms` are known.

    `expires_ms`: until it expires, -1 where it never does. `now_ms` and `first_ms` are of the server's clock, 0 where
    unknown. `lease_left_ms`: of an outstanding one, else 0. `resolved`: the operator settled it. `answer`: where asked
    for, of a completed one.
    """

    record: RecordId
    state: State
    expires_ms: int
    now_ms: int = 0
    first_ms: int = 0
    attempt: int = 0
    earlier_unknown: bool = False
    lease_left_ms: int = 0
    owner: bytes = b""
    why: str = ""
    seen: str = ""
    status: int = 0
    algorithm: str = ""
    key_text: bytes = b""
    kept: bool = False
    resolved: bool = False
    provider_id: str = ""
    content_bytes: int = 0
    answer: Answer | None = None


def shown(record: RecordId, reply: list[Any]) -> Shown | None:
    """The record in a reply of `show.lua`; None where there is none."""
    word = reply[0]
    if word == b"absent":
        return None
    unreadable = Shown(record, State.UNREADABLE, reply[1])
    if word == b"unreadable":
        return unreadable
    try:
        return _shown(unreadable, reply)
    except (ValueError, ArithmeticError):
        return unreadable


def _shown(bare: Shown, reply: list[Any]) -> Shown:
    _, left_ms, now_ms, content_bytes, *texts = reply
    state, owner, attempt, earlier, lease, hold, algorithm, first, why, seen, status, key, kept, resolved, pid = texts[
        :15
    ]
    name = State(state.decode())
    lease_left_ms = int(float(lease) - float(hold)) + left_ms if name is State.OUTSTANDING else 0
    if name is State.OUTSTANDING and lease_left_ms < 0:
        name, why, lease_left_ms = State.UNKNOWN, Why.OWNER_LOST.value.encode(), 0
    answer = None
    if len(texts) > 15 and name is State.COMPLETED:
        reason, fields, content = texts[15:]
        answer = Answer(int(status), reason, unpack_fields(fields), content if kept == b"1" else b"")
    return replace(
        bare,
        state=name,
        now_ms=now_ms,
        first_ms=int(float(first)),
        attempt=int(attempt),
        earlier_unknown=earlier == b"1",
        lease_left_ms=lease_left_ms,
        owner=owner,
        why=why.decode("ascii") if name is State.UNKNOWN else "",
        seen=seen.decode("ascii") if name is State.UNKNOWN else "",
        status=int(status) if name is State.COMPLETED else 0,
        algorithm=algorithm.decode("ascii"),
        key_text=key,
        kept=kept == b"1",
        resolved=resolved == b"1",
        provider_id=pid.decode("ascii"),
        content_bytes=content_bytes if kept == b"1" else 0,
        answer=answer,
    )


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of an operator's word. `left_ms`: of the lease, or until "not sent" may be said; else 0."""

    word: Settlement
    left_ms: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """Send it: the caller owns the record."""

    reserved: Reserved


@dataclass(frozen=True, slots=True)
class Replay:
    """Answer with the stored answer."""

    completed: Completed


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again soon; `problem` is the answer once the wait is over."""

    problem: ProblemError


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with a problem; nothing is sent."""

    problem: ProblemError


Decision = Forward | Replay | Wait | Refuse


def sent_of(state: str, status: str, earlier_unknown: bool) -> Sent:
    """May a mail have left under the key of such a record? Only a recorded refusal says no."""
    refused = state == "completed" and not status.startswith("2") and not earlier_unknown
    return Sent.NO if refused else Sent.UNKNOWN


def outstanding_problem(left_ms: int) -> ProblemError:
    """409 `request-outstanding`: look again when the lease that runs now would be over."""
    return ProblemError(
        Outcome.REQUEST_OUTSTANDING,
        "The first request with this key is not answered yet. Repeat the same request after Retry-After seconds:"
        " if the first one's answer comes, it is the repeat's too.",
        retry_after_s=max(1.0, left_ms / 1000),
    )


def unknown_problem(why: str, seen: str = "") -> ProblemError:
    """504 `outcome-unknown` for a record that stands as unknown."""
    how = {
        Why.OWNER_LOST.value: "The sidecar that sent it stopped before an answer was recorded.",
        Why.ANSWER_LOST.value: "It was sent, and no complete answer came back.",
    }.get(why, "Its record cannot be read.")
    head = f" The provider had begun to answer with status {seen}." if seen else ""
    return ProblemError(
        Outcome.OUTCOME_UNKNOWN,
        f"An earlier request with this key may have sent a mail. {how}{head} It is not sent again. Look for the mail in"
        " the provider's log, and settle the key: `sidecar keys show KEY`, then `sidecar keys resolve`.",
    )


def resolved_problem(completed: Completed) -> ProblemError:
    """`response-not-kept` for a key that the operator settled as sent: its answer never came."""
    told = completed.answer.content.decode("ascii", "replace")
    named = f" The provider's id of it is {told}." if told else ""
    return ProblemError(
        Outcome.RESPONSE_NOT_KEPT,
        f"This key's mail was sent: the operator looked, and settled it so. Its answer never came.{named} Nothing is"
        " sent again.",
        status=completed.answer.status,
        sent=Sent.UNKNOWN,
    )


def reused_problem(sent: Sent, status: int) -> ProblemError:
    """422 (or the route's own status) `key-reused`."""
    return ProblemError(
        Outcome.KEY_REUSED,
        "This key belongs to a request with other content, another target or another method. Use a new key for a new"
        " mail.",
        status=status,
        sent=sent,
    )


def decide(found: Found, *, concurrent: Concurrent, mismatch_status: int) -> Decision:
    """What to do about what the store found. `mismatch_status`: 422, or the route's 409."""
    match found:
        case Reserved():
            return Forward(found)
        case Completed():
            return Replay(found)
        case Outstanding(left_ms) | Later(left_ms):
            problem = outstanding_problem(left_ms)
            waits = concurrent is Concurrent.WAIT and isinstance(found, Outstanding)
            return Wait(problem) if waits else Refuse(problem)
        case Held(why, seen):
            return Refuse(unknown_problem(why, seen))
        case Unreadable():
            return Refuse(unknown_problem("unreadable"))
        case Reused(sent):
            return Refuse(reused_problem(sent, mismatch_status))


def pack_fields(fields: Fields) -> bytes:
    """Fields as they stand in a record: one `name: value` line each, which no field can hold itself."""
    return b"".join(b"%b: %b\r\n" % field for field in fields)


def unpack_fields(packed: bytes) -> Fields:
    """The fields of a record.

    Raises: ValueError where a line is none.
    """
    return tuple(_field(line) for line in packed.split(b"\r\n")[:-1])


def _field(line: bytes) -> Field:
    name, colon, value = line.partition(b": ")
    if not colon:
        raise ValueError("a stored field has no colon")
    return name, value
