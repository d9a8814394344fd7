"""The workers of a supervisor: starts them, starts again what ended, keeps what those that ended had counted.

Each has every listening socket from the start, and serves those it is told to: its own, and those of workers that
ended or do not answer, so that none of their clients waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sidecar.child import Child
from sidecar.config import Config
from sidecar.control import Channel, ControlError, Message, Orders, pack
from sidecar.errors import StartError
from sidecar.listeners import Place
from sidecar.logline import Log
from sidecar.metrics import Metrics

# How often each worker is asked how it is.
LOOK_S = 1.0
# How long a page of the operator waits for those that answer, and for one that did not the last time.
WAIT_S = 0.5
SHORT_WAIT_S = 0.05

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
STEADY_S = 30.0

# What goes on counting when a worker has ended; its other numbers are of what it held.
KEPT = ("sends", "unprotected")


class Workers:
    """All workers of a sidecar."""

    def __init__(self, config: Config, places: Sequence[Place], *, socket_path: str, log: Log) -> None:
        """`socket_path`: of the embedded store, empty where it is another's."""
        self.config = config  # in force: whoever starts later begins with it
        self.restarts = 0
        self.complete = False  # whether each of them has served once
        self.ended = Metrics()
        self.past: Counter[str] = Counter()
        self._places = places
        self._socket_path = socket_path
        self._log = log
        self._all = [Child(number) for number in range(1, config.workers + 1)]
        self._tasks: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None
        self._stopping: asyncio.Event | None = None
        self._failed: asyncio.Future[StartError] | None = None

    @property
    def serving(self) -> int:
        """How many serve and answer."""
        return sum(worker.able for worker in self._all)

    # Start.

    def spawn(self) -> None:
        """Start all processes; they import what they need while the supervisor does.

        Raises: StartError.
        """
        try:
            for worker in self._all:
                worker.spawn(self._descriptors())
        except OSError as exc:
            self.kill()
            raise StartError(f"workers: a process cannot be started ({exc.strerror})") from exc

    def _descriptors(self) -> list[int]:
        return [one.fileno() for place in self._places for family in place.sockets for one in family]

    def _orders(self, worker: Child) -> Orders:
        places = tuple(
            (place.address, place.own, tuple(tuple(one.fileno() for one in family) for family in place.sockets))
            for place in self._places
        )
        return Orders(worker.number, self.config, self._socket_path, places)

    def start(self, failed: asyncio.Future[StartError]) -> None:
        """Follow them all. `failed`: why the sidecar cannot start, where one of them cannot."""
        loop = asyncio.get_running_loop()
        self._failed = failed
        self._stopping = asyncio.Event()
        self._tasks = [loop.create_task(self._follow(worker)) for worker in self._all]
        self._looking = loop.create_task(self._look())

    # Each one's life.

    async def _follow(self, worker: Child) -> None:
        """From process to process, until the end."""
        pause_s = FIRST_PAUSE_S
        while await self._live(worker):
            if time.monotonic() - worker.started_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            worker.trouble = f"{worker.trouble}, started again in {pause_s:g} s"
            self._log.error("worker", worker=worker.number, message=worker.trouble)
            assert self._stopping is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            if self._stopping.is_set():
                return
            try:
                worker.spawn(self._descriptors())
                self.restarts += 1
            except OSError as exc:
                worker.process = None
                worker.trouble = f"cannot be started ({exc.strerror})"

    async def _live(self, worker: Child) -> bool:
        """The life of one process; whether another one is due. Why stands in `trouble`."""
        assert self._stopping is not None
        if worker.process is None:
            return not self._stopping.is_set()
        channel = await worker.open(self._heard, self._orders(worker))
        await asyncio.shield(channel.gone)
        how = await worker.reap()
        began = worker.serving
        self._count_off(worker)
        self._deal()
        if self._stopping.is_set():
            if worker.left is None:
                self._log.error("worker", worker=worker.number, message=f"{how} before it had recorded everything")
            return False
        worker.trouble = worker.reason or how
        if not (began or self.complete) and worker.process.returncode >= 0:
            self._fail(f"worker {worker.number} {how}" if not worker.reason else worker.reason)
        return True

    def _fail(self, sentence: str) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(StartError(sentence))

    def _count_off(self, worker: Child) -> None:
        """Keep what an ended worker had counted: no sum goes back because of it."""
        if worker.state:
            self.ended.add(worker.state["metrics"])
            self.past.update({name: worker.state["stats"][name] for name in KEPT})
        worker.state = {}
        worker.serving = False
        worker.slots = set()
        worker.channel = None

    def _heard(self, worker: Child, message: Message) -> None:
        """What a worker tells."""
        match message["tell"]:
            case "serving":
                worker.serves()
                self.complete = self.complete or all(one.serving for one in self._all)
                self._log.info("worker", worker=worker.number, message="serves")
                self._deal()
            case "failed":
                worker.reason = message["sentence"]
            case "ended":
                worker.left = message["left"]
                worker.state = message["state"]

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(worker.look(LOOK_S) for worker in self._all))
            self._deal()
            await asyncio.sleep(LOOK_S)

    def _deal(self) -> None:
        """Give each worker its own sockets, and everybody those of who does not serve: none of them is left alone."""
        alone = {worker.number - 1 for worker in self._all if not worker.able}
        for worker in self._all:
            slots = {worker.number - 1} | alone
            if worker.able and worker.slots != slots:
                worker.slots = slots
                assert worker.channel is not None
                worker.channel.tell("accept", slots=sorted(slots))

    # What they say.

    async def refresh(self) -> None:
        """Ask all how they are; who does not answer keeps what was known."""
        waits = ((worker, SHORT_WAIT_S if worker.silent else WAIT_S) for worker in self._all)
        await asyncio.gather(*(worker.look(limit_s) for worker, limit_s in waits))

    def troubles(self) -> list[str]:
        """What is wrong with each, one clause."""
        return [told for worker in self._all if (told := worker.told())]

    def states(self) -> list[Message]:
        """What each that serves said last."""
        return [worker.state for worker in self._all if worker.state]

    async def ask(self, word: str, **values: Any) -> list[Any]:
        """What each answers to a question; nothing of who does not answer in time."""

        async def one(channel: Channel) -> Any:
            with suppress(ControlError):
                return await channel.ask(word, WAIT_S, **values)

        channels = [worker.channel for worker in self._all if worker.able and worker.channel is not None]
        return [answer for answer in await asyncio.gather(*map(one, channels)) if answer is not None]

    # Reload and end.

    def take_over(self, config: Config) -> None:
        """Let a configuration take effect in all, in those that start later too."""
        self.config = config
        self._tell("reload", config=pack(config))

    def _tell(self, word: str, **values: Any) -> None:
        for worker in self._all:
            if worker.channel is not None:
                worker.channel.tell(word, **values)

    def end(self, drain_s: float) -> None:
        """Let all drain and end; who does not serve yet has nothing to lose."""
        assert self._stopping is not None
        self._stopping.set()
        self.close_sockets()
        for worker in self._all:
            if not worker.serving:
                worker.kill()
                worker.left = 0
        self._tell("end", drain_s=drain_s)

    def close_sockets(self) -> None:
        """Nobody is started any more: the last worker that closes its own lets in who is queued by then."""
        for place in self._places:
            for one in (one for family in place.sockets for one in family):
                one.close()

    def end_now(self) -> None:
        """What has not begun is released, what has is marked unknown."""
        self._tell("now")

    async def gone(self, limit_s: float) -> None:
        """Wait until all have ended; whoever has not within `limit_s` is killed."""
        await asyncio.wait(self._tasks, timeout=limit_s)
        self.kill()
        await asyncio.wait(self._tasks)

    @property
    def left(self) -> int:
        """How many outcomes the store has not taken; at least one of a worker that did not say."""
        return sum(1 if worker.left is None else worker.left for worker in self._all)

    def kill(self) -> None:
        """End all at once, without waiting."""
        for worker in self._all:
            worker.kill()

    async def close(self) -> None:
        """Ask nobody any more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
