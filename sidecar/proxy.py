"""The data plane: the walk of a request, one method per step.

 1 read the head, find the route           `Inbound.check`, `routing.Router`
 2 read the key                            `key.find`
 3 scope                                   `key.scope`, `key.record_id`
 4 read the content, fingerprint it        `_receive`
 5 reserve                                 `exchange.Exchanges.begin`, one script
 6 decide                                  `record.decide`: forward, replay, wait or a problem
 7 approve, where the route asks           not in this version
 8 sign, where the route signs             not in this version
 9 forward once                            `upstream.Upstream.send`
10 complete, release or mark unknown       `flights.Flights.settle`
11 answer; one log line, one counter       `_account`

Steps 5, 9 and 10 are a task of their own: a client that hangs up changes nothing there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate

from sidecar import key as keys
from sidecar.arrival import Arrival
from sidecar.config import Address, Limits, Missing, Route, Send, StoreUnavailable
from sidecar.content import Content, Memory, MemoryFullError
from sidecar.errors import Outcome, ProblemError, Sent, StoreError
from sidecar.exchange import Exchanges, Reply, Sending, native_value, not_kept_problem
from sidecar.fingerprint import ALGORITHM, Fingerprinter
from sidecar.flights import Flights
from sidecar.key import Key
from sidecar.logline import Log
from sidecar.message import Fields, connection_options, first
from sidecar.metrics import Metrics
from sidecar.passing import pass_through
from sidecar.problem import render
from sidecar.record import Completed, Found, Refuse, Replay, Unreadable, Wait, decide
from sidecar.replay import replay
from sidecar.routing import Match, Router, discriminated, discriminators
from sidecar.server import Inbound, malformed
from sidecar.store import Claim
from sidecar.upstream import Upstream

# An arrival that waits looks again after this long, doubled up to a second; at once where the owner is in this process.
FIRST_LOOK_S = 0.05
LONGEST_LOOK_S = 1.0
# How long a client should stay away when there is nothing better to say.
AWAY_S = 1.0
PROTECTED_FALSE = (b"Idempotency-Protected", b"false")


@dataclass(frozen=True, slots=True)
class Table:
    """The routes in force and their upstreams: one value, exchanged whole when the configuration is read again."""

    router: Router
    upstreams: Mapping[str, Upstream]


class Proxy:
    """Answers every request of the data plane."""

    def __init__(
        self,
        table: Table,
        *,
        flights: Flights,
        exchanges: Exchanges,
        memory: Memory,
        limits: Limits,
        metrics: Metrics,
        log: Log,
        token: bytes,
        help_url: str,
    ) -> None:
        """`token`: random bytes of this process, the beginning of every owner token. `help_url`: see `problem.render`."""
        self.table = table
        self.draining = False
        self.closed = False
        self.under_way = 0
        self.waiting = 0
        self.sends = 0
        self.unprotected = 0
        self._flights = flights
        self._exchanges = exchanges
        self._memory = memory
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self._token = token
        self._number = 0
        self._help_url = help_url

    # The outermost edge: whatever happens inside, the client gets one answer and the log one line.

    async def handle(self, inbound: Inbound, listener: Address | None = None) -> bool:
        """Serve one request; whether the connection may go on. `listener`: a route's own, None for the main ones."""
        loop = asyncio.get_running_loop()
        arrival = Arrival(inbound, loop.time())
        if self.draining:
            inbound.keep_alive = False
        self.under_way += 1
        try:
            await self._walk(arrival, listener)
        except ProblemError as problem:
            await self._refuse(arrival, problem)
        except ConnectionError:
            arrival.left = True
            inbound.keep_alive = False
        except asyncio.CancelledError:
            arrival.left = True
            raise
        except Exception as exc:
            # Nothing was sent by this task itself: exchanges are tasks of their own and settle their own faults.
            self._log.error("arrival-failed", exc, route=arrival.route)
            await self._refuse(arrival, _fault(arrival))
        finally:
            self.under_way -= 1
            if not arrival.logged:
                self._account(arrival)
        return inbound.keep_alive and not inbound.unread

    async def _refuse(self, arrival: Arrival, problem: ProblemError) -> None:
        route = None if arrival.match is None else arrival.match.route
        answer = render(problem, route, self._help_url)
        arrival.outcome, arrival.status, arrival.problem = problem.slug, answer.status, problem
        inbound = arrival.inbound
        if inbound.unread:
            inbound.keep_alive = False
        if inbound.request.writer.output_size > 0:
            inbound.abort()  # an answer was begun: it must not look whole
            return
        try:
            await inbound.answer(answer)
        except ConnectionError:
            arrival.left = True
            inbound.keep_alive = False

    def refused(self, problem: ProblemError) -> None:
        """Count and log a request that the parser refused."""
        self._metrics.count("sidecar_requests", "-", problem.slug)
        self._log.info("request", outcome=problem.slug, route="-", status=problem.status, sent=problem.sent)

    def _account(self, arrival: Arrival) -> None:
        arrival.logged = True
        took_s = asyncio.get_running_loop().time() - arrival.begin_s
        self._metrics.count("sidecar_requests", arrival.route, arrival.outcome)
        self._metrics.observe("sidecar_request_seconds", arrival.route, took_s)
        problem = arrival.problem
        self._log.info(
            "request",
            outcome=arrival.outcome,
            route=arrival.route,
            method=arrival.inbound.method.decode("ascii"),
            send=arrival.send or None,
            status=arrival.status or None,
            sent=None if problem is None else problem.sent,
            reason=None if problem is None else problem.proxy_status,
            record=arrival.record or None,
            attempt=arrival.attempt or None,
            bytes=arrival.content_bytes,
            ms=round(took_s * 1000, 2),
            upstream_ms=round(arrival.upstream_s * 1000, 2) if arrival.upstream_s else None,
            client="left" if arrival.left else None,
        )

    # Steps 1 and 2: route, then key.

    async def _walk(self, arrival: Arrival, listener: Address | None) -> None:
        inbound = arrival.inbound
        if self.closed:
            raise ProblemError(Outcome.DRAINING, _own("It is sent nowhere; try another one."), retry_after_s=AWAY_S)
        if self.under_way > self._limits.outstanding:
            raise ProblemError(Outcome.OVERLOADED, _own("Too many requests are under way."), retry_after_s=AWAY_S)
        declared = inbound.check(self._limits.header_bytes)
        match = self.table.router.match(
            listener=listener, host=first(inbound.fields, b"host"), method=inbound.method, target=inbound.target
        )
        arrival.match = match
        _check_connection(match.route, inbound.fields)
        inbound.expects_continue()
        arrival.outcome = Outcome.PASSED
        if not match.sends:
            await self._pass(arrival, None)
            return
        if declared is not None and declared > self._limits.request_bytes:
            raise self._too_large()
        send = None if discriminators(match) else match.sends[0]
        key = None if send is None else self._key(match.route, inbound.fields)
        if send is not None and key is None and not keys.members(match.route):
            await self._without_key(arrival, send, None)
            return
        await self._send(arrival, match, send, key)

    @staticmethod
    def _key(route: Route, fields: Fields) -> Key | None:
        return keys.find(route, fields)

    async def _without_key(self, arrival: Arrival, send: Send, content: Content | None) -> None:
        """A send without a key: refused, or forwarded unprotected, as the route says."""
        assert arrival.match is not None
        arrival.send = send.text
        if arrival.match.route.key.missing is Missing.REJECT:
            raise ProblemError(
                Outcome.KEY_MISSING,
                f"This route asks for a key. Send {arrival.match.route.key.field} with a value of your own per mail.",
            )
        self.sends += 1
        self.unprotected += 1
        arrival.outcome = Outcome.UNPROTECTED
        await self._pass(arrival, content)

    async def _pass(self, arrival: Arrival, content: Content | None) -> None:
        assert arrival.match is not None
        upstream = self.table.upstreams[arrival.match.route.name]
        await pass_through(arrival, upstream, content)

    # Steps 3 and 4: the content, its fingerprint, and with them everything that names the record.

    async def _send(self, arrival: Arrival, match: Match, send: Send | None, key: Key | None) -> None:
        route = match.route
        arrival.outcome = Outcome.REQUEST_MALFORMED  # what a client that leaves during its upload ends as
        names = discriminators(match) if send is None else frozenset()
        watch = (*(name.decode() for name in names), *(keys.members(route) if key is None else ()))
        printer = Fingerprinter(
            route.fingerprint,
            route=route.name,
            method=arrival.inbound.method,
            path=match.path,
            query=match.query,
            fields=arrival.inbound.fields,
            watch=watch,
            limit_bytes=self._limits.request_bytes,
        )
        content = Content(self._memory)
        kept = False
        try:
            await self._receive(arrival, content, printer)
            fingerprint = printer.finish()
            watched = dict(printer.watched())
            if send is None:
                send = discriminated(match, {name: watched[name.decode()].strip() for name in names if name.decode() in watched})
                if send is None:
                    arrival.outcome = Outcome.PASSED
                    await self._pass(arrival, content)
                    return
                key = self._key(route, arrival.inbound.fields)
            if key is None:
                key = keys.find_in_content(route, watched)
            if key is None:
                await self._without_key(arrival, send, content)
                return
            arrival.send = send.text
            self.sends += 1
            kept = await self._protected(arrival, self._sending(arrival, send, key, content, bytes(fingerprint)))
        finally:
            if not kept:
                content.close()

    async def _receive(self, arrival: Arrival, content: Content, printer: Fingerprinter) -> None:
        """Read the content whole, a piece at a time; other requests run in between."""
        assert arrival.match is not None
        inbound = arrival.inbound
        inbound.go_on()
        try:
            async with asyncio.timeout(arrival.match.route.timeout.receive_s):
                while piece := await inbound.piece():
                    if content.size + len(piece) > self._limits.request_bytes:
                        raise self._too_large()
                    content.write(piece)
                    for _ in printer.feed(piece):
                        await asyncio.sleep(0)
        except TimeoutError as exc:
            raise malformed("The content did not arrive in time.", 408) from exc
        except MemoryFullError as exc:
            raise ProblemError(
                Outcome.OVERLOADED, _own("There is no room for this content now."), retry_after_s=AWAY_S
            ) from exc
        arrival.content_bytes = content.size

    def _too_large(self) -> ProblemError:
        return ProblemError(
            Outcome.CONTENT_TOO_LARGE,
            _own(f"At most {self._limits.request_bytes} bytes of content are taken (limits.request)."),
        )

    def _sending(self, arrival: Arrival, send: Send, key: Key, content: Content, fingerprint: bytes) -> Sending:
        match, fields = arrival.match, arrival.inbound.fields
        assert match is not None
        route, policy = match.route, send.policy
        self._number += 1
        claim = Claim(
            record=keys.record_id(keys.scope(route, fields), key),
            route=route.name,
            token=b"%b-%x" % (self._token, self._number),
            fingerprint=fingerprint,
            algorithm=ALGORITHM if route.fingerprint.enabled else b"off",
            lease_s=policy.lease_s,
            hold_for_s=policy.hold_for_s,
            native=native_value(route, key),
            credential=keys.credential(route, fields),
            accept_encoding=first(fields, b"accept-encoding") or b"",
            key_text=key.value if route.record_key == "text" else b"",
        )
        arrival.record = claim.record
        return Sending(
            route=route,
            policy=policy,
            upstream=self.table.upstreams[route.name],
            method=arrival.inbound.method,
            target=match.target,
            fields=fields,
            content=content,
            claim=claim,
        )

    # Steps 5 and 6: reserve, decide, perhaps wait.

    async def _protected(self, arrival: Arrival, sending: Sending) -> bool:
        """Answer a protected send; True where the content belongs to an exchange now."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + sending.policy.wait_limit_s
        pause_s = FIRST_LOOK_S
        arrival.outcome = Outcome.REQUEST_OUTSTANDING  # what a client that leaves while it waits ends as
        while True:
            found = await self._ask(arrival, sending)
            if isinstance(found, Reply):
                await self._deliver(arrival, found)
                return True
            if isinstance(found, Unreadable):
                self._metrics.count("sidecar_records_unreadable", sending.route.name)
                self._log.warning("record-unreadable", route=sending.route.name, record=sending.claim.record)
            decision = decide(
                found, concurrent=sending.policy.concurrent, mismatch_status=sending.route.fingerprint.mismatch
            )
            match decision:
                case Replay(completed):
                    await self._replay(arrival, sending.route, completed)
                    return False
                case Refuse(problem):
                    raise problem
                case Wait(problem) if loop.time() >= until_s:
                    raise problem
                case _:
                    await self._wait(sending, min(pause_s, until_s - loop.time()), until_s)
                    pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    async def _ask(self, arrival: Arrival, sending: Sending) -> Found | Reply:
        """What stands under this key: this process's own flight first, then the store; or the exchange's reply."""
        own = self._flights.get(sending.claim.record)
        if own is not None:
            return own.found(sending.claim.fingerprint)
        try:
            return await self._await(arrival, self._exchanges.begin(sending), sending)
        except StoreError as exc:
            if sending.policy.store_unavailable is StoreUnavailable.REJECT:
                raise ProblemError(
                    Outcome.STORE_UNAVAILABLE,
                    _own("The store cannot be asked whether this key was used, so nothing was sent."),
                    retry_after_s=AWAY_S,
                ) from exc
        self.unprotected += 1
        return await self._await(arrival, self._exchanges.begin_unreserved(sending), sending)

    async def _await(self, arrival: Arrival, task: asyncio.Task[Found | Reply], sending: Sending) -> Found | Reply:
        """Wait for the exchange without holding on to it: where the client leaves, it goes on and is logged at its end."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done() and task.cancelled():
                raise
            arrival.logged = arrival.left = True
            task.add_done_callback(lambda done: self._left_behind(arrival, done, sending))
            raise

    def _left_behind(self, arrival: Arrival, task: asyncio.Task[Found | Reply], sending: Sending) -> None:
        """An exchange without a client has ended: its line is written, its contents are freed."""
        if task.cancelled():
            arrival.outcome = Outcome.OUTCOME_UNKNOWN
        elif task.exception() is not None:
            sending.content.close()
            arrival.outcome = Outcome.STORE_UNAVAILABLE
        elif isinstance(reply := task.result(), Reply):
            self._note(arrival, reply)
            reply.close()
        else:
            sending.content.close()
        self._account(arrival)

    async def _wait(self, sending: Sending, pause_s: float, until_s: float) -> None:
        """Until the first request may have ended; no connection to the store is held meanwhile."""
        self.waiting += 1
        try:
            own = self._flights.get(sending.claim.record)
            if own is None:
                await asyncio.sleep(pause_s)
                return
            left_s = until_s - asyncio.get_running_loop().time()
            await asyncio.wait([own.settled], timeout=left_s)
        finally:
            self.waiting -= 1

    # Step 11: the answer.

    def _note(self, arrival: Arrival, reply: Reply) -> None:
        arrival.attempt, arrival.upstream_s = reply.attempt, reply.upstream_s
        if reply.problem is not None:
            arrival.outcome, arrival.problem, arrival.status = reply.problem.slug, reply.problem, reply.problem.status
        elif reply.answer is not None:
            arrival.outcome = Outcome.FORWARDED if reply.protected else Outcome.UNPROTECTED
            arrival.status = reply.answer.status

    async def _deliver(self, arrival: Arrival, reply: Reply) -> None:
        self._note(arrival, reply)
        try:
            if reply.problem is not None:
                raise reply.problem
            assert reply.answer is not None
            answer = reply.answer
            if not reply.protected:
                # The one field we ever add to a fresh answer (amendment to section 12).
                answer = type(answer)(answer.status, answer.reason, (*answer.fields, PROTECTED_FALSE), answer.content)
            await arrival.inbound.answer(answer, reply.content)
        finally:
            reply.close()

    async def _replay(self, arrival: Arrival, route: Route, completed: Completed) -> None:
        status = completed.answer.status
        if not completed.kept:
            raise not_kept_problem(status, sent=Sent.UNKNOWN if 200 <= status < 300 else Sent.NO)
        answer = replay(
            completed,
            route,
            accept_encoding=first(arrival.inbound.fields, b"accept-encoding"),
            date=formatdate(usegmt=True).encode("ascii"),
            limit_bytes=self._limits.request_bytes,
        )
        arrival.outcome, arrival.status = Outcome.REPLAYED, answer.status
        await arrival.inbound.answer(answer)


def _check_connection(route: Route, fields: Fields) -> None:
    """A Connection field must not drop the key, the credential or the framing on the way (RFC 9110 section 7.6.1)."""
    options = connection_options(fields)
    if not options:
        return
    named = {name.lower().encode("ascii") for name in (route.key.field, *route.key.also, *route.credential)}
    named |= {b"host"} | ({route.native.field.lower().encode("ascii")} if route.native else set())
    if any(option in named or option.startswith(b"content-") for option in options):
        raise malformed("The Connection field names a field that has to travel on.")


def _own(text: str) -> str:
    """A detail about this request alone: the record of its key was not read."""
    return f"{text} This request was not sent; its key's record was not read."


def _fault(arrival: Arrival) -> ProblemError:
    if arrival.begun:
        return ProblemError(Outcome.OUTCOME_UNKNOWN, "A fault of the sidecar after the request may have been sent.")
    return ProblemError(Outcome.INTERNAL_ERROR, "A fault of the sidecar, before anything was sent. Repeat the request.")


