"""The owner's part: reserve, forward once, settle. It runs to its end whatever its client does.

Two places decide everything. Before the first byte is handed to the transport nothing was sent, and the key is freed.
From that byte on only a complete answer tells what happened; all else is recorded as unknown.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum

from sidecar.config import Policy, Route, Twins, Unknown, UpstreamHost
from sidecar.content import Content, Memory, MemoryFullError
from sidecar.errors import LostError, NotSentError, Outcome, ProblemError, Sent
from sidecar.flights import Flight, Flights, LastWord, running_s
from sidecar.key import Key
from sidecar.logline import Log
from sidecar.message import Answer, Fields, end_to_end, first
from sidecar.metrics import Metrics
from sidecar.record import Found, Verdict
from sidecar.store import Claim, Store, Terms
from sidecar.upstream import Fence, Outgoing, Upstream, outgoing_fields


class AnswerClass(StrEnum):
    """What a complete answer means for the record."""

    FINAL = "final"
    FREE = "free"
    LOST = "lost"


def classify(status: int, policy: Policy) -> AnswerClass:
    """The class of a complete answer with this status."""
    if 200 <= status < 300 or status in policy.final:
        return AnswerClass.FINAL
    return AnswerClass.LOST if status in policy.lost else AnswerClass.FREE


def native_value(route: Route, key: Key) -> bytes:
    """The key as the provider gets it: the client's own words where its field is the provider's, else made to fit."""
    native = route.native
    if native is None:
        return b""
    if key.source == "" and route.key.field.lower() == native.field.lower():
        return key.field_value
    return key.value if len(key.value) <= native.max_length else hashlib.sha256(key.value).hexdigest().encode()


def terms_of(route: Route, policy: Policy) -> Terms:
    """When an unknown record may be tried again: within the provider's window, less one total and one lease."""
    longest_s = (route.timeout.connect_s + route.timeout.total_s + policy.retry.backoff_s) * policy.retry.attempts
    return Terms(
        resend=policy.unknown is Unknown.RESEND,
        window_s=None if route.native is None else route.native.window_s,
        margin_s=route.timeout.total_s + policy.lease_s,
        resend_after_s=policy.resend_after_s,
        longest_s=longest_s,
    )


@dataclass(slots=True)
class Sending:
    """One protected request, whole: everything an attempt needs. `content` is the exchange's once it forwards."""

    route: Route
    policy: Policy
    upstream: Upstream
    method: bytes
    target: bytes
    fields: Fields
    content: Content
    claim: Claim


@dataclass(slots=True)
class Reply:
    """What the client gets of an exchange: an answer with its content, or a problem. `close()` frees the content."""

    attempt: int
    answer: Answer | None = None
    content: Content | None = None
    problem: ProblemError | None = None
    upstream_s: float = 0.0
    protected: bool = True

    def close(self) -> None:
        """Free the content of the answer."""
        if self.content is not None:
            self.content.close()


@dataclass(slots=True)
class _Received:
    """A complete answer. `dropped`: its content did not fit into memory."""

    answer: Answer
    content: Content
    dropped: bool = False


@dataclass(slots=True)
class _Course:
    """What is known of the attempts inside one reservation."""

    received: _Received | None = None
    failure: NotSentError | LostError | None = None
    lost_before: bool = False
    class_: AnswerClass | None = None

    def begin_again(self) -> None:
        """Before a further attempt: only that one may have been lost is carried over."""
        self.lost_before = self.lost_before or self.class_ is AnswerClass.LOST
        self.close()
        self.received = self.failure = self.class_ = None

    def close(self) -> None:
        """Free the content of an answer that nobody gets."""
        if self.received is not None:
            self.received.content.close()


class _Fence(Fence):
    """The permission to write the first byte, from the flight."""

    def __init__(self, flights: Flights, flight: Flight) -> None:
        self._flights = flights
        self._flight = flight

    def alive(self) -> bool:
        return self._flight.may_write()

    async def renew(self) -> None:
        await self._flights.renew_for_write(self._flight)


