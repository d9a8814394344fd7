"""Puts the parts of a serving process together, and owns their start, their drain and their close.

The process is the whole sidecar, or one of several workers: then its supervisor has the listening sockets, the
embedded store and the operator's side.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from sidecar.admin import Admin, Readiness
from sidecar.admin_records import RecordPages
from sidecar.administration import Administration, share, wall_ms
from sidecar.config import Address, Config, Route
from sidecar.content import Memory
from sidecar.embedded import Embedded
from sidecar.entrance import Entrance
from sidecar.errors import ProblemError, StartError
from sidecar.exchange import Exchanges
from sidecar.flights import Flights
from sidecar.ledger import Ledger
from sidecar.listeners import Listening, Place
from sidecar.logline import Log
from sidecar.message import RecordId
from sidecar.metrics import Metrics
from sidecar.protocol import HEAD_S
from sidecar.proxy import Proxy, Table
from sidecar.records import Records
from sidecar.reloading import carried, reload
from sidecar.routing import Router
from sidecar.server import Inbound, Server
from sidecar.store import Store
from sidecar.upstream import Upstream

# After the listeners are closed: what a client wrote onto a connection that was accepted by then is still served.
ACCEPTED_S = 0.1


@dataclass(frozen=True, slots=True)
class Member:
    """What a worker has from its supervisor. `socket_path`: of the embedded store, empty where it is another's."""

    places: tuple[Place, ...]
    socket_path: str


# How long connections that are still in use are waited for at the very end.
CLOSE_S = 2.0


