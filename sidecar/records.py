"""The operator's view of the records: lists, look-ups, and settling what nobody knows. Speaks no HTTP.

A list is made of the lists of 256 tags. However many records there are, it takes one command a tag and route, a few
more where a tag has more than its share, and one for each record that is looked at.
"""

from __future__ import annotations

import asyncio
import heapq
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sidecar.config import Policy, Route
from sidecar.errors import OperatorError, Refusal
from sidecar.ledger import PARTS, Ledger, Part, nobody
from sidecar.message import Answer, RecordId
from sidecar.record import Settled, Settlement, Shown, State
from sidecar.store import Claim

S = TypeVar("S")
T = TypeVar("T")

TAGS = tuple(f"{number:02x}" for number in range(256))
ID = re.compile("[0-9a-f]{40}")
MOST = 200
# Commands under way at once: more would stand before the mails' commands at the server.
AT_ONCE = 32
# What is fetched of one tag's list at first, and how many records one request looks at before it gives a cursor.
PIECE = 8
LOOKED_AT = 1000
# How many records of one list the server looks at in one go, for a key's text: about a millisecond.
IN_ONE_GO = 2000
# Entries that left their list longer ago have no record any more, whatever our clock and the server's differ.
HOUR_MS = 3_600_000


class Underway(Protocol):
    """An attempt whose outcome the store has not been told."""

    @property
    def claim(self) -> Claim:
        """What it says of itself."""
        ...


class Running(Protocol):
    """The attempts of this sidecar: `flights.Flights`, or what the workers say of theirs."""

    def get(self, record: RecordId) -> Underway | None:
        """The one under a record, if there is one."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a list was left: the time of an entry, in ms, and its record."""

    at_ms: int
    record: RecordId

    def __str__(self) -> str:
        """As a cursor."""
        return f"{self.at_ms}-{self.record}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """A cursor read. Raises: ValueError."""
        at_ms, dash, record = text.partition("-")
        if not dash or not at_ms.isascii() or not at_ms.isdigit() or len(at_ms) > 16 or not ID.fullmatch(record):
            raise ValueError("not a cursor of ours")
        return cls(int(at_ms), RecordId(record))


@dataclass(frozen=True, slots=True)
class Found:
    """A record and the route whose lists hold it; empty where no list of a known route does. `here`: it runs here."""

    route: str
    shown: Shown
    here: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """A part of a list. `rest`: where the next part begins, None at the end."""

    found: tuple[Found, ...]
    rest: Position | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the operator has of a mail that was sent. `answer`: what retries get, where the operator has it."""

    provider_id: str = ""
    answer: Answer | None = None


class _Entries:
    """The entries of one tag's list, newest first, fetched piece by piece."""

    def __init__(self, tag: str, route: str, part: Part) -> None:
        self.route = route
        self._tag, self._part = tag, part
        self._known: list[Position] = []
        self._skip = 0
        self._ended = False

    async def fetch(self, ledger: Ledger, below: Position | None, least_ms: int) -> None:
        """Make sure that the next entry is known, or that there is none."""
        most_ms = None if below is None else below.at_ms
        while not self._known and not self._ended:
            got = await ledger.newest(
                self._tag, self.route, self._part, most_ms=most_ms, least_ms=least_ms, skip=self._skip, count=PIECE
            )
            self._skip += len(got)
            self._ended = len(got) < PIECE
            entries = (Position(at_ms, record) for at_ms, record in got if ID.fullmatch(record))
            self._known = [entry for entry in entries if below is None or entry < below][::-1]

    def take(self) -> Position:
        return self._known.pop()

    @property
    def rank(self) -> tuple[int, int] | None:
        """Less for what is newer; None at the end."""
        if not self._known:
            return None
        last = self._known[-1]
        return -last.at_ms, -int(last.record, 16)


