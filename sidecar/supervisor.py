"""The sidecar where several processes serve: has what there is once, and speaks for all of them.

It owns the listening sockets, the embedded store and the operator's side, starts the workers and starts them again,
passes signals on, and adds up what they count. It serves no mail. Killed, its workers see their line end and end too.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from sidecar.admin import Admin, Readiness
from sidecar.admin_records import RecordPages
from sidecar.administration import Administration, share, wall_ms
from sidecar.config import Config, Policy, Timeout
from sidecar.embedded import Embedded
from sidecar.errors import StartError
from sidecar.guard import Guard
from sidecar.ledger import Ledger, nobody
from sidecar.listeners import Listening
from sidecar.logline import Log
from sidecar.message import RecordId
from sidecar.metrics import Metrics
from sidecar.records import Records
from sidecar.reloading import carried, reload
from sidecar.store import Claim, Store
from sidecar.tls import client_context
from sidecar.workers import Workers

# Beyond what the last exchange and the last lease may take: to write, and to exit.
SPARE_S = 5.0
# What workers hold now, and the gauge that says so.
HELD = {
    "outstanding": "sidecar_outstanding",
    "waiting": "sidecar_waiting",
    "unsettled": "sidecar_unsettled",
    "content_bytes": "sidecar_content_bytes",
}
REMEMBERED = 1000
OF_ONE_RECORD = re.compile("/v1/records/([0-9a-f]{40})(?:/[a-z]+)?")


class Supervisor:
    """Everything but the data plane, which the workers serve."""

    def __init__(
        self, config: Config, log: Log, embedded: Embedded | None, workers: Workers, listening: Listening
    ) -> None:
        """`workers`: started by now. `listening`: what bound their sockets."""
        self._config = config
        self._log = log
        self._workers = workers
        self._listening = listening
        self._own = Metrics()
        self.metrics = Metrics()
        self._store = Store(
            config.store,
            socket_path="" if embedded is None else embedded.socket_path,
            wall_ms=wall_ms,
            report=lambda sentence: log.warning("store", message=sentence),
            observe=lambda script, took_s: self._own.observe("sidecar_store_seconds", script, took_s),
        )
        self._administration = Administration(config, log, store=self._store, embedded=embedded)
        self.failed = self._administration.failed
        self._draining = False
        self._gauges()

    def _gauges(self) -> None:
        def held(name: str) -> Callable[[], float]:
            return lambda: float(self._numbers()[name])

        self.metrics.gauges |= {gauge: held(name) for name, gauge in HELD.items()}
        self.metrics.gauges |= {
            "sidecar_workers": lambda: float(self._workers.serving),
            "sidecar_worker_restarts": lambda: float(self._workers.restarts),
            "sidecar_store_restarts": lambda: float(self._administration.restarts),
            "sidecar_store_up": lambda: float(not self._store.trouble),
            "sidecar_ready": lambda: float(not self.readiness().reasons),
        }

    # Start.

    async def start(self) -> None:
        """Follow the workers and serve the admin listener; the store may still be away.

        Raises: StartError naming an address.
        """
        self._workers.start(self.failed)
        self._store.start()
        self._administration.start(lambda: (self._numbers()["sends"], self._numbers()["unprotected"]))
        if self._config.admin.listen:
            await self._administration.listen(self._admin(), self._listening)
        self._administration.tell()

    def _admin(self) -> Admin:
        guard = self._administration.guard()
        elsewhere = _Elsewhere(self._workers)
        records = Records(
            Ledger(self._store),
            elsewhere,
            routes=lambda: {route.name: route for route in self._config.routes},
            wall_ms=wall_ms,
        )
        answer_bytes = self._config.limits.stored_response_bytes
        return Admin(
            metrics=self.metrics,
            readiness=self.readiness,
            stats=self.stats,
            guard=guard,
            records=_Pages(records, guard, log=self._log, answer_bytes=answer_bytes, elsewhere=elsewhere),
            refresh=self._refresh,
        )

    # What it says for all.

    async def _refresh(self) -> None:
        """Ask the workers, for as long as a page may take, and add up."""
        await self._workers.refresh()
        total = Metrics()
        for snapshot in (self._own.snapshot(), self._workers.ended.snapshot()):
            total.add(snapshot)
        for state in self._workers.states():
            total.add(state["metrics"])
        self.metrics.counters, self.metrics.histograms = total.counters, total.histograms

    def _numbers(self) -> Counter[str]:
        """The numbers of all workers, those that ended included where they are of the past."""
        numbers = Counter(self._workers.past)
        for state in self._workers.states():
            numbers.update(state["stats"])
        return numbers

    def readiness(self) -> Readiness:
        """Whether to send requests here: once all workers have served, while one of them does."""
        reasons = ["draining: this sidecar shuts down"] if self._draining else []
        notes = self._administration.notes()
        if trouble := self._administration.trouble:
            reasons.append(f"store: {trouble}")
        else:
            # One whose own connection to the store is away refuses its share of the mails.
            told = (reason for state in self._workers.states() for reason in state["reasons"])
            reasons += dict.fromkeys(reason for reason in told if reason.startswith("store: "))
        served = self._workers.complete and self._workers.serving
        (notes if served else reasons).extend(self._workers.troubles())
        numbers = self._numbers()
        return Readiness(tuple(reasons), tuple(notes), share(numbers["sends"], numbers["unprotected"]))

    def stats(self) -> dict[str, object]:
        """Totals since the sidecar started."""
        numbers = self._numbers()
        return {
            "outcomes": self.metrics.totals(),
            **{name: numbers[name] for name in (*HELD, "sends", "unprotected")},
            "workers": self._workers.serving,
        }

    # SIGHUP.

    def reload(self, reread: Callable[[], Config]) -> None:
        """Let all workers take routes and policies of the file as it is now; one with mistakes changes nothing."""
        reload(reread, self._take_over, self._log)

    def _take_over(self, fresh: Config) -> Config:
        config = carried(self._config, fresh, lambda sentence: self._log.warning("configuration", message=sentence))
        for route in config.routes:
            if route.upstream.scheme == "https":
                try:
                    client_context(route.ca)
                except OSError as exc:
                    sentence = f"routes.{route.name}.ca: {route.ca} cannot be read as certificates"
                    raise StartError(sentence) from exc
        self._config = config
        self._workers.take_over(config)
        return config

    # The end.

    async def drain(self, drain_s: float) -> None:
        """Not ready; the workers serve new requests for `drain_s` more, and then end by themselves."""
        self._draining = True
        self._log.info("draining", seconds=drain_s)
        self._workers.end(drain_s)
        await asyncio.sleep(drain_s)

    async def finish(self) -> int:
        """Wait until all workers have ended; how many outcomes the store has not taken."""
        sends = [(route.timeout, send.policy) for route in self._config.routes for send in route.sends]
        await self._workers.gone(max((_longest_s(*one) for one in sends), default=0.0) + SPARE_S)
        return self._workers.left

    async def finish_now(self) -> int:
        """A second signal: what has not begun is released, what has is marked unknown."""
        self._workers.end_now()
        await self._workers.gone(2 * self._config.store.timeout_s + SPARE_S)
        return self._workers.left

    async def close(self) -> None:
        """Drop everything, the store's server last."""
        if not self._draining:
            self._workers.end(0.0)
            await self.finish_now()
        await self._workers.close()
        await self._administration.close_listener()
        self._listening.remove()
        await self._store.close()
        await self._administration.close()


