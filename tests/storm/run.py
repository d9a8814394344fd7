"""One run: three sidecars on one store before one upstream; clients and faults for a while, quiet, the judge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import RedisServer, Sidecar, StoreProxy, Upstream, duration, scaled, until

from storm.clients import Clients, Mail
from storm.faults import Faults
from storm.history import History, Left, RouteRules
from storm.judge import Finding, judge
from storm.mix import (
    CONNECT_S,
    DRAIN_S,
    HOLD,
    LEASE_S,
    NATIVE,
    STORE_TIMEOUT_S,
    STORED_BYTES,
    TOTAL_S,
    WAIT_LIMIT_S,
    WINDOW_S,
    Mix,
)
from storm.provider import Provider

SIDECARS = 3
# How often a run that is to stop at its first finding asks the judge, and every run looks for keys without an expiry.
LOOK_S = 1.0
QUIET_S = 20.0
EACH_S = 0.1
# Below the range from which Linux and macOS take the ports of outgoing connections.
STEADY_PORTS = (15_000, 30_000)
# Lines of a sidecar's log that say that something happened which nobody foresaw.
FAULTS_OF_OURS = (
    "arrival-failed",
    "exchange-failed",
    "renewal-failed",
    "library",
    "outcome-not-recorded",
    "record-unreadable",
    "record-restored",  # this store never loses a record: somebody freed one whose owner lives
)

Settings = dict[str, Any]


@dataclass
class Result:
    """What a run found. `histories` of keys are made from `history` by `report.py`."""

    seed: int
    seconds: float
    history: History
    findings: list[Finding]
    mails: list[Mail]
    endings: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    versions: set[str] = field(default_factory=set)


def rules() -> dict[str, RouteRules]:
    """What the configuration below means, in the judge's words."""
    total_s = scaled(TOTAL_S)
    every_5xx = frozenset(range(500, 600))
    return {
        HOLD: RouteRules(False, frozenset((400, 422)), frozenset((502, 504)), total_s),
        NATIVE: RouteRules(True, frozenset((400, 422)), every_5xx, total_s),
    }


def config(upstream: Upstream, front: StoreProxy) -> Settings:
    """Two routes: `hold` at a provider without a key of its own, `native` at one that guards twins."""

    def route(name: str) -> Settings:
        return {
            "provider": "generic",
            "upstream": f"{upstream.url}/{name}",
            "sends": [
                "POST /emails",
                {"match": "POST /waiting", "concurrent": "wait", "wait_limit": duration(WAIT_LIMIT_S)},
            ],
            "lease": duration(LEASE_S),
            "ttl": "1h",
            "hold_for": "2h",
            "retry": {"attempts": 2, "backoff": duration(0.05)},
            "timeout": {"receive": duration(3), "connect": duration(CONNECT_S), "total": duration(TOTAL_S)},
        }

    native = {"field": "Idempotency-Key", "window": duration(WINDOW_S), "max_length": 256, "twins": "guarded"}
    return {
        "store": {"url": front.url, "timeout": duration(STORE_TIMEOUT_S)},
        "drain": duration(DRAIN_S),
        "log": {"level": "info", "format": "json"},
        "limits": {"stored_response": STORED_BYTES},
        "routes": {HOLD: route(HOLD), NATIVE: {**route(NATIVE), "native": native, "unknown": "resend"}},
    }