class Assembly:
    """What serves the data plane; with the operator's side, unless it is a worker."""

    def __init__(self, config: Config, log: Log, embedded: Embedded | None, member: Member | None = None) -> None:
        """`embedded`: the private server, started already, or None where the store is another's.

        `member`: for a worker alone.
        """
        self._config = config
        self._log = log
        self._member = member
        socket_path = "" if embedded is None else embedded.socket_path
        self.metrics = Metrics()
        self._memory = Memory(config.limits.memory_bytes)
        self._store = Store(
            config.store,
            socket_path=socket_path if member is None else member.socket_path,
            wall_ms=wall_ms,
            report=lambda sentence: log.warning("store", message=sentence),
            observe=lambda script, took_s: self.metrics.observe("sidecar_store_seconds", script, took_s),
        )
        self._flights = Flights(self._store, metrics=self.metrics, log=log)
        self._exchanges = Exchanges(
            self._store,
            self._flights,
            memory=self._memory,
            stored_bytes=config.limits.stored_response_bytes,
            metrics=self.metrics,
            log=log,
        )
        self._proxy = Proxy(
            Table(Router(config), {route.name: self._upstream(route) for route in config.routes}),
            flights=self._flights,
            exchanges=self._exchanges,
            memory=self._memory,
            limits=config.limits,
            metrics=self.metrics,
            log=log,
            token=secrets.token_hex(8).encode(),
            help_url=_help_url(config),
        )
        self._listening = Listening(lambda sentence: log.warning("listen", message=sentence))
        self._entrances: list[Entrance] = []
        self._closing: list[asyncio.Task[None]] = []
        self._administration = Administration(config, log, store=self._store, embedded=embedded)
        self.failed = self._administration.failed
        self._gauges()

    def _gauges(self) -> None:
        self.metrics.gauges |= {
            "sidecar_outstanding": lambda: float(self._proxy.under_way),
            "sidecar_unsettled": lambda: float(self._flights.unsettled),
            "sidecar_waiting": lambda: float(self._proxy.waiting),
            "sidecar_content_bytes": lambda: float(self._memory.held_bytes),
            "sidecar_store_restarts": lambda: float(self._administration.restarts),
            "sidecar_store_up": lambda: float(not self._store.trouble),
            "sidecar_ready": lambda: float(not self.readiness().reasons),
        }

    def _upstream(self, route: Route) -> Upstream:
        try:
            return Upstream(
                route.upstream,
                timeout=route.timeout,
                keepalive_s=route.upstream_keepalive_s,
                ca=route.ca,
                header_bytes=self._config.limits.header_bytes,
            )
        except OSError as exc:  # ssl.SSLError is one
            raise StartError(f"routes.{route.name}.ca: {route.ca} cannot be read as certificates") from exc

    # Start.

    async def start(self) -> None:
        """Bind every listener and serve; the store may still be away.

        A worker serves nobody before `accept`. Raises: StartError naming an address.
        """
        self._store.start()
        self._flights.start()
        if self._member is not None:
            await self._listen(self._member.places)
            return
        self._administration.start(lambda: (self._proxy.sends, self._proxy.unprotected))
        await self._listen(self._listening.places(self._config))
        await self.accept(frozenset((0,)))
        if self._config.admin.listen:
            await self._administration.listen(self._admin(), self._listening)
        self._administration.tell()

    async def _listen(self, places: Iterable[Place]) -> None:
        for place in places:
            server = self._server(place.address if place.own else None)
            entrance = Entrance(server, place)
            self._entrances.append(entrance)
            await entrance.start()

    def _server(self, own: Address | None) -> Server:
        async def handle(inbound: Inbound) -> bool:
            return await self._proxy.handle(inbound, own)

        def refused(problem: ProblemError) -> None:
            self._proxy.refused(problem)

        return Server(
            handle,
            malformed=refused,
            closing=lambda: self._proxy.draining,
            header_bytes=self._config.limits.header_bytes,
            head_s=max((route.timeout.receive_s for route in self._config.routes), default=HEAD_S),
        )

    async def accept(self, slots: Set[int]) -> None:
        """Let in the clients of these sockets of each listener, by number, and of no others."""
        for entrance in self._entrances:
            await entrance.accept(slots)

    def _admin(self) -> Admin:
        guard = self._administration.guard()
        records = Records(
            Ledger(self._store),
            self._flights,
            routes=lambda: {route.name: route for route in self._config.routes},
            wall_ms=wall_ms,
        )
        return Admin(
            metrics=self.metrics,
            readiness=self.readiness,
            stats=self.stats,
            guard=guard,
            records=RecordPages(records, guard, log=self._log, answer_bytes=self._config.limits.stored_response_bytes),
        )

    # What it says of itself.

    def readiness(self) -> Readiness:
        """Whether to send requests here, and why not."""
        reasons = []
        if self._proxy.draining:
            reasons.append("draining: this sidecar shuts down")
        if trouble := self._administration.trouble:
            reasons.append(f"store: {trouble}")
        unprotected = share(self._proxy.sends, self._proxy.unprotected)
        return Readiness(tuple(reasons), tuple(self._administration.notes()), unprotected)

    def stats(self) -> dict[str, object]:
        """Totals since this process started."""
        return {
            "outcomes": self.metrics.totals(),
            "outstanding": self._proxy.under_way,
            "waiting": self._proxy.waiting,
            "unsettled": self._flights.unsettled,
            "content_bytes": self._memory.held_bytes,
            "sends": self._proxy.sends,
            "unprotected": self._proxy.unprotected,
        }

    def flying(self, record: RecordId) -> str | None:
        """The route of the request under this record that runs in this process; None where there is none."""
        flight = self._flights.get(record)
        return None if flight is None else flight.claim.route

    # SIGHUP.

    def reload(self, reread: Callable[[], Config]) -> None:
        """Take routes and policies of the file as it is now; a file with mistakes changes nothing."""
        reload(reread, self.take_over, self._log)

    def take_over(self, fresh: Config) -> Config:
        """Let another configuration take effect, as far as it can without a restart; the one in force then.

        Raises: StartError, and then nothing has changed.
        """
        config = carried(self._config, fresh, lambda sentence: self._log.warning("configuration", message=sentence))
        old = {route.name: route for route in self._config.routes}
        upstreams = {}
        for route in config.routes:
            before = old.get(route.name)
            same = before is not None and (before.timeout, before.upstream_keepalive_s, before.ca, before.upstream) == (
                route.timeout,
                route.upstream_keepalive_s,
                route.ca,
                route.upstream,
            )
            upstreams[route.name] = self._proxy.table.upstreams[route.name] if same else self._upstream(route)
        kept = set(map(id, upstreams.values()))
        for one in self._proxy.table.upstreams.values():
            if id(one) not in kept:
                # What goes on there ends in peace.
                self._closing.append(asyncio.get_running_loop().create_task(one.close()))
        self._config = config
        self._proxy.table = Table(Router(config), upstreams)
        return config

    # The end.

    def not_ready(self) -> None:
        """Say that the end is near; requests are served on, each with `Connection: close`."""
        self._proxy.draining = True

    async def drain(self, drain_s: float) -> None:
        """Not ready; new requests are served for `drain_s` more, answered with `Connection: close`."""
        self.not_ready()
        self._log.info("draining", seconds=drain_s)
        await asyncio.sleep(drain_s)

    async def finish(self) -> int:
        """Listen no more, let what is outstanding end and be recorded; how many outcomes the store has not taken."""
        self._proxy.draining = True
        for entrance in self._entrances:
            await entrance.close()
        await asyncio.sleep(ACCEPTED_S)
        self._proxy.end()
        await self._exchanges.finish()
        # What is passed through is bounded by silence alone, so here by time.
        until_s = time.monotonic() + max((route.timeout.total_s for route in self._config.routes), default=0.0)
        while self._proxy.under_way and time.monotonic() < until_s:  # noqa: ASYNC110 - once a process
            await asyncio.sleep(0.01)
        lease_s = max((send.policy.lease_s for route in self._config.routes for send in route.sends), default=0.0)
        return await self._flights.drain(lease_s)

    async def finish_now(self) -> int:
        """A second signal: what has not begun is released, what has is marked unknown."""
        self._proxy.end()
        self._exchanges.end_now()
        await self._exchanges.finish()
        return await self._flights.drain(2 * self._config.store.timeout_s)

    async def close(self) -> None:
        """Drop everything, the store's server last."""
        for entrance in self._entrances:
            await entrance.cleanup()
        await self._administration.close_listener()
        self._listening.remove()
        for upstream in self._proxy.table.upstreams.values():
            try:
                async with asyncio.timeout(CLOSE_S):
                    await upstream.close()
            except TimeoutError:
                pass  # what is still written there is cut with the process
        await self._flights.close()
        await self._store.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._administration.close()


def _help_url(config: Config) -> str:
    """Where the admin listener explains problems, as somebody on this host can open it."""
    for address in config.admin.listen:
        if not address.unix:
            host = "localhost" if address.host in ("0.0.0.0", "::") else address.host  # noqa: S104 - compared, not bound
            return f"http://{Address(host, address.port)}/problems"
    return ""
