"""The attempts of this process, from their reservation until the store has told their outcome.

One task renews them all. The process asks its own flights before the store and puts their records back where the
store lost them, so that a store that forgets during a flight does not make this process send twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sidecar.errors import NotSentError, Sent, StoreError
from sidecar.logline import Log
from sidecar.message import RecordId
from sidecar.metrics import Metrics
from sidecar.record import Found, Outstanding, Renewal, Reserved, Reused, Verdict
from sidecar.store import Claim, Store, Terms

LastWord = Callable[[float], Awaitable[Verdict]]

# The renewing task looks around at least this often, so that an outcome the store could not take is told again
# within a second of its return; and never more often than 50 times a second.
LONGEST_TICK_S = 1.0
SHORTEST_TICK_S = 0.02
MOST_WHILE_AWAY = 200


def running_s() -> float:
    """Seconds of a clock that runs on while the machine is suspended.

    That is CLOCK_BOOTTIME on Linux; CLOCK_MONOTONIC is one on macOS.
    """
    return time.clock_gettime(_RUNNING)


_RUNNING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Flight:
    """One attempt as its process knows it. `settled` is done once the store has told its outcome."""

    __slots__ = (
        "begun",
        "claim",
        "commands",
        "doubtful",
        "further",
        "last_word",
        "lease_until_s",
        "protected",
        "renew_at_s",
        "reserved_at_s",
        "settled",
        "ttl_s",
        "window_until_s",
        "word_doubtful",
    )

    def __init__(
        self, claim: Claim, *, asked_at_s: float, ttl_s: float, window_left_s: float | None, protected: bool
    ) -> None:
        """`asked_at_s`: the running clock before the store was asked. `protected`: the store holds its record.

        `window_left_s`: how long a further attempt under the provider's key is safe, None without such a key.
        """
        self.claim = claim
        self.ttl_s = ttl_s
        self.protected = protected
        self.reserved_at_s = asked_at_s
        self.lease_until_s = asked_at_s + claim.lease_s
        self.renew_at_s = asked_at_s + claim.lease_s / 3
        self.window_until_s = None if window_left_s is None else asked_at_s + window_left_s
        # Whether the attempt that comes is a further one, which must be within the window.
        self.further = claim.earlier_unknown
        self.commands = asyncio.Lock()
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_word: LastWord | None = None
        self.doubtful = False
        self.word_doubtful = False
        # Whether the first byte may have been written: from here on nobody may say that nothing was sent.
        self.begun = False

    def found(self, fingerprint: bytes) -> Found:
        """What an arrival under the same key is told without asking the store."""
        if fingerprint != self.claim.fingerprint and self.claim.algorithm != b"off":
            return Reused(Sent.UNKNOWN)
        left_s = max(0.0, self.lease_until_s - running_s())
        return Outstanding(round(left_s * 1000))

    @property
    def in_window(self) -> bool:
        """Whether the provider still knows the key of an earlier attempt, or there was none."""
        return not self.further or self.window_until_s is None or running_s() < self.window_until_s

    def may_write(self) -> bool:
        """The fence: this process's own clock shows the lease, and the provider's window, alive."""
        allowed = self.in_window and (running_s() < self.lease_until_s or not self.protected)
        self.begun = self.begun or allowed
        return allowed


@dataclass(slots=True)
class _Abandoned:
    """A reservation that may stand, or come to stand, and that nobody wants. `told`: the store has released it once."""

    claim: Claim
    until_s: float
    told: bool = False


class Flights:
    """All flights of this process, by record."""

    def __init__(self, store: Store, *, metrics: Metrics, log: Log) -> None:
        """Nothing is under way; `start()` begins to renew."""
        self._store = store
        self._metrics = metrics
        self._log = log
        self._flights: dict[RecordId, Flight] = {}
        self._abandoned: dict[RecordId, list[_Abandoned]] = {}
        self._tick_s = LONGEST_TICK_S
        self._sooner = asyncio.Event()
        self._renewals: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many flights the store has not told the outcome of."""
        return len(self._flights)

    @property
    def unsettled(self) -> int:
        """Flights that have ended and whose outcome the store has not taken yet."""
        return sum(flight.last_word is not None for flight in self._flights.values())

    def get(self, record: RecordId) -> Flight | None:
        """The flight of this process under a record, if there is one."""
        return self._flights.get(record)

    # Reserving.

    async def reserve(self, claim: Claim, terms: Terms, *, ttl_s: float) -> Flight | Found:
        """Reserve the record; the flight, or what was found instead.

        Raises: StoreError. A reservation given up on is released in the background for one lease, since the
        store may still apply it.
        """
        if claim.record in self._abandoned:
            await self._release_abandoned(claim.record)
        asked_at_s = running_s()
        try:
            found = await self._store.reserve(claim, terms)
        except StoreError as exc:
            self._metrics.count("sidecar_store_errors", "reserve")
            if exc.applied is None:
                self._abandon(claim)
            raise
        except asyncio.CancelledError:
            self._abandon(claim)  # it may have been written by now
            raise
        if not isinstance(found, Reserved):
            return found
        owned = claim.owned(found)
        if (mine := self._flights.get(claim.record)) is not None:
            # Both reserved, so the store lost the first record in between. Its flight may have sent already: it
            # puts its record back at its next renewal, and this reservation goes.
            self._abandon(owned)
            return mine.found(claim.fingerprint)
        self._keep_abandoned(owned)
        left_s = None if found.window_left_ms < 0 else found.window_left_ms / 1000
        if left_s is not None and not owned.earlier_unknown:
            left_s -= terms.margin_s  # a later attempt's share is counted by the script
        return self._add(Flight(owned, asked_at_s=asked_at_s, ttl_s=ttl_s, window_left_s=left_s, protected=True))

    def unreserved(self, claim: Claim, *, ttl_s: float) -> Flight:
        """A flight without a reservation, while the store is away and the route says `forward`.

        It is known to this process, and its answer is recorded once the store is back.
        """
        # The reservation given up on a moment ago has the same token: if it comes to stand it is this flight's.
        self._keep_abandoned(claim)
        return self._add(Flight(claim, asked_at_s=running_s(), ttl_s=ttl_s, window_left_s=None, protected=False))

    def _keep_abandoned(self, claim: Claim) -> None:
        """Release no more what is this claim's own reservation."""
        several = self._abandoned.pop(claim.record, [])
        if kept := [one for one in several if one.claim.token != claim.token]:
            self._abandoned[claim.record] = kept

    def _add(self, flight: Flight) -> Flight:
        assert flight.claim.record not in self._flights, "two flights of one process under one record"
        self._flights[flight.claim.record] = flight
        self._look_in(flight.claim.lease_s / 12)
        return flight

    def _look_in(self, tick_s: float) -> None:
        """Let the renewing task look around at least this often, from now on."""
        if tick_s < self._tick_s:
            self._tick_s = max(SHORTEST_TICK_S, tick_s)
            self._sooner.set()

    def _abandon(self, claim: Claim) -> None:
        """Release a reservation that may still come to stand, at once and at each tick for one lease."""
        until_s = running_s() + claim.lease_s + LONGEST_TICK_S
        self._abandoned.setdefault(claim.record, []).append(_Abandoned(claim, until_s))
        self._look_in(claim.lease_s / 12)
        self._sooner.set()

    async def _release_abandoned(self, record: RecordId) -> None:
        """Before this process asks for a record again, what it gave up there goes, so that it is not read as lost.

        Raises: StoreError, and then nothing can be reserved either.
        """
        for abandoned in tuple(self._abandoned.get(record, ())):
            if not abandoned.told:
                await self._store.release(abandoned.claim)
                abandoned.told = True

    # The fence.

    async def renew_for_write(self, flight: Flight) -> None:
        """Renew before the first byte, where the lease ran out meanwhile.

        Raises: NotSentError where this process is not the owner any more, or cannot ask.
        """
        if not flight.in_window:
            raise NotSentError("the provider's window is over")
        try:
            renewal = await self._renew(flight)
        except StoreError as exc:
            raise NotSentError("the lease is over and the store does not answer") from exc
        if renewal is Renewal.STALE:
            raise NotSentError("another attempt owns the record")

    async def _renew(self, flight: Flight) -> Renewal:
        async with flight.commands:
            if flight.settled.done():
                # Its last word was taken while this waited: a renewal behind it would put up a record nobody owns.
                return Renewal.STALE
            asked_at_s = running_s()
            try:
                # Until the first byte is written the lease is what allows it: there a primary that was replaced
                # and does not know it yet must not be believed.
                renewal = await self._store.renew(flight.claim, confirmed=not flight.begun)
            except StoreError as exc:
                # It may be applied later, even behind a release: see _end.
                flight.doubtful = flight.doubtful or exc.applied is None
                self._metrics.count("sidecar_store_errors", "renew")
                raise
            except asyncio.CancelledError:
                flight.doubtful = True
                raise
            # After STALE it is asked on: another reservation may go again, and then this flight's record comes back.
            flight.renew_at_s = asked_at_s + flight.claim.lease_s / 3
            if renewal is not Renewal.STALE:
                flight.lease_until_s = asked_at_s + flight.claim.lease_s
            if renewal is Renewal.RESTORED and flight.protected:
                self._log.warning("record-restored", route=flight.claim.route, record=flight.claim.record)
            return renewal

    # The last word.

    async def settle(self, flight: Flight, word: LastWord) -> Verdict | None:
        """Tell the store the outcome; None where it did not take it within `store.timeout`.

        Then the word is repeated in the background until it is taken or the ttl is over. `word` gets the seconds
        since the attempt was reserved.
        """
        flight.last_word = word
        return await self._speak(flight)

    async def _speak(self, flight: Flight) -> Verdict | None:
        assert flight.last_word is not None
        async with flight.commands:
            if flight.settled.done():
                return None
            try:
                verdict = await flight.last_word(running_s() - flight.reserved_at_s)
            except StoreError as exc:
                flight.doubtful = flight.doubtful or exc.applied is None
                flight.word_doubtful = flight.word_doubtful or exc.applied is None
                self._metrics.count("sidecar_store_errors", "settle")
                if flight.word_doubtful:
                    # The word may have been applied. A renewal behind it would put up a record that nobody owns.
                    return None
            except asyncio.CancelledError:
                flight.doubtful = flight.word_doubtful = True
                raise
            else:
                self._end(flight, verdict)
                return verdict
        # The store said no (it is full, say) and changed nothing: the record is kept ours meanwhile.
        try:
            await self._renew(flight)
        except StoreError:
            pass  # counted; the next tick tries again
        return None

    def _end(self, flight: Flight, verdict: Verdict) -> None:
        if flight.settled.done():
            return
        claim = flight.claim
        if self._flights.get(claim.record) is flight:
            del self._flights[claim.record]
        flight.settled.set_result(None)
        if verdict is Verdict.STALE:
            self._metrics.count("sidecar_leases_lost", claim.route)
            self._log.warning("lease-lost", route=claim.route, record=claim.record, attempt=claim.attempt)
        if verdict is Verdict.RELEASED and flight.doubtful:
            # A command given up on may yet be applied and put up a reservation that nobody owns.
            self._abandon(claim)

    # The one task for all.

    def start(self) -> None:
        """Begin to renew."""
        self._renewals = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._tick_s):
                    await self._sooner.wait()
            except TimeoutError:
                pass
            self._sooner.clear()
            now = running_s()
            due = [
                self._attend(flight, now)
                for flight in self._flights.values()
                if not flight.commands.locked() and (flight.last_word is not None or flight.renew_at_s <= now)
            ]
            due += [self._free(abandoned, now) for several in self._abandoned.values() for abandoned in several]
            if self._store.trouble:
                # While the store is away a few find out when it is back; the others would only queue.
                for idle in due[MOST_WHILE_AWAY:]:
                    idle.close()
                del due[MOST_WHILE_AWAY:]
            if not due:
                continue
            for fault in await asyncio.gather(*due, return_exceptions=True):
                if isinstance(fault, Exception):
                    # A fault with one flight is no reason to let the leases of all others end.
                    self._log.error("renewal-failed", fault)

    async def _attend(self, flight: Flight, now: float) -> None:
        if flight.last_word is None:
            try:
                await self._renew(flight)
            except StoreError:
                pass  # counted; the next tick tries again
        elif now - flight.reserved_at_s > max(flight.ttl_s, flight.claim.lease_s):
            # Nobody would be answered with it any more.
            async with flight.commands:
                if not flight.settled.done():
                    self._log.error("outcome-not-recorded", route=flight.claim.route, record=flight.claim.record)
                    self._end(flight, Verdict.UNKNOWN)
        else:
            await self._speak(flight)

    async def _free(self, abandoned: _Abandoned, now: float) -> None:
        claim = abandoned.claim
        try:
            await self._store.release(claim)
        except StoreError:
            # Until the store has told: a lease may be long over before it comes back.
            self._metrics.count("sidecar_store_errors", "release")
            abandoned.until_s = max(abandoned.until_s, now + claim.lease_s)
            return
        abandoned.told = True
        if now > abandoned.until_s:
            several = self._abandoned.get(claim.record, [])
            if abandoned in several:
                several.remove(abandoned)
            if not several:
                self._abandoned.pop(claim.record, None)

    # The end.

    async def drain(self, limit_s: float) -> int:
        """Wait until the store has told every outcome, at most `limit_s`; how many it has not."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        self._sooner.set()
        while self._untold() and loop.time() < until:
            settled = [flight.settled for flight in self._flights.values()]
            if settled:
                await asyncio.wait(settled, timeout=SHORTEST_TICK_S)
            else:
                await asyncio.sleep(SHORTEST_TICK_S)
        return self._untold()

    def _untold(self) -> int:
        untold = sum(not abandoned.told for several in self._abandoned.values() for abandoned in several)
        return len(self._flights) + untold

    async def close(self) -> None:
        """Renew no more."""
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
