"""The process: descriptors, the embedded store, the workers, the event loop, signals, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from sidecar import __version__
from sidecar.config import Config, Limits
from sidecar.embedded import Embedded
from sidecar.errors import StartError
from sidecar.listeners import Listening
from sidecar.logline import Foreign, Log
from sidecar.workers import Workers

# Beside two descriptors an exchange (client, upstream): listeners, the store, the loop, idle clients, spooled content.
SPARE_DESCRIPTORS = 256


class Running(Protocol):
    """The sidecar, of one process or of several: `Assembly` or `Supervisor`."""

    failed: asyncio.Future[StartError]

    async def start(self) -> None:
        """Serve. Raises: StartError."""
        ...

    def reload(self, reread: Callable[[], Config]) -> None:
        """Read the configuration again."""
        ...

    async def drain(self, drain_s: float) -> None:
        """Not ready; serve for `drain_s` more."""
        ...

    async def finish(self) -> int:
        """End in peace; how many outcomes the store has not taken."""
        ...

    async def finish_now(self) -> int:
        """End at once; how many outcomes the store has not taken."""
        ...

    async def close(self) -> None:
        """Drop everything."""
        ...


def serve(config: Config, *, reread: Callable[[], Config]) -> int:
    """Run the sidecar until a signal ends it; the exit code.

    `reread` gives the configuration as it is now, for SIGHUP. Raises: StartError.
    """
    log = Log(config.log)
    logging.basicConfig(handlers=[Foreign(log)], force=True)
    config = replace(config, limits=_fitting(config, log))

    def fresh() -> Config:
        again = reread()
        return replace(again, limits=_fitting(again, None))

    embedded = None
    if config.store.url.startswith("embedded:"):
        embedded = Embedded(
            config.store.url.removeprefix("embedded:"),
            memory_bytes=config.store.memory_bytes,
            report=lambda sentence: log.info("store", message=sentence),
        )
        embedded.launch()
    try:
        # Imported only now: the store's server starts beside it.
        if config.workers > 1:
            return _serve_with_workers(config, log, fresh, embedded)
        from sidecar.assembly import Assembly

        return _run(config, log, fresh, lambda: Assembly(config, log, embedded))
    finally:
        if embedded is not None:
            embedded.kill()


def _serve_with_workers(config: Config, log: Log, fresh: Callable[[], Config], embedded: Embedded | None) -> int:
    """Bind, start the workers, and import beside them."""
    listening = Listening(lambda sentence: log.warning("listen", message=sentence))
    socket_path = "" if embedded is None else embedded.socket_path
    try:
        places = tuple(listening.places(config, config.workers))
        workers = Workers(config, places, socket_path=socket_path, log=log)
        workers.spawn()
        try:
            from sidecar.supervisor import Supervisor

            return _run(config, log, fresh, lambda: Supervisor(config, log, embedded, workers, listening))
        finally:
            workers.kill()
    finally:
        listening.remove()


def _run(config: Config, log: Log, fresh: Callable[[], Config], make: Callable[[], Running]) -> int:
    # uvloop is not to be had everywhere.
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_live(config, log, make, fresh))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The faster event loop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _fitting(config: Config, log: Log | None) -> Limits:
    """The limits with as many outstanding requests as there are descriptors for; `log` is told where that is fewer.

    Workers inherit what this process may have. Raises: StartError where the configuration asks for more than the
    system gives.
    """
    limits, spare = config.limits, SPARE_DESCRIPTORS
    if config.workers > 1:
        # Each worker has the sockets of all, two families an address.
        spare += 2 * config.workers * (len(config.listen) + sum(len(route.listen) for route in config.routes))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * limits.outstanding + spare
    ceiling = need if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < min(need, ceiling):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, ceiling), hard))
        except (OSError, ValueError):
            ceiling = soft
    if need <= ceiling:
        return limits
    fits = max(1, (ceiling - spare) // 2)
    if limits.outstanding != Limits().outstanding:
        raise StartError(
            f"limits.outstanding: {limits.outstanding} needs {need} file descriptors and this process may have"
            f" {ceiling}; raise the hard limit (ulimit -Hn), or write at most {fits}"
        )
    if log is not None:
        sentence = f"{ceiling} file descriptors are allowed, so at most {fits} requests are outstanding"
        log.warning("limits", message=sentence)
    return replace(limits, outstanding=fits)


async def _live(config: Config, log: Log, make: Callable[[], Running], reread: Callable[[], Config]) -> int:
    loop = asyncio.get_running_loop()
    running = make()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, lambda: running.reload(reread))
    log.info("start", version=__version__, python=sys.version.split()[0], loop=type(loop).__module__, parser=_parser())
    try:
        await running.start()
        # What was made by now lives as long as the process: the collector need not look at it again.
        gc.freeze()
        ended = await _first(signals.get(), running.failed)
        if isinstance(ended, StartError):
            raise ended
        left = await _end(running, signals, 0.0 if ended == signal.SIGINT else config.drain_s)
    finally:
        await running.close()
    if left:
        log.error("end", message=f"{left} outcomes could not be recorded; their keys will read as unknown")
        return 1
    log.info("end", message="everything is recorded")
    return 0


def _parser() -> str:
    """Which HTTP parser reads the clients: the C one, or aiohttp's slower one in Python."""
    from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

    return "python" if HttpRequestParser is HttpRequestParserPy else "c"


async def _first(
    got: Coroutine[None, None, signal.Signals], failed: asyncio.Future[StartError]
) -> signal.Signals | StartError:
    task = asyncio.get_running_loop().create_task(got)
    either: set[asyncio.Future[Any]] = {task, failed}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        task.cancel()
        return failed.result()
    return task.result()


async def _end(running: Running, signals: asyncio.Queue[signal.Signals], drain_s: float) -> int:
    """Drain and finish; a second signal ends it now and makes the exit code 1."""
    loop = asyncio.get_running_loop()

    async def in_peace() -> int:
        await running.drain(drain_s)
        return await running.finish()

    peace = loop.create_task(in_peace())
    again = loop.create_task(signals.get())
    await asyncio.wait([peace, again], return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if peace.done():
        return peace.result()
    peace.cancel()
    await asyncio.gather(peace, return_exceptions=True)
    return max(1, await running.finish_now())
