"""Puts the parts together, and owns their start, their drain and their close."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace

from aiohttp import web

from sidecar.admin import Admin, Readiness
from sidecar.admin_records import RecordPages
from sidecar.config import Address, Config, Route
from sidecar.content import Memory
from sidecar.embedded import Embedded
from sidecar.errors import ConfigError, ProblemError, StartError, StoreError
from sidecar.exchange import Exchanges
from sidecar.flights import Flights
from sidecar.guard import Guard
from sidecar.ledger import Ledger
from sidecar.listeners import BACKLOG, bind, is_loopback
from sidecar.logline import Log
from sidecar.metrics import Metrics
from sidecar.proxy import Proxy, Table
from sidecar.records import Records
from sidecar.routing import Router
from sidecar.server import Inbound, Server
from sidecar.store import Store
from sidecar.upstream import Upstream

# After the listeners are closed: what a client wrote onto a connection that was accepted by then is still served.
ACCEPTED_S = 0.1
# When the share of sends without a key is told in the log.
SHARE_AFTER_S = 60.0

LOCAL_STORE = (
    "the embedded store is this sidecar's own: retries that reach another sidecar, or this one after its volume is"
    " gone, are new; more than one replica needs a shared Redis"
)


@dataclass(frozen=True, slots=True)
class _Door:
    """A listening socket, with the server behind it."""

    site: web.SockSite
    server: Server
    socket: socket.socket

    async def close(self) -> None:
        """Listen no more; who has connected by now is let in, where a plain close would reset him."""
        loop = asyncio.get_running_loop()
        with self.socket.dup() as last:
            last.setblocking(False)
            await self.site.stop()
            while True:
                try:
                    connected, _ = last.accept()
                except OSError:
                    return
                connected.setblocking(False)
                await loop.connect_accepted_socket(self.server, connected)


class Assembly:
    """The running sidecar."""

    def __init__(self, config: Config, log: Log, embedded: Embedded | None) -> None:
        """`embedded`: the private server, started already, or None where the store is another's."""
        self._config = config
        self._log = log
        self._embedded = embedded
        self.metrics = Metrics()
        self._memory = Memory(config.limits.memory_bytes)
        self._store = Store(
            config.store,
            socket_path="" if embedded is None else embedded.socket_path,
            wall_ms=_wall_ms,
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
        self._runners: list[web.ServerRunner] = []
        self._doors: list[_Door] = []
        self._unix: list[str] = []
        self._admin: web.ServerRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._checked = False
        self.failed: asyncio.Future[StartError] = asyncio.get_running_loop().create_future()
        self._gauges()

    def _gauges(self) -> None:
        self.metrics.gauges |= {
            "sidecar_outstanding": lambda: float(self._proxy.under_way),
            "sidecar_unsettled": lambda: float(self._flights.unsettled),
            "sidecar_waiting": lambda: float(self._proxy.waiting),
            "sidecar_content_bytes": lambda: float(self._memory.held_bytes),
            "sidecar_store_restarts": lambda: float(0 if self._embedded is None else self._embedded.restarts),
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

        Raises: StartError naming an address.
        """
        config = self._config
        self._store.start()
        self._flights.start()
        if self._embedded is not None:
            self._hold(self._embedded.watch())
            self._log.warning("store", message=LOCAL_STORE)
        self._hold(self._check_store())
        self._hold(self._tell_share())
        for address in config.listen:
            await self._listen(address, None)
        for route in config.routes:
            for address in route.listen:
                await self._listen(address, address)
        if config.admin.listen:
            await self._listen_admin()
        for warning in config.warnings:
            self._log.warning("configuration", message=warning)
        self._log.info(
            "serving", listen=", ".join(map(str, config.listen)), admin=", ".join(map(str, config.admin.listen))
        )

    def _hold(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    def _bind(self, address: Address) -> list[socket.socket]:
        made = bind(address, lambda sentence: self._log.warning("listen", message=sentence))
        if address.unix:
            self._unix.append(address.unix)
        return made

    async def _listen(self, address: Address, own: Address | None) -> None:
        async def handle(inbound: Inbound) -> bool:
            return await self._proxy.handle(inbound, own)

        def refused(problem: ProblemError) -> None:
            self._proxy.refused(problem)

        server = Server(
            handle,
            malformed=refused,
            closing=lambda: self._proxy.draining,
            header_bytes=self._config.limits.header_bytes,
        )
        runner = web.ServerRunner(server)
        await runner.setup()
        self._runners.append(runner)
        for made in self._bind(address):
            site = web.SockSite(runner, made, backlog=BACKLOG)
            await site.start()
            self._doors.append(_Door(site, server, made))

    async def _listen_admin(self) -> None:
        addresses = self._config.admin.listen
        guard = Guard(token=self._config.admin.token, everywhere=not all(map(is_loopback, addresses)))
        records = Records(
            Ledger(self._store),
            self._flights,
            routes=lambda: {route.name: route for route in self._config.routes},
            wall_ms=_wall_ms,
        )
        admin = Admin(
            metrics=self.metrics,
            readiness=self.readiness,
            stats=self.stats,
            guard=guard,
            records=RecordPages(records, guard, log=self._log, answer_bytes=self._config.limits.stored_response_bytes),
        )
        self._admin = web.ServerRunner(web.Server(admin.handle, access_log=None))
        await self._admin.setup()
        for address in addresses:
            for made in self._bind(address):
                await web.SockSite(self._admin, made).start()

    async def _check_store(self) -> None:
        """Look at the store's promises once it can be asked; a missing right ends the start, an absent store not."""
        while not self._checked:
            try:
                await self._store.check()
                self._checked = True
            except StoreError:
                await asyncio.sleep(0.2)
            except StartError as exc:
                self.failed.set_result(exc)
                return

    async def _tell_share(self) -> None:
        await asyncio.sleep(SHARE_AFTER_S)
        proxy = self._proxy
        if proxy.unprotected:
            self._log.warning(
                "unprotected",
                message="sends without a key are forwarded each time they come; key.missing: reject refuses them",
                sends=proxy.sends,
                unprotected=proxy.unprotected,
            )

    # What it says of itself.

    def readiness(self) -> Readiness:
        """Whether to send requests here, and why not."""
        reasons = []
        if self._proxy.draining:
            reasons.append("draining: this sidecar shuts down")
        trouble = "" if self._embedded is None else self._embedded.trouble
        if trouble or self._store.trouble:
            reasons.append(f"store: {trouble or self._store.trouble}")
        notes = list(self._store.warnings)
        if self._embedded is not None:
            notes.append(LOCAL_STORE)
        sends = self._proxy.sends
        share = round(self._proxy.unprotected / sends, 4) if sends else None
        return Readiness(tuple(reasons), tuple(notes), share)

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

    # SIGHUP.

    def reload(self, reread: Callable[[], Config]) -> None:
        """Take routes and policies of the file as it is now; a file with mistakes changes nothing."""
        try:
            fresh = reread()
            self._take_over(fresh)
        except ConfigError as exc:
            for finding in exc.findings:
                self._log.error("configuration", message=str(finding))
        except StartError as exc:
            self._log.error("configuration", message=str(exc))
        else:
            self._log.info("configuration", message="read again", routes=len(self._config.routes))
            return
        self._log.error("configuration", message="the configuration in force stays as it is")

    def _take_over(self, fresh: Config) -> None:
        old = {route.name: route for route in self._config.routes}
        routes = tuple(self._carried(route, old.get(route.name)) for route in fresh.routes)
        for name in ("listen", "admin", "store", "limits", "drain_s", "log"):
            if getattr(fresh, name) != getattr(self._config, name):
                self._log.warning("configuration", message=f"{name.removesuffix('_s')}: changed; needs a restart")
        upstreams = {}
        for route in routes:
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
                self._hold(one.close())  # what goes on there ends in peace
        self._config = replace(self._config, routes=routes)
        self._proxy.table = Table(Router(self._config), upstreams)

    def _carried(self, route: Route, before: Route | None) -> Route:
        """The route as it takes effect now: what names its records, and where it listens, changes by restart alone."""
        if before is None:
            if route.listen:
                self._log.warning("configuration", message=f"routes.{route.name}.listen: needs a restart")
            return replace(route, listen=())
        for name in ("scope", "path", "host", "listen", "upstream"):
            if getattr(route, name) != getattr(before, name):
                self._log.warning("configuration", message=f"routes.{route.name}.{name}: changed; needs a restart")
        return replace(
            route,
            scope=before.scope,
            path=before.path,
            host=before.host,
            listen=before.listen,
            upstream=before.upstream,
        )

    # The end.

    async def drain(self, drain_s: float) -> None:
        """Not ready; new requests are served for `drain_s` more, answered with `Connection: close`."""
        self._proxy.draining = True
        self._log.info("draining", seconds=drain_s)
        await asyncio.sleep(drain_s)

    async def finish(self) -> int:
        """Listen no more, let what is outstanding end and be recorded; how many outcomes the store has not taken."""
        self._proxy.draining = True
        for door in self._doors:
            await door.close()
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
        for runner in (*self._runners, *([self._admin] if self._admin else [])):
            await runner.cleanup()
        for path in self._unix:
            with suppress(OSError):
                os.unlink(path)
        for upstream in self._proxy.table.upstreams.values():
            await upstream.close()
        await self._flights.close()
        await self._store.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._embedded is not None:
            await self._embedded.stop()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _help_url(config: Config) -> str:
    """Where the admin listener explains problems, as somebody on this host can open it."""
    for address in config.admin.listen:
        if not address.unix:
            host = "localhost" if address.host in ("0.0.0.0", "::") else address.host  # noqa: S104 - compared, not bound
            return f"http://{Address(host, address.port)}/problems"
    return ""
