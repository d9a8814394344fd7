"""Steps 5, 6 and 11 for a protected send: ask, decide, perhaps wait, and answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate

from sidecar import key as keys
from sidecar.arrival import Arrival
from sidecar.config import RecordKey, Route, Send, StoreUnavailable
from sidecar.errors import Outcome, ProblemError, Sent, StoreError
from sidecar.exchange import Exchanges, Reply, Sending, native_value, not_kept_problem
from sidecar.fingerprint import ALGORITHM
from sidecar.flights import Flights
from sidecar.intake import AWAY_S, Taken, of_this_request
from sidecar.key import Key
from sidecar.logline import Log
from sidecar.message import values
from sidecar.metrics import Metrics
from sidecar.record import Completed, Found, Refuse, Replay, Unreadable, Wait, decide, resolved_problem
from sidecar.replay import replay
from sidecar.store import Claim

# An arrival that waits looks again after this long, doubled up to a second; at once where the owner is in its process.
FIRST_LOOK_S = 0.05
LONGEST_LOOK_S = 1.0
PROTECTED_FALSE = (b"Idempotency-Protected", b"false")


class Protected:
    """Answers sends that have a key."""

    def __init__(
        self,
        *,
        flights: Flights,
        exchanges: Exchanges,
        metrics: Metrics,
        log: Log,
        account: Callable[[Arrival], None],
        token: bytes,
        unfold_bytes: int,
    ) -> None:
        """`account` writes the line of an arrival whose client left before its exchange ended.

        `token`: random bytes of this process, the beginning of every owner token. `unfold_bytes`: how far a stored
        content coding may unfold for a retry that does not take it.
        """
        self.waiting = 0
        self.behind = 0
        self.unprotected = 0
        self.closed = False
        self._flights = flights
        self._exchanges = exchanges
        self._metrics = metrics
        self._log = log
        self._account = account
        self._token = token
        self._unfold_bytes = unfold_bytes
        self._number = 0

    def sending(self, arrival: Arrival, send: Send, key: Key, taken: Taken) -> Sending:
        """Everything an attempt needs: the request, and the claim on its record."""
        match, fields = arrival.match, arrival.inbound.fields
        assert match is not None
        assert arrival.upstream is not None
        route, policy = match.route, send.policy
        claim = Claim(
            record=keys.record_id(keys.scope(route, fields), key),
            route=route.name,
            token=self._next_token(),
            fingerprint=taken.fingerprint,
            algorithm=ALGORITHM if route.fingerprint.enabled else b"off",
            lease_s=policy.lease_s,
            hold_for_s=policy.hold_for_s,
            native=native_value(route, key),
            credential=keys.credential(route, fields),
            accept_encoding=b", ".join(values(fields, b"accept-encoding")),
            key_text=key.value if route.record_key is RecordKey.TEXT else b"",
        )
        arrival.record = claim.record
        return Sending(
            route=route,
            policy=policy,
            upstream=arrival.upstream,
            method=arrival.inbound.method,
            target=match.target,
            fields=fields,
            content=taken.content,
            claim=claim,
        )

    def _next_token(self) -> bytes:
        self._number += 1
        return b"%b-%x" % (self._token, self._number)

    async def answer(self, arrival: Arrival, sending: Sending) -> None:
        """Answer the client: with the exchange's reply, a replay, or a problem. Frees the content, now or later.

        Raises: ProblemError; ConnectionError where the client left.
        """
        try:
            await self._answer(arrival, sending)
        finally:
            # An exchange that goes on without its client still reads the content, and frees it at its end.
            if not arrival.behind:
                sending.content.close()

    async def _answer(self, arrival: Arrival, sending: Sending) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + sending.policy.wait_limit_s
        pause_s = FIRST_LOOK_S
        arrival.outcome = Outcome.REQUEST_OUTSTANDING  # what a client that leaves while it waits ends as
        while True:
            found = await self._ask(arrival, sending)
            if isinstance(found, Reply):
                await self._deliver(arrival, found)
                return
            decision = decide(
                found, concurrent=sending.policy.concurrent, mismatch_status=sending.route.fingerprint.mismatch
            )
            match decision:
                case Replay(completed):
                    await self._replay(arrival, sending.route, completed)
                    return
                case Refuse(problem):
                    raise problem
                case Wait(problem) if self.closed or loop.time() >= until_s:
                    raise problem
                case _:
                    # The next ask is another one: what this one gave up is released under its own token.
                    sending.claim = replace(sending.claim, token=self._next_token())
                    await self._wait(sending, min(pause_s, until_s - loop.time()), until_s)
                    pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    async def _ask(self, arrival: Arrival, sending: Sending) -> Found | Reply:
        """What stands under this key: this process's own flight first, then the store; or the exchange's reply."""
        own = self._flights.get(sending.claim.record)
        if own is not None:
            return own.found(sending.claim.fingerprint)
        if self.closed:
            detail = of_this_request("This sidecar shuts down; ask another one, or later.")
            raise ProblemError(Outcome.DRAINING, detail, retry_after_s=AWAY_S)
        arrival.begun = True
        try:
            found = await self._await(arrival, self._exchanges.begin(sending), sending)
        except StoreError as exc:
            if sending.policy.store_unavailable is StoreUnavailable.REJECT:
                detail = of_this_request("The store cannot be asked whether this key was used.")
                raise ProblemError(Outcome.STORE_UNAVAILABLE, detail, retry_after_s=AWAY_S) from exc
            self.unprotected += 1
            return await self._await(arrival, self._exchanges.begin_unreserved(sending), sending)
        if isinstance(found, Unreadable):
            self._metrics.count("sidecar_records_unreadable", sending.route.name)
            self._log.warning("record-unreadable", route=sending.route.name, record=sending.claim.record)
        return found

    async def _await(self, arrival: Arrival, task: asyncio.Task[Found | Reply], sending: Sending) -> Found | Reply:
        """Wait for the exchange without holding it: where the client leaves, it goes on and is logged at its end."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                arrival.logged = arrival.left = arrival.behind = True
                self.behind += 1
                task.add_done_callback(lambda done: self._left_behind(arrival, done, sending))
            raise

    def _left_behind(self, arrival: Arrival, task: asyncio.Task[Found | Reply], sending: Sending) -> None:
        """An exchange without a client has ended: its line is written, its contents are freed."""
        self.behind -= 1
        sending.content.close()
        if task.cancelled():
            arrival.outcome = Outcome.OUTCOME_UNKNOWN
        elif task.exception() is not None:
            arrival.outcome = Outcome.STORE_UNAVAILABLE
        elif isinstance(reply := task.result(), Reply):
            _note(arrival, reply)
            reply.close()
        self._account(arrival)

    async def _wait(self, sending: Sending, pause_s: float, until_s: float) -> None:
        """Until the first request may have ended; no connection to the store is held meanwhile."""
        self.waiting += 1
        try:
            own = self._flights.get(sending.claim.record)
            if own is None:
                await asyncio.sleep(pause_s)
            else:
                left_s = until_s - asyncio.get_running_loop().time()
                await asyncio.wait([own.settled], timeout=max(0.0, left_s))
        finally:
            self.waiting -= 1

    async def _deliver(self, arrival: Arrival, reply: Reply) -> None:
        _note(arrival, reply)
        try:
            if reply.problem is not None:
                raise reply.problem
            answer = reply.answer
            assert answer is not None
            if not reply.protected:
                # The one field we ever add to a fresh answer.
                answer = replace(answer, fields=(*answer.fields, PROTECTED_FALSE))
            await arrival.inbound.answer(answer, reply.content)
        finally:
            reply.close()

    async def _replay(self, arrival: Arrival, route: Route, completed: Completed) -> None:
        status = completed.answer.status
        if completed.resolved:
            raise resolved_problem(completed)
        if not completed.kept:
            raise not_kept_problem(status, sent=Sent.UNKNOWN if 200 <= status < 300 else Sent.NO)
        accepted = values(arrival.inbound.fields, b"accept-encoding")
        answer = replay(
            completed,
            route,
            accept_encoding=b", ".join(accepted) if accepted else None,
            date=formatdate(usegmt=True).encode("ascii"),
            limit_bytes=self._unfold_bytes,
        )
        arrival.outcome, arrival.status = Outcome.REPLAYED, answer.status
        await arrival.inbound.answer(answer)


def _note(arrival: Arrival, reply: Reply) -> None:
    arrival.attempt, arrival.upstream_s = reply.attempt, reply.upstream_s
    if reply.problem is not None:
        arrival.outcome, arrival.problem, arrival.status = reply.problem.slug, reply.problem, reply.problem.status
    elif reply.answer is not None:
        arrival.outcome = Outcome.FORWARDED if reply.protected else Outcome.UNPROTECTED
        arrival.status = reply.answer.status