class _Merged:
    """The entries of many lists as one, newest first."""

    def __init__(self, ledger: Ledger, lists: Sequence[_Entries], below: Position | None, least_ms: int) -> None:
        self._ledger, self._lists, self._below, self._least_ms = ledger, lists, below, least_ms
        self._heap: list[tuple[tuple[int, int], int]] = []

    async def start(self) -> None:
        await _each(self._fetch, self._lists)
        self._heap = [(one.rank, number) for number, one in enumerate(self._lists) if one.rank is not None]
        heapq.heapify(self._heap)

    async def _fetch(self, one: _Entries) -> None:
        await one.fetch(self._ledger, self._below, self._least_ms)

    async def take(self, count: int) -> list[tuple[Position, str]]:
        """Up to `count` entries, each with its route; none at the end."""
        taken: list[tuple[Position, str]] = []
        while self._heap and len(taken) < count:
            _, number = self._heap[0]
            one = self._lists[number]
            taken.append((one.take(), one.route))
            await self._fetch(one)
            if one.rank is None:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (one.rank, number))
        return taken


class Records:
    """Everything an operator may ask and say about records."""

    def __init__(
        self, ledger: Ledger, flights: Running, *, routes: Callable[[], Mapping[str, Route]], wall_ms: Callable[[], int]
    ) -> None:
        """`routes`: those in force, by name. `wall_ms`: the wall clock, for what left its list long ago alone."""
        self._ledger = ledger
        self._flights = flights
        self._routes = routes
        self._wall_ms = wall_ms

    def routes(self, route: str) -> tuple[str, ...]:
        """The routes that are meant: all in force without a name. A name may be of one that is configured no more."""
        return (route,) if route else tuple(self._routes())

    # Lists.

    async def listed(self, state: State, route: str = "", *, limit: int = 50, after: Position | None = None) -> Listed:
        """Up to `limit` (1 to `MOST`) records in a state, the latest change first; `after`: where a list was left.

        What cannot be read counts as unknown. A part may be short, even empty, and still have a rest.

        Raises: StoreError.
        """
        part: Part = "done" if state is State.COMPLETED else "open"
        lists = [_Entries(tag, name, part) for name in self.routes(route) for tag in TAGS]
        entries = _Merged(self._ledger, lists, after, self._wall_ms() - HOUR_MS)
        await entries.start()
        found: list[Found] = []
        looked_at = 0
        while piece := await entries.take(AT_ONCE):
            looked_at += len(piece)
            all_shown = await _each(self._ledger.show, [entry.record for entry, _ in piece])
            for (entry, name), shown in zip(piece, all_shown, strict=True):
                if shown is not None and _listed_as(shown, state):
                    found.append(self._found(name, shown))
                if len(found) == limit:
                    return Listed(tuple(found), entry)
            if looked_at >= LOOKED_AT:
                return Listed(tuple(found), piece[-1][0])
        return Listed(tuple(found), None)

    def _found(self, route: str, shown: Shown) -> Found:
        flight = self._flights.get(shown.record)
        return Found(route or (flight.claim.route if flight else ""), shown, flight is not None)

    # Look-ups.

    async def get(self, record: RecordId, route: str = "", *, content: bool = False) -> Found:
        """One record by its id. `route`: where it is configured no more. `content`: with its answer.

        Raises: OperatorError `record-absent`; StoreError.
        """
        shown = await self._ledger.show(record, content=content)
        if shown is None:
            raise _absent()
        return self._found(await self._route_of(record, route), shown)

    async def _route_of(self, record: RecordId, route: str) -> str:
        for name in self.routes(route):
            if await self._ledger.holds(record, name):
                return name
        return route

    async def by_key(self, text: bytes, route: str = "") -> Listed:
        """The records whose key has this text, up to `MOST`: one for each credential that used it.

        Records that keep no text (`record_key: digest`) are not found. Raises: StoreError.
        """
        places = [(tag, name, part) for name in self.routes(route) for part in PARTS for tag in TAGS]
        got = await _each(lambda place: self._search(*place, text), places if text else [])
        names = {record: place[1] for place, records in zip(places, got, strict=False) for record in records}
        all_shown = await _each(self._ledger.show, list(names)[:MOST])
        return Listed(tuple(self._found(names[one.record], one) for one in all_shown if one is not None), None)

    async def _search(self, tag: str, route: str, part: Part, text: bytes) -> list[RecordId]:
        records: list[RecordId] = []
        skip, seen = 0, IN_ONE_GO
        while seen == IN_ONE_GO:
            seen, found = await self._ledger.find(tag, route, part, text, skip=skip, count=IN_ONE_GO)
            records += found
            skip += seen
        return records

    # Settling.

    async def resolve_sent(
        self, record: RecordId, evidence: Evidence, route: str = "", *, forced: bool = False
    ) -> Settled:
        """The operator says that the mail was sent: retries get the answer, or are told that there is none.

        Raises: OperatorError with the reason why not; StoreError.
        """
        found, claim = await self._to_settle(record, route)
        known = self._routes().get(found.route)
        policy = known.policy if known else Policy()
        status = known.accepted if known else 200
        settled = await self._ledger.sent(
            claim, evidence.answer, status=status, provider_id=evidence.provider_id, ttl_s=policy.ttl_s, forced=forced
        )
        if settled.word is Settlement.ABSENT:
            raise _absent()
        return _fine(settled)

    async def resolve_not_sent(self, record: RecordId, route: str = "", *, forced: bool = False) -> Settled:
        """The operator says that nothing was sent: the key is free. `forced`: although a log may still lag.

        Raises: OperatorError with the reason why not; StoreError.
        """
        found, claim = await self._to_settle(record, route)
        known = self._routes().get(found.route)
        quiet_s = known.timeout.total_s if known else max(one.timeout.total_s for one in self._routes().values())
        return _fine(await self._ledger.not_sent(claim, quiet_s=quiet_s, forced=forced))

    async def forget(self, record: RecordId, route: str = "") -> Settled:
        """The operator frees the key, whatever is known of it.

        Raises: OperatorError with the reason why not; StoreError.
        """
        _, claim = await self._to_settle(record, route)
        return _fine(await self._ledger.forget(claim))

    async def _to_settle(self, record: RecordId, route: str) -> tuple[Found, Claim]:
        """What stands there, and a token of this one word, by which a repeat recognises itself."""
        found = await self.get(record, route)
        # Asked last, with nothing awaited until the script is on its way: a flight that begins later stands in the
        # store as outstanding before it sends.
        if found.here or self._flights.get(record) is not None:
            raise OperatorError(
                Refusal.RECORD_OUTSTANDING,
                "A request under this key runs in this sidecar, or its outcome is being recorded. Look again when it"
                " has ended.",
            )
        known = self._routes().get(found.route)
        policy = known.policy if known else Policy()
        token = f"operator-{secrets.token_hex(8)}".encode()
        return found, nobody(
            record, route=found.route, token=token, lease_s=policy.lease_s, hold_for_s=policy.hold_for_s
        )


