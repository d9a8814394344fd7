"""The data plane: the walk of a request.

 1 read the head, find the route           `Inbound.check`, `routing.Router`
 2 read the key                            `key.find`
 3 scope                                   `key.scope`, `key.record_id`
 4 read the content, fingerprint it        `intake.take`
 5 reserve                                 `exchange.Exchanges.begin`, one script
 6 decide                                  `record.decide`: forward, replay, wait or a problem
 7 approve, where the route asks           not in this version
 8 sign, where the route signs             not in this version
 9 forward once                            `upstream.Upstream.send`
10 complete, release or mark unknown       `flights.Flights.settle`
11 answer; one log line, one counter       `protected.Protected`, `Proxy._account`

Steps 5, 9 and 10 are a task of their own: a client that hangs up changes nothing there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sidecar import key as keys
from sidecar.arrival import Arrival
from sidecar.config import Address, Limits, Missing, Route, Send
from sidecar.content import Content, Memory
from sidecar.errors import Outcome, ProblemError, Sent
from sidecar.exchange import Exchanges
from sidecar.flights import Flights
from sidecar.intake import AWAY_S, Taken, of_this_request, take, too_large
from sidecar.key import Key
from sidecar.logline import Log
from sidecar.message import Fields, connection_options, first, values
from sidecar.metrics import Metrics
from sidecar.pairs import Pair
from sidecar.passing import SAFE, pass_through
from sidecar.problem import render
from sidecar.protected import Protected
from sidecar.protocol import malformed
from sidecar.routing import Match, Router, discriminated, discriminators
from sidecar.server import Inbound
from sidecar.upstream import Upstream

# How many paths are named in the log as passed with a key; a scan of many must not fill it.
MOST_NAMED = 20
# How far a stored answer may unfold for a retry that does not take its coding: it is done in one go.
UNFOLDED = 4


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
        """`token`: random bytes of this process. `help_url`: see `problem.render`."""
        self.table = table
        self.draining = False
        self.under_way = 0
        self.sends = 0
        self._keyless = 0
        self._named: set[tuple[str, bytes, str]] = set()
        self._memory = memory
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self._help_url = help_url
        self._flights = flights
        self._protected = Protected(
            flights=flights,
            exchanges=exchanges,
            metrics=metrics,
            log=log,
            account=self._account,
            token=token,
            unfold_bytes=UNFOLDED * limits.stored_response_bytes,
        )

    @property
    def unprotected(self) -> int:
        """Sends that were forwarded without protection."""
        return self._keyless + self._protected.unprotected

    @property
    def waiting(self) -> int:
        """Arrivals that wait for the first request under their key."""
        return self._protected.waiting

    @property
    def closed(self) -> bool:
        """Whether new requests are refused and waiting ones are told to come back."""
        return self._protected.closed

    def end(self) -> None:
        """Take nothing new; what is under way ends by itself."""
        self.draining = self._protected.closed = True

    # The outermost edge: whatever happens inside, the client gets one answer and the log one line.

    async def handle(self, inbound: Inbound, listener: Address | None = None) -> bool:
        """Serve one request; whether the connection may go on. `listener`: a route's own, None for the main ones."""
        arrival = Arrival(inbound, time.perf_counter())
        self.under_way += 1
        try:
            await self._walk(arrival, listener)
        except ProblemError as problem:
            await self._refuse(arrival, problem)
        except ConnectionError:
            arrival.left = True
            inbound.end_connection()
        except asyncio.CancelledError:
            arrival.left = True
            raise
        except Exception as exc:  # noqa: BLE001 - the outermost edge
            # Nothing is undone by this: exchanges are tasks of their own and settle their own faults.
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
            inbound.end_connection()
        if inbound.request.writer.output_size > 0:
            inbound.abort()  # an answer was begun: it must not look whole
            return
        try:
            await inbound.answer(answer)
        except ConnectionError:
            arrival.left = True
            inbound.end_connection()

    def refused(self, problem: ProblemError) -> None:
        """Count and log a request that the parser refused."""
        self._metrics.count("sidecar_requests", "-", problem.slug)
        self._log.info("request", outcome=problem.slug, route="-", status=problem.status, sent=problem.sent)

    def _account(self, arrival: Arrival) -> None:
        arrival.logged = True
        took_s = time.perf_counter() - arrival.begin_s
        self._metrics.count("sidecar_requests", arrival.route, arrival.outcome)
        self._metrics.observe("sidecar_request_seconds", arrival.route, took_s)
        problem = arrival.problem
        # Somebody has to look at a key that became unknown here; its repeats, which made no attempt, tell nothing new.
        tell = self._log.warning if arrival.attempt and arrival.outcome is Outcome.OUTCOME_UNKNOWN else self._log.info
        tell(
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
        inbound, table = arrival.inbound, self.table
        declared = inbound.check(self._limits.header_bytes)
        match = table.router.match(
            listener=listener, host=first(inbound.fields, b"host"), method=inbound.method, target=inbound.target
        )
        # Route and upstream of one table: the configuration may be read again while this request runs.
        arrival.match, arrival.upstream = match, table.upstreams[match.route.name]
        self._admit()
        _check_connection(match.route, inbound.fields)
        inbound.expects_continue()
        if not match.sends:
            arrival.outcome = Outcome.PASSED
            self._look_for_key(arrival, match)
            await self._pass(arrival, None)
            return
        if declared is not None and declared > self._limits.request_bytes:
            raise too_large(self._limits)
        if discriminators(match):
            await self._told_by_content(arrival, match)
            return
        send = match.sends[0]
        key = keys.find(match.route, inbound.fields)
        if key is None and not keys.members(match.route):
            await self._keyless_send(arrival, send, None)
        else:
            await self._send(arrival, match.route, send, key, await self._take(arrival, match.route, key))

    def _look_for_key(self, arrival: Arrival, match: Match) -> None:
        """Whoever sends a key wants protection: where no send is named, the configuration may have a mistake."""
        inbound, route = arrival.inbound, match.route
        if inbound.method in SAFE or first(inbound.fields, route.key.field.lower().encode("ascii")) is None:
            return
        self._metrics.count("sidecar_passed_with_key", route.name)
        # A segment that could be an address is left out.
        path = "/".join("*" if "@" in part or "%" in part else part for part in match.path.decode("latin-1").split("/"))
        named = (route.name, inbound.method, path)
        if named not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(named)
            self._log.warning(
                "passed-with-key",
                route=route.name,
                method=inbound.method.decode("ascii"),
                path=path,
                message="it carries a key and is no send, so it is forwarded without protection; if it sends mail, add"
                " it to `sends`",
            )

    def _admit(self) -> None:
        if self.closed:
            detail = of_this_request("This sidecar shuts down; ask another one, or later.")
            raise ProblemError(Outcome.DRAINING, detail, retry_after_s=AWAY_S)
        # Exchanges whose clients left still hold their content and a connection.
        if self.under_way + self._protected.behind + self._flights.unsettled > self._limits.outstanding:
            detail = of_this_request("Too many requests are under way (limits.outstanding).")
            raise ProblemError(Outcome.OVERLOADED, detail, retry_after_s=AWAY_S)

    async def _take(
        self, arrival: Arrival, route: Route, key: Key | None, names: frozenset[bytes] = frozenset()
    ) -> Taken:
        watch = (*(name.decode() for name in names), *(keys.members(route) if key is None else ()))
        return await take(arrival, memory=self._memory, limits=self._limits, watch=watch)

    async def _told_by_content(self, arrival: Arrival, match: Match) -> None:
        """A path that sends or reads, as a query or form field says (`Action=SendEmail`)."""
        names = discriminators(match)
        key = keys.find(match.route, arrival.inbound.fields)
        taken = await self._take(arrival, match.route, key, names)
        try:
            send = await self._meant(arrival, match, taken)
        except BaseException:
            taken.content.close()  # the client left while it was read once more
            raise
        if send is None:
            arrival.outcome = Outcome.PASSED
            await self._pass(arrival, taken.content)
        else:
            await self._send(arrival, match.route, send, key, taken)

    @staticmethod
    async def _meant(arrival: Arrival, match: Match, taken: Taken) -> Send | None:
        """The send that query or content name, however they spell it; where the content cannot be read, the first."""
        found = {name: taken.watched.get(name.decode(), b"") for name in discriminators(match)}
        send = discriminated(match, found)
        if send is not None:
            return send
        for send in match.sends:
            assert send.discriminator is not None
            pair = Pair(*send.discriminator)
            if any(pair.stands_in([match.query])):
                return send
            for stands in pair.stands_in(taken.content.pieces()):
                if stands:
                    return send
                await asyncio.sleep(0)
        coded = values(arrival.inbound.fields, b"content-encoding")
        return match.sends[0] if coded and coded != [b"identity"] else None

    async def _send(self, arrival: Arrival, route: Route, send: Send, key: Key | None, taken: Taken) -> None:
        try:
            if key is None:
                key = keys.find_in_content(route, taken.watched)
        except ProblemError:
            taken.content.close()
            raise
        if key is None:
            await self._keyless_send(arrival, send, taken.content)
            return
        arrival.send = send.text
        self.sends += 1
        await self._protected.answer(arrival, self._protected.sending(arrival, send, key, taken))

    async def _keyless_send(self, arrival: Arrival, send: Send, content: Content | None) -> None:
        """A send without a key: refused, or forwarded unprotected, as the route says."""
        assert arrival.match is not None
        arrival.send = send.text
        self.sends += 1
        rules = arrival.match.route.key
        if rules.missing is Missing.REJECT:
            if content is not None:
                content.close()
            raise ProblemError(
                Outcome.KEY_MISSING, f"This route asks for a key: send {rules.field} with a value of your own per mail."
            )
        self._keyless += 1
        arrival.outcome = Outcome.UNPROTECTED
        await self._pass(arrival, content)

    async def _pass(self, arrival: Arrival, content: Content | None) -> None:
        try:
            await pass_through(arrival, content)
        finally:
            if content is not None:
                content.close()


def _check_connection(route: Route, fields: Fields) -> None:
    """A Connection field must not drop the key, the credential or the framing on the way (RFC 9110 section 7.6.1)."""
    options = connection_options(fields)
    if not options:
        return
    named = {name.lower().encode("ascii") for name in (route.key.field, *route.key.also, *route.credential)}
    named |= {b"host"} | ({route.native.field.lower().encode("ascii")} if route.native else set())
    if any(option in named or option.startswith(b"content-") for option in options):
        raise malformed("The Connection field names a field that has to travel on.")


def _fault(arrival: Arrival) -> ProblemError:
    """500 where nobody foresaw what happened; whether a mail may have left is still told right."""
    return ProblemError(
        Outcome.INTERNAL_ERROR,
        "A fault of the sidecar. Repeat the same request under the same key.",
        sent=Sent.UNKNOWN if arrival.begun else Sent.NO,
    )