class Exchanges:
    """Runs exchanges as tasks of their own, holds them, and waits for them at the end."""

    def __init__(
        self, store: Store, flights: Flights, *, memory: Memory, stored_bytes: int, metrics: Metrics, log: Log
    ) -> None:
        """`stored_bytes`: `limits.stored_response`."""
        self._store = store
        self._flights = flights
        self._memory = memory
        self._stored_bytes = stored_bytes
        self._metrics = metrics
        self._log = log
        self._tasks: set[asyncio.Task[Found | Reply]] = set()

    def begin(self, sending: Sending) -> asyncio.Task[Found | Reply]:
        """Reserve and, if this process becomes the owner, forward: a task that no client can end.

        The task raises StoreError where the store could not be asked.
        """
        return self._hold(self._reserve(sending))

    def begin_unreserved(self, sending: Sending) -> asyncio.Task[Found | Reply]:
        """Forward without a reservation, since the store is away and the route says so."""
        return self._hold(self._unreserved(sending))

    def _hold(self, work: Coroutine[None, None, Found | Reply]) -> asyncio.Task[Found | Reply]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait for every exchange that runs."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def end_now(self) -> None:
        """Stop every exchange: what has not begun is released, what has is recorded as unknown."""
        for task in self._tasks:
            task.cancel()

    async def _reserve(self, sending: Sending) -> Found | Reply:
        policy = sending.policy
        got = await self._flights.reserve(sending.claim, terms_of(sending.route, policy), ttl_s=policy.ttl_s)
        if not isinstance(got, Flight):
            return got
        if got.claim.earlier_unknown:
            self._metrics.count("sidecar_resends", sending.route.name, "yes" if sending.route.native else "no")
        return await self._forward(sending, got)

    async def _unreserved(self, sending: Sending) -> Found | Reply:
        # Looked at again: a twin may have begun since the store was asked. From here to the forwarding nothing waits.
        own = self._flights.get(sending.claim.record)
        if own is not None:
            return own.found(sending.claim.fingerprint)
        return await self._forward(sending, self._flights.unreserved(sending.claim, ttl_s=sending.policy.ttl_s))

    async def _forward(self, sending: Sending, flight: Flight) -> Reply:
        """Send, settle, and say what the client gets. Nothing that happens here leaves the record behind."""
        begin_s = time.perf_counter()
        course = _Course()
        try:
            await self._attempts(sending, flight, course)
            took_s = time.perf_counter() - begin_s
            self._metrics.observe("sidecar_upstream_seconds", sending.route.name, took_s)
            reply = await self._settle(sending, flight, course)
        except asyncio.CancelledError:
            course.close()
            await self._cut_short(flight)
            raise
        except Exception as exc:  # noqa: BLE001 - after the first byte a fault of ours is an unknown outcome
            # Our own fault. Whether a mail left is read from the fence, never guessed.
            self._log.error("exchange-failed", exc, route=flight.claim.route, record=flight.claim.record)
            course.close()
            await self._cut_short(flight)
            return Reply(flight.claim.attempt, problem=_own_fault(flight, sending))
        finally:
            sending.content.close()
        reply.upstream_s = took_s
        reply.protected = flight.protected
        return reply

    async def _cut_short(self, flight: Flight) -> None:
        if flight.last_word is not None:
            return  # its last word is known, and told in the background where the store has not taken it
        if flight.begun:
            await self._flights.settle(flight, self._lose(flight, None))
        else:
            await self._flights.settle(flight, self._release(flight))

    # Forwarding: once, or a few times where the provider's own key makes that safe.

    async def _attempts(self, sending: Sending, flight: Flight, course: _Course) -> None:
        retry = sending.policy.retry
        for number in range(retry.attempts):
            if number:
                await asyncio.sleep(retry.backoff_s * 2 ** (number - 1))
            await self._once(sending, flight, course)
            if number + 1 == retry.attempts or not self._may_repeat(sending, flight, course):
                return
            course.begin_again()
            flight.further = flight.further or course.lost_before

    def _may_repeat(self, sending: Sending, flight: Flight, course: _Course) -> bool:
        if isinstance(course.failure, NotSentError):
            return True
        native = sending.route.native
        if native is None or native.twins is not Twins.GUARDED:
            return False  # it could be a second mail
        if flight.window_until_s is not None and running_s() >= flight.window_until_s:
            return False  # the provider may have forgotten its key by then
        return course.class_ is AnswerClass.LOST or (
            course.received is not None and course.received.answer.status >= 500
        )

    async def _once(self, sending: Sending, flight: Flight, course: _Course) -> None:
        try:
            course.received = received = await self._send(sending, flight)
            course.class_ = classify(received.answer.status, sending.policy)
            self._metrics.count("sidecar_answers", sending.route.name, course.class_)
        except LostError as exc:
            course.failure, course.class_ = exc, AnswerClass.LOST
            self._metrics.count("sidecar_answers", sending.route.name, "lost")
        except NotSentError as exc:
            course.failure = exc

    async def _send(self, sending: Sending, flight: Flight) -> _Received:
        outgoing = Outgoing(
            method=sending.method,
            target=sending.target,
            fields=self._fields(sending, flight),
            content=sending.content.pieces(),
        )
        incoming = await sending.upstream.send(outgoing, fence=_Fence(self._flights, flight))
        received = _Received(
            Answer(incoming.status, incoming.reason, end_to_end(incoming.fields), b""), Content(self._memory)
        )
        try:
            async for piece in incoming.pieces():
                self._keep(received, piece)
        except BaseException:
            received.content.close()
            raise
        return received

    def _keep(self, received: _Received, piece: bytes) -> None:
        """Keep a piece of the answer; where it does not fit the answer is read on, since only its end tells."""
        if received.dropped:
            return
        try:
            received.content.write(piece)
        except MemoryFullError:
            received.dropped = True
            received.content.close()

    @staticmethod
    def _fields(sending: Sending, flight: Flight) -> Fields:
        native = sending.route.native
        fields = sending.fields
        if native is not None and flight.claim.native:
            # A further attempt carries the first one's key, byte for byte, however this client spelt it.
            fields = _with_field(fields, native.field.encode("ascii"), flight.claim.native)
        return outgoing_fields(fields, host=_host(sending.route, fields), content_length=sending.content.size)

    # Settling.

    async def _settle(self, sending: Sending, flight: Flight, course: _Course) -> Reply:
        received = course.received
        if received is None:
            return await self._settle_failure(sending, flight, course)
        status = received.answer.status
        refusal = not 200 <= status < 300
        if course.class_ is AnswerClass.FINAL and not (refusal and course.lost_before):
            word = self._complete(sending, flight, received, refusal)
        elif course.class_ is AnswerClass.LOST or course.lost_before:
            word = self._lose(flight, status)
        else:
            word = self._release(flight)
        await self._flights.settle(flight, word)
        reply = Reply(flight.claim.attempt, answer=received.answer, content=received.content)
        if received.dropped:
            reply.problem = _too_large_to_pass(flight, course, status)
        return reply

    async def _settle_failure(self, sending: Sending, flight: Flight, course: _Course) -> Reply:
        failure = course.failure
        attempt = flight.claim.attempt
        if isinstance(failure, NotSentError) and not course.lost_before:
            verdict = await self._flights.settle(flight, self._release(flight))
            # Where the store did not say: once the lease is over another attempt may have gone out, under `resend`.
            alone = sending.policy.unknown is Unknown.HOLD or running_s() < flight.lease_until_s
            ours = verdict is None and alone
            free = not flight.claim.earlier_unknown and (verdict is Verdict.RELEASED or ours)
            problem = _unreachable(failure, verdict) if free else _unknown(failure.reason, sending)
            return Reply(attempt, problem=problem)
        seen = failure.status if isinstance(failure, LostError) else None
        await self._flights.settle(flight, self._lose(flight, seen))
        reason = failure.reason if failure is not None else "connection_terminated"
        return Reply(attempt, problem=_unknown(reason, sending))

    def _complete(self, sending: Sending, flight: Flight, received: _Received, refusal: bool) -> LastWord:
        kept = not received.dropped and received.content.size <= self._stored_bytes
        answer = received.answer
        if kept:
            answer = Answer(answer.status, answer.reason, answer.fields, received.content.whole())

        async def word(age_s: float) -> Verdict:
            return await self._store.complete(
                flight.claim, answer, kept=kept, refusal=refusal, ttl_s=sending.policy.ttl_s, age_s=age_s
            )

        return word

    def _release(self, flight: Flight) -> LastWord:
        return lambda _age_s: self._store.release(flight.claim)

    def _lose(self, flight: Flight, seen: int | None) -> LastWord:
        return lambda age_s: self._store.lose(flight.claim, seen=seen, ttl_s=flight.ttl_s, age_s=age_s)