def _fine(settled: Settled) -> Settled:
    """What came of it, where it came to something.

    Raises: OperatorError with the reason where it did not.
    """
    left_s = max(1, -(-settled.left_ms // 1000))
    match settled.word:
        case Settlement.OUTSTANDING:
            raise OperatorError(
                Refusal.RECORD_OUTSTANDING,
                f"A request under this key may be running: its lease ends in {left_s} s unless it is renewed.",
                retry_after_s=left_s,
            )
        case Settlement.EARLY:
            raise OperatorError(
                Refusal.RECORD_FRESH,
                f"The last attempt ended a moment ago, and a provider's own log may lag: look again in {left_s} s, or"
                " force it.",
                retry_after_s=left_s,
            )
        case Settlement.SETTLED:
            raise OperatorError(
                Refusal.RECORD_COMPLETED,
                "The record has its answer: there is nothing to settle. To free the key, forget it.",
            )
        case Settlement.UNREADABLE:
            raise OperatorError(
                Refusal.RECORD_UNREADABLE,
                "The record cannot be read; a sidecar of another version may be sending under it. Settle it there, or"
                " resolve it by force.",
            )
    return settled


def _absent() -> OperatorError:
    return OperatorError(
        Refusal.RECORD_ABSENT, "There is no such record: it never was, it expired, or its key was freed."
    )


def _listed_as(shown: Shown, state: State) -> bool:
    return shown.state is state or (shown.state is State.UNREADABLE and state is not State.OUTSTANDING)


async def _each(ask: Callable[[S], Awaitable[T]], items: Sequence[S]) -> list[T]:
    """What `ask` says of each, in their order; a bounded number of questions is under way at a time."""
    answers: list[T] = []
    for begin in range(0, len(items), AT_ONCE):
        answers += await asyncio.gather(*(ask(item) for item in items[begin : begin + AT_ONCE]))
    return answers
