"""What a run leaves behind: the upstream's log, the clients' log, the faults, and what stands in the store at the end.

All times are seconds of one clock, that of the runner's loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from sidecar.message import Answer, Fields, first

PROBLEM = "urn:email-idempotency-sidecar:problem:"
MARK = b"idempotent-replayed"
# The upstream numbers its answers in this field, so that each can be told from every other.
NUMBER = b"x-upstream"
# Of one hop, or made anew for each answer.
MADE = (b"date", b"content-length", b"transfer-encoding", b"connection", b"keep-alive", MARK)


class End(StrEnum):
    """How an arrival ended for its client. `unanswered`: it waited far longer than any exchange can last."""

    ANSWERED = "answered"
    LEFT = "left"
    REFUSED = "refused"
    CUT = "cut"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True)
class RouteRules:
    """What the judge has to know of a route. `final` and `lost`: statuses beside 2xx; `total_s`: `timeout.total`."""

    native: bool
    final: frozenset[int]
    lost: frozenset[int]
    total_s: float


@dataclass(slots=True)
class Arrival:
    """One request as its client knows it. `whole`: its content was written to the end."""

    number: int
    route: str
    key: str
    sidecar: int
    digest: str
    sent_s: float
    whole: bool = True
    ended_s: float | None = None
    end: End | None = None
    answer: Answer | None = None

    @property
    def problem(self) -> dict[str, Any]:
        """The members of the problem it was answered with; empty for the upstream's answers and replays."""
        if self.answer is None or b"json" not in (first(self.answer.fields, b"content-type") or b""):
            return {}
        try:
            members = json.loads(self.answer.content)
        except ValueError:
            return {}
        ours = isinstance(members, dict) and str(members.get("type", "")).startswith(PROBLEM)
        return members if ours else {}

    @property
    def slug(self) -> str:
        """The last part of its problem's type, or empty."""
        return str(self.problem.get("type", "")).removeprefix(PROBLEM)

    @property
    def replayed(self) -> bool:
        """Whether its answer carries the mark of a replay."""
        return self.answer is not None and first(self.answer.fields, MARK) == b"true"

    @property
    def upstream(self) -> int | None:
        """The number the upstream gave its answer; None for answers of the sidecar."""
        return None if self.answer is None else number_of(self.answer)

    @property
    def success(self) -> bool:
        """Whether it was answered 2xx, with or without content."""
        return self.answer is not None and 200 <= self.answer.status < 300


@dataclass(slots=True)
class Request:
    """One request as the upstream read it. `answer`: handed to the transport whole while the other side stood.

    `native`: the bytes of the provider's own key; `mailed`: accepted, and no repeat of an accepted one.
    """

    number: int
    route: str
    key: str
    native: bytes
    arrival: int
    begun_s: float
    fate: str = ""
    digest: str = ""
    read_s: float | None = None
    accepted_s: float | None = None
    mailed: bool = False
    answer: Answer | None = None
    answered_s: float | None = None


@dataclass(slots=True)
class Fault:
    """Something done from outside. `target`: the number of the sidecar, -1 for store or upstream.

    `code`: the exit code of a process that was told to end, negative for a signal.
    """

    kind: str
    target: int
    begin_s: float
    end_s: float | None = None
    code: int | None = None

    @property
    def ends_an_owner(self) -> bool:
        """Whether it may keep an owner from settling: for ever, for longer than a lease, or as its exit code said."""
        return self.kind in ("kill", "stop", "doze", "now") or (self.kind == "term" and self.code != 0)

    def during(self, begin_s: float, end_s: float) -> bool:
        """Whether it overlaps a time."""
        return self.begin_s <= end_s and (self.end_s is None or self.end_s >= begin_s)


@dataclass(frozen=True, slots=True)
class Left:
    """A record as it stands in the store at the end. `listed`: in the list of its state, and in no other."""

    route: str
    key: str
    state: str
    lease_over: bool
    listed: bool
    why: str = ""
    attempt: int = 1

    @property
    def open(self) -> bool:
        """Whether nobody knows its outcome."""
        return self.state == "unknown" or (self.state == "outstanding" and self.lease_over)


@dataclass
class History:
    """Everything the judge reads.

    `stuck`: keys that gave neither a final answer nor `outcome-unknown` at the end. `eternal`: names of keys of the
    store that were seen without an expiry. `faults_of_ours`: lines of the sidecars' logs that may never be written,
    and exit codes that may not be.
    """

    rules: dict[str, RouteRules]
    arrivals: list[Arrival] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    eternal: list[str] = field(default_factory=list)
    faults_of_ours: list[str] = field(default_factory=list)
    # How long after an arrival has ended its owner may still be busy with it.
    grace_s: float = 5.0


class Indexed:
    """A history by key and by number, as it is now."""

    def __init__(self, history: History) -> None:
        """Takes what has been logged so far."""
        self.history = history
        self.arrivals = list(history.arrivals)
        self.requests = list(history.requests)

    @cached_property
    def ended(self) -> list[Arrival]:
        """The arrivals that were answered."""
        return [one for one in self.arrivals if one.answer is not None and one.ended_s is not None]

    @cached_property
    def by_key(self) -> dict[str, list[Request]]:
        """The upstream's requests of each key, in the order in which they began."""
        found: dict[str, list[Request]] = {}
        for one in self.requests:
            found.setdefault(one.key, []).append(one)
        return found

    @cached_property
    def by_arrival(self) -> dict[int, list[Request]]:
        """The upstream's requests of each arrival: more than one where the sidecar tried again itself."""
        found: dict[int, list[Request]] = {}
        for one in self.requests:
            found.setdefault(one.arrival, []).append(one)
        return found

    @cached_property
    def by_number(self) -> dict[int, Request]:
        """The upstream's requests by their number."""
        return {one.number: one for one in self.requests}

    @cached_property
    def arrivals_of(self) -> dict[str, list[Arrival]]:
        """The arrivals of each key."""
        found: dict[str, list[Arrival]] = {}
        for one in self.arrivals:
            found.setdefault(one.key, []).append(one)
        return found


def number_of(answer: Answer) -> int | None:
    """The number the upstream gave an answer."""
    text = first(answer.fields, NUMBER)
    return int(text) if text is not None else None


def substance(answer: Answer) -> tuple[int, bytes, Fields, bytes]:
    """What of an answer may never change: status, reason, fields in order and count, content."""
    kept = tuple((name, value) for name, value in answer.fields if name.lower() not in MADE)
    return answer.status, answer.reason, kept, answer.content


def accepted(requests: Iterable[Request]) -> list[Request]:
    """Those the upstream accepted."""
    return [one for one in requests if one.accepted_s is not None]