def _host(route: Route, fields: Fields) -> bytes:
    preserved = first(fields, b"host") if route.upstream_host is UpstreamHost.PRESERVE else None
    return route.upstream.authority if preserved is None else preserved


def _with_field(fields: Fields, name: bytes, value: bytes) -> Fields:
    """The fields with one line `name: value`: in place of the first such line, else behind all others."""
    low = name.lower()
    made: list[tuple[bytes, bytes]] = []
    placed = False
    for line in fields:
        if line[0].lower() != low:
            made.append(line)
        elif not placed:
            made.append((line[0], value))
            placed = True
    if not placed:
        made.append((name, value))
    return tuple(made)


def not_kept_problem(status: int, *, sent: Sent) -> ProblemError:
    """The answer came whole and was not kept: the same status, and a document that says so."""
    return ProblemError(
        Outcome.RESPONSE_NOT_KEPT,
        f"The provider answered this key's request with status {status}; the content of that answer was too large to"
        " keep. Nothing is sent again.",
        status=status,
        sent=sent,
    )


def _too_large_to_pass(flight: Flight, course: _Course, status: int) -> ProblemError:
    """The answer came whole, and there was no memory for its content: its status and meaning are passed on."""
    doubt = course.lost_before or flight.claim.earlier_unknown or course.class_ is AnswerClass.LOST
    if course.class_ is AnswerClass.FINAL:
        refused = not 200 <= status < 300 and not doubt
        return not_kept_problem(status, sent=Sent.NO if refused else Sent.UNKNOWN)
    return ProblemError(
        Outcome.RESPONSE_NOT_KEPT,
        f"The provider answered with status {status}; there was no room for the content of its answer (limits.memory).",
        status=status,
        sent=Sent.UNKNOWN if doubt else Sent.NO,
    )