def steady_port() -> int:
    """A free port of those that the system gives nobody by itself: what listens there may end and come back."""
    while True:
        port = random.randrange(*STEADY_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Storm:
    """A run and everything it stands on."""

    def __init__(
        self, seed: int, mix: Mix | None = None, env: Mapping[str, str] | None = None, keep: Path | None = None
    ) -> None:
        """Nothing runs yet: see `run`.

        `env`: the sidecars' own, so that another build of them may run. `keep`: where logs are kept, an empty folder.
        """
        self.seed = seed
        self.keep = keep
        self.mix = mix or Mix()
        self.env = dict(env or {})
        self.history = History(rules(), grace_s=scaled(3 * LEASE_S + 2 * TOTAL_S + 1.0))
        self.store = RedisServer({"appendfsync": "always"})
        self.sidecars: list[Sidecar] = []
        self.fronts: list[StoreProxy] = []

    async def run(self, seconds: float, *, until_finding: bool = False) -> Result:
        """Storm for `seconds`, then quiet, then judge. `until_finding`: no longer than until there is a finding."""
        async with self._built() as (clients, faults, provider):
            found = await self._storm(clients, faults, seconds, until_finding)
            result = Result(self.seed, seconds, self.history, found, clients.mails, exits=faults.exits)
            ended = not until_finding
            if ended:
                provider.calm = True
                await self._quiet(clients, result)
            await self._close(result)
            result.findings = judge(self.history, ended=ended)
        return result

    @contextlib.asynccontextmanager
    async def _built(self) -> AsyncIterator[tuple[Clients, Faults, Provider]]:
        directory = self.keep or Path(tempfile.mkdtemp(prefix="storm-"))
        upstream = await Upstream.start()
        self.store.port = steady_port()
        self.store.start()
        try:
            for number in range(SIDECARS):
                self.fronts.append(await StoreProxy.start(self.store))
                self.sidecars.append(self._sidecar(directory, number, config(upstream, self.fronts[number])))
            await asyncio.gather(*(one.run() for one in self.sidecars))
            provider = Provider(upstream, self.history, self.mix, self.seed)
            clients = Clients([one.base for one in self.sidecars], self.history, self.mix, self.seed)
            yield (
                clients,
                Faults(self.sidecars, self.fronts, self.store, provider, self.history, self.mix, self.seed),
                provider,
            )
        finally:
            for one in self.sidecars:
                await one.close()
            for front in self.fronts:
                await front.stop()
            await upstream.stop()
            if self.keep is not None:
                shutil.copy(self.store.directory / "log", self.keep / "store.log")
            self.store.remove()
            if self.keep is None:
                shutil.rmtree(directory, ignore_errors=True)

    def _sidecar(self, directory: Path, number: int, settings: Settings) -> Sidecar:
        made = Sidecar(directory / f"sidecar-{number}", settings, self.env)
        made.port, made.admin_port = steady_port(), steady_port()
        made.base, made.admin = f"http://127.0.0.1:{made.port}", f"http://127.0.0.1:{made.admin_port}"
        made.write_config(settings)
        return made

    # The storm.

    async def _storm(self, clients: Clients, faults: Faults, seconds: float, until_finding: bool) -> list[Finding]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        found: list[Finding] = []
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(clients.work()) for _ in range(self.mix.workers)]
            making = group.create_task(faults.run(until_s))
            while loop.time() < until_s and not found:
                await asyncio.sleep(min(scaled(LOOK_S), max(0.0, until_s - loop.time())))
                if faults.store_up:
                    self._look()
                if until_finding:
                    found = judge(self.history, ended=False)
            clients.over = True
            if found:
                for task in (making, *workers):
                    task.cancel()
        return found

    def _look(self) -> None:
        """Note what has no expiry."""
        with contextlib.suppress(OSError):
            names = self.store.keys()
            for name in names:
                if self.store.command("PTTL", name) == -1:
                    self.history.eternal.append(name.decode())

    # The quiet.

    async def _quiet(self, clients: Clients, result: Result) -> None:
        """Everything is up: each key is asked for until it is settled or surely unknown; then the store is read."""
        for front in self.fronts:
            front.thaw()
        for number, one in enumerate(self.sidecars):
            try:
                await one.ready()
            except AssertionError:
                why = (await one.ask_admin("/readyz")).content.decode() if one.exit_code is None else one.exit_code
                self.history.faults_of_ours.append(f"sidecar {number} is not ready in quiet times: {why}")
        limit = asyncio.Semaphore(64)
        loop = asyncio.get_running_loop()
        # Unknown keys take longest, and that is not long: whatever goes on beyond this is stuck.
        until_s = loop.time() + scaled(QUIET_S + EACH_S * len(clients.mails))

        async def settle(one: Mail) -> None:
            async with limit:
                ending = await clients.settle(one, min(loop.time() + scaled(QUIET_S), until_s))
            result.endings[f"{one.route} {ending}"] += 1
            if ending == "stuck":
                self.history.stuck.append(one.key)

        await asyncio.gather(*(settle(one) for one in clients.mails))
        await asyncio.gather(*(until(partial(self._idle, one), 10) for one in self.sidecars))
        self._look()
        names = self.store.keys()
        self.history.left = [left for name in names if (left := self._left(name.decode()))]

    async def _idle(self, one: Sidecar) -> bool:
        return await one.metric("sidecar_unsettled") == 0 and await one.metric("sidecar_outstanding") == 0

    def _left(self, name: str) -> Left | None:
        """The record with this name; None for lists and the store's probe."""
        if re.fullmatch(r"sidecar:\{..\}:[0-9a-f]{40}", name) is None:
            return None
        flat = self.store.command("HGETALL", name)
        assert isinstance(flat, list)
        text = [it.decode("latin-1") for it in flat if isinstance(it, bytes)]
        fields = dict(zip(text[::2], text[1::2], strict=True))
        tag, _, record = name.rpartition(":")
        route = fields["key"].partition("-")[0]
        listed = [
            self.store.command("ZSCORE", f"{tag}:{route}:{part}", record) is not None for part in ("open", "done")
        ]
        left_ms = self.store.command("PTTL", name)
        assert isinstance(left_ms, int)
        return Left(
            route=route,
            key=fields["key"],
            state=fields["state"],
            lease_over=int(fields["hold"]) - left_ms > int(fields["lease"]),
            listed=listed == ([False, True] if fields["state"] == "completed" else [True, False]),
            why=fields.get("why", "owner-lost"),
            attempt=int(fields["attempt"]),
        )

    async def _close(self, result: Result) -> None:
        """End the sidecars as an operator does, and read their logs."""
        for one in self.sidecars:
            if one.exit_code is None and result.endings:
                code = await one.stop()
                if code != 0:
                    self.history.faults_of_ours.append(f"exit code {code} in quiet times")
            for line in one.log_lines():
                if line.get("event") in FAULTS_OF_OURS:
                    self.history.faults_of_ours.append(json.dumps(line))
                elif line.get("event") == "start":
                    result.versions.add(str(line.get("version")))
            if "Traceback" in one.log():
                self.history.faults_of_ours.append(one.log()[one.log().index("Traceback") :][:2000])
