"""The operator's side of a sidecar, once however many processes serve: admin listener, store checks, what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from aiohttp import web

from sidecar.admin import Admin
from sidecar.config import Config
from sidecar.embedded import Embedded
from sidecar.errors import StartError, StoreError
from sidecar.guard import Guard
from sidecar.listeners import Listening, is_loopback
from sidecar.logline import Log
from sidecar.protocol import admin_server
from sidecar.store import Store

# When the share of sends without a key is told in the log.
SHARE_AFTER_S = 60.0

LOCAL_STORE = (
    "the embedded store is this sidecar's own: retries that reach another sidecar, or this one after its volume is"
    " gone, are new; more than one replica needs a shared Redis"
)


class Administration:
    """Watches the store, and serves the admin listener."""

    def __init__(self, config: Config, log: Log, *, store: Store, embedded: Embedded | None) -> None:
        """`embedded`: the private server, started already, or None where the store is another's."""
        self._config = config
        self._log = log
        self._store = store
        self._embedded = embedded
        self._runner: web.ServerRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._checked = False
        self._unfit = ""
        self.failed: asyncio.Future[StartError] = asyncio.get_running_loop().create_future()

    def guard(self) -> Guard:
        """Who may ask for more than health and metrics."""
        admin = self._config.admin
        return Guard(token=admin.token, everywhere=not all(map(is_loopback, admin.listen)))

    def start(self, sends: Callable[[], tuple[int, int]]) -> None:
        """Watch the store. `sends`: how many there were since the start, and how many of them unprotected."""
        if self._embedded is not None:
            self._hold(self._embedded.watch())
            self._log.warning("store", message=LOCAL_STORE)
        self._hold(self._check_store())
        self._hold(self._tell_share(sends))

    async def listen(self, admin: Admin, listening: Listening) -> None:
        """Serve the admin listener, where there is one.

        Raises: StartError naming an address.
        """
        self._runner = web.ServerRunner(admin_server(admin.handle))
        await self._runner.setup()
        for address in self._config.admin.listen:
            for made in listening.bind(address):
                await web.SockSite(self._runner, made).start()

    def tell(self) -> None:
        """Write what is odd about the configuration, and that it serves."""
        config = self._config
        for warning in config.warnings:
            self._log.warning("configuration", message=warning)
        self._log.info(
            "serving", listen=", ".join(map(str, config.listen)), admin=", ".join(map(str, config.admin.listen))
        )

    def _hold(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _check_store(self) -> None:
        """Look at the store's promises once it can be asked; a missing right ends the start, an absent store not."""
        late = False
        while not self._checked:
            try:
                await self._store.check()
                self._checked, self._unfit = True, ""
            except StoreError:
                late = True
                await asyncio.sleep(0.2)
            except StartError as exc:
                # A store that was away at the start is no reason to end what runs by now: not ready, and told.
                if not late:
                    if not self.failed.done():
                        self.failed.set_result(exc)
                    return
                if self._unfit != str(exc):
                    self._unfit = str(exc)
                    self._log.error("store", message=self._unfit)
                await asyncio.sleep(1.0)

    async def _tell_share(self, sends: Callable[[], tuple[int, int]]) -> None:
        await asyncio.sleep(SHARE_AFTER_S)
        total, unprotected = sends()
        if unprotected:
            self._log.warning(
                "unprotected",
                message="sends without a key are forwarded each time they come; key.missing: reject refuses them",
                sends=total,
                unprotected=unprotected,
            )

    @property
    def trouble(self) -> str:
        """Why the store does not serve; empty while it does."""
        return ("" if self._embedded is None else self._embedded.trouble) or self._store.trouble or self._unfit

    @property
    def restarts(self) -> int:
        """Restarts of the embedded store's server."""
        return 0 if self._embedded is None else self._embedded.restarts

    def notes(self) -> list[str]:
        """What to know about the store while it serves."""
        return [*self._store.warnings, *([LOCAL_STORE] if self._embedded is not None else [])]

    async def close_listener(self) -> None:
        """Drop the admin listener."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def close(self) -> None:
        """End the store's server, last of all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._embedded is not None:
            await self._embedded.stop()


def share(sends: int, unprotected: int) -> float | None:
    """The share of sends without protection; None before the first one."""
    return round(unprotected / sends, 4) if sends else None


def wall_ms() -> int:
    """The wall clock, in ms, for the order of lists alone."""
    return time.time_ns() // 1_000_000
