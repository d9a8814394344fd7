"""A worker: the process that serves beside others, as `python -m sidecar.worker NUMBER DESCRIPTOR` of the supervisor.

It hears everything over the line: its orders, what to accept, another configuration, the end. Where the line ends, the
supervisor is gone: then nothing new is let in, what is outstanding ends and is recorded, and the process with it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from sidecar import __version__
from sidecar.app import loop_factory
from sidecar.assembly import Assembly, Member
from sidecar.config import Log as LogSettings
from sidecar.config import LogLevel
from sidecar.control import Channel, Message, Orders, unpack
from sidecar.errors import StartError
from sidecar.listeners import Place
from sidecar.logline import Foreign, Log, Value
from sidecar.message import RecordId

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long the last words may take to the supervisor, which may be frozen.
LAST_WORDS_S = 1.0
# How long its first clients may wait for its connections to the store.
STORE_S = 0.5


class NumberedLog(Log):
    """The one log of all workers: each line says whose it is."""

    def __init__(self, settings: LogSettings, number: int) -> None:
        """`number`: the worker's."""
        super().__init__(settings)
        self._number = number

    def write(self, level: LogLevel, event: str, values: Mapping[str, Value]) -> None:
        """See `Log.write`."""
        super().write(level, event, {"worker": self._number, **values})


class Worker:
    """One end of the line, and what serves."""

    def __init__(self, running: Assembly, log: Log) -> None:
        """`running`: what serves, started by now."""
        self._running = running
        self._log = log
        self._hurry = asyncio.Event()
        self._ending: asyncio.Task[int] | None = None

    def answer(self, message: Message) -> Any:
        """What the supervisor asks."""
        match message["ask"]:
            case "state":
                return self.state()
            case "flying":
                asked = ((record, self._running.flying(RecordId(record))) for record in message["records"])
                return {record: route for record, route in asked if route is not None}
        return None

    def state(self) -> Message:
        """What this worker counted, holds and lacks."""
        return {
            "metrics": self._running.metrics.snapshot(),
            "stats": {name: value for name, value in self._running.stats().items() if name != "outcomes"},
            "reasons": list(self._running.readiness().reasons),
        }

    async def obey(self, told: asyncio.Queue[Message]) -> int:
        """Do what is told, until the end; how many outcomes the store has not taken."""
        while True:
            message = asyncio.get_running_loop().create_task(told.get())
            awaited: set[asyncio.Task[Any]] = {message, *([self._ending] if self._ending else [])}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if self._ending is not None and self._ending.done():
                message.cancel()
                return self._ending.result()
            await self._do(message.result())

    async def _do(self, message: Message) -> None:
        match message["tell"]:
            case "accept":
                await self._running.accept(set(message["slots"]))
            case "reload":
                self._reload(message)
            case "end":
                self._end(self._end_in_peace(message["drain_s"]))
            case "now":
                await self._cut()
                self._end(self._running.finish_now())
            case "gone":
                self._log.error("worker", message="the supervisor is gone: this worker ends")
                self._hurry.set()
                if self._ending is None:
                    self._end(self._end_in_peace(0.0))

    def _reload(self, message: Message) -> None:
        try:
            self._running.take_over(unpack(message["config"]))
        except StartError as exc:
            # The supervisor could read the same file a moment ago.
            self._log.error("configuration", message=f"{exc}; this worker keeps the configuration it has")

    def _end(self, work: Any) -> None:
        self._ending = asyncio.get_running_loop().create_task(work)

    async def _cut(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)

    async def _end_in_peace(self, drain_s: float) -> int:
        self._running.not_ready()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), drain_s)
        return await self._running.finish()


async def _work(number: int, end: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Message] = asyncio.Queue()
    channel = await Channel.open(end, told.put_nowait, lambda asked: worker.answer(asked))  # noqa: PLW0108 - not there yet
    channel.gone.add_done_callback(lambda _: told.put_nowait({"tell": "gone"}))
    begin = await told.get()
    if begin["tell"] == "gone":
        return 1
    try:
        if begin["version"] != __version__:
            raise StartError(f"the program was replaced by version {__version__}: restart the sidecar")
        orders: Orders = unpack(begin["orders"])
        log = NumberedLog(orders.config.log, number)
        logging.basicConfig(handlers=[Foreign(log)], force=True)
        running = Assembly(orders.config, log, None, Member(_places(orders), orders.socket_path))
        await running.start()
        await _store_answers(running)
    except StartError as exc:
        channel.tell("failed", sentence=str(exc))
        await _hang_up(channel)
        return 1
    worker = Worker(running, log)
    gc.freeze()
    channel.tell("serving")
    log.debug("worker", message="serves", loop=type(loop).__module__)
    left = await worker.obey(told)
    channel.tell("ended", left=left, state=worker.state())
    await running.close()
    await _hang_up(channel)
    return 1 if left else 0


async def _store_answers(running: Assembly) -> None:
    """Wait a little for the store: until this worker serves, the others have its clients."""
    until_s = time.monotonic() + STORE_S
    while running.readiness().reasons and time.monotonic() < until_s:  # noqa: ASYNC110 - once a process
        await asyncio.sleep(0.01)


def _places(orders: Orders) -> tuple[Place, ...]:
    return tuple(
        Place(address, own, tuple(tuple(map(_inherited, family)) for family in families))
        for address, own, families in orders.places
    )


def _inherited(descriptor: int) -> socket.socket:
    made = socket.socket(fileno=descriptor)
    made.setblocking(False)
    return made


async def _hang_up(channel: Channel) -> None:
    channel.close()
    await asyncio.wait([channel.gone], timeout=LAST_WORDS_S)


def main() -> NoReturn:
    """Serve until the supervisor says so, or is gone."""
    number, descriptor = (int(word) for word in sys.argv[1:3])
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    # They were blocked when this process was born.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end = socket.socket(fileno=descriptor)
    end.setblocking(False)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_work(number, end))
    except Exception as exc:  # noqa: BLE001 - the outermost edge
        # Its text may quote a request or a secret; where it arose says enough.
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        place = f"{type(exc).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}"
        sys.stderr.write(f"sidecar: worker {number} failed unexpectedly: {place}\n")
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