def _unreachable(failure: NotSentError, verdict: Verdict | None) -> ProblemError:
    key = "The key is free" if verdict is Verdict.RELEASED else "The key is freed once the store answers"
    return ProblemError(
        Outcome.UPSTREAM_UNREACHABLE,
        f"Not a byte was sent ({failure.reason}). {key}: repeat the same request.",
        proxy_status=failure.reason if failure.reason.replace("_", "").isalpha() else "proxy_internal_error",
    )


def _unknown(reason: str, sending: Sending) -> ProblemError:
    next_ = (
        "Look for it in the provider's log, and settle the key: `sidecar keys show KEY`, then `sidecar keys resolve`."
        " A repeat under this key is answered by what is known then."
    )
    if sending.policy.unknown is Unknown.RESEND and sending.route.native is not None:
        next_ = (
            "Repeat the same request: it goes out again under the key that the provider knows, which makes no second"
            " mail of it."
        )
    return ProblemError(
        Outcome.OUTCOME_UNKNOWN,
        f"The request was sent and no complete answer came, so a mail may have left. {next_}",
        proxy_status=reason if reason.replace("_", "").isalpha() else "connection_terminated",
    )


def _own_fault(flight: Flight, sending: Sending) -> ProblemError:
    if flight.begun or flight.claim.earlier_unknown:
        return _unknown("proxy_internal_error", sending)
    return ProblemError(Outcome.INTERNAL_ERROR, "A fault of the sidecar, before anything was sent. Repeat the request.")