def _longest_s(timeout: Timeout, policy: Policy) -> float:
    """How long a worker may take to end: an exchange with its repeats, something passed through, then a lease."""
    pauses_s = policy.retry.backoff_s * float(1 << policy.retry.attempts)
    exchange_s = (timeout.connect_s + timeout.total_s) * policy.retry.attempts + pauses_s
    return exchange_s + timeout.total_s + policy.lease_s


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A request that runs in a worker, as far as the operator's side needs to know it."""

    claim: Claim


class _Elsewhere:
    """The flights of all workers, under the records that were asked about."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._known: dict[RecordId, _Attempt] = {}

    async def look(self, records: list[RecordId]) -> None:
        """Ask all workers which of these records have a flight of theirs.

        What begins after the answer stands in the store as outstanding before it sends.
        """
        answers = await self._workers.ask("flying", records=records)
        for record in records:
            self._known.pop(record, None)
        for answer in answers:
            for record, route in answer.items():
                self._known[record] = _Attempt(nobody(record, route=route))
        # Whoever asks looks first: what is left from others is of no use.
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def get(self, record: RecordId) -> _Attempt | None:
        """The one under a record, if there is one."""
        return self._known.get(record)


class _Pages(RecordPages):
    """The records' pages, with what the workers say of their flights."""

    def __init__(self, records: Records, guard: Guard, *, log: Log, answer_bytes: int, elsewhere: _Elsewhere) -> None:
        super().__init__(records, guard, log=log, answer_bytes=answer_bytes)
        self._elsewhere = elsewhere

    async def handle(self, request: web.BaseRequest) -> dict[str, Any]:
        """See `RecordPages.handle`."""
        if one := OF_ONE_RECORD.fullmatch(request.path):
            await self._elsewhere.look([RecordId(one[1])])
        document = await super().handle(request)
        if listed := document.get("records"):
            await self._elsewhere.look([RecordId(record["id"]) for record in listed])
            for record in listed:
                flight = self._elsewhere.get(RecordId(record["id"]))
                record["runs_here"] = flight is not None
        return document
