"""The workers as their supervisor knows them: starts them, starts again what ended, keeps what each said last.

A worker is started by exec, never by a plain fork: a copy of this process would hold the locks of the embedded store
beyond its parent's death. It has every listening socket from the start, and serves those it is told to: its own, and
those of workers that ended or do not answer, so that none of their clients waits for them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sidecar import __version__
from sidecar.config import Config
from sidecar.control import Channel, ControlError, Message, Orders, pack
from sidecar.errors import StartError
from sidecar.listeners import Place
from sidecar.logline import Log
from sidecar.metrics import Metrics

# How often each worker is asked how it is, and how long it may owe an answer before others take its clients.
LOOK_S = 1.0
SILENT_S = 2.5
# How long a page of the operator waits for those that answer, and for one that did not the last time.
WAIT_S = 0.5
SHORT_WAIT_S = 0.05

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
STEADY_S = 30.0
# From the end of the line to that of the process: it has nothing left to do.
EXIT_S = 5.0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What goes on counting when a worker has ended; its other numbers are of what it held.
KEPT = ("sends", "unprotected")


class Worker:
    """One worker: its process, its line, and what it said last."""

    def __init__(self, number: int) -> None:
        """`number`: from 1; its place among the sockets is one less."""
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.serving = False
        self.trouble = ""
        self.reason = ""  # why it could not begin, in its own words
        self.state: Message = {}
        self.slots: set[int] = set()
        self.left: int | None = None
        self.started_s = 0.0
        self._end: socket.socket | None = None
        self._heard_s = 0.0
        self._question: asyncio.Task[None] | None = None

    @property
    def silent(self) -> bool:
        """Whether it owes an answer for too long: it is frozen, or busy beyond use."""
        return self.serving and time.monotonic() - self._heard_s > SILENT_S

    @property
    def able(self) -> bool:
        """Whether it serves and answers."""
        return self.serving and not self.silent

    def spawn(self, descriptors: Sequence[int]) -> None:
        """Start its process. `descriptors`: the listening sockets.

        Raises: OSError.
        """
        self.started_s = time.monotonic()
        self._end, theirs = socket.socketpair()
        # What imports work here does there; -P, or a file in the working directory could pose as one of ours.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            # A Ctrl-C reaches every process of the terminal, and some of those who stop services signal all of them:
            # blocked from its first instant, until it ignores them. It obeys its supervisor.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self.process = subprocess.Popen(  # noqa: S603 - this very program
                    [sys.executable, "-P", "-m", "sidecar.worker", str(self.number), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=(theirs.fileno(), *descriptors),
                )
            except OSError:
                self._end.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._end.setblocking(False)

    async def open(self, workers: Workers, orders: Orders) -> Channel:
        """Begin to talk with it."""
        assert self._end is not None
        self.channel = await Channel.open(self._end, partial(workers.heard, self), lambda _: None)
        self.channel.tell("begin", version=__version__, orders=pack(orders))
        return self.channel

    def serves(self) -> None:
        """It has said that it is ready to serve."""
        self.serving = True
        self.trouble = self.reason = ""
        self._heard_s = time.monotonic()

    async def look(self, limit_s: float) -> None:
        """Ask it how it is; whatever it does, this ends within `limit_s`, and one question at most is under way."""
        if self._question is not None and not self._question.done():
            # The answer may have left before what the caller wants to hear of.
            begun_s = time.monotonic()
            await asyncio.wait([self._question], timeout=limit_s)
            limit_s -= time.monotonic() - begun_s
        if limit_s > 0 and self.serving and (self._question is None or self._question.done()):
            self._question = asyncio.get_running_loop().create_task(self._ask())
            await asyncio.wait([self._question], timeout=limit_s)

    async def _ask(self) -> None:
        channel = self.channel
        assert channel is not None
        with suppress(ControlError):
            state = await channel.ask("state", None)
            # Its last words may have been heard by now, which know more.
            if channel is self.channel and self.left is None:
                self.state = state
                self._heard_s = time.monotonic()

    async def reap(self) -> str:
        """How its process ended, once it has; it has closed the line by now."""
        process = self.process
        assert process is not None
        until_s = time.monotonic() + EXIT_S
        while process.poll() is None:
            if time.monotonic() > until_s:
                process.kill()
            await asyncio.sleep(0.005)
        code = process.returncode
        if code >= 0:
            return f"exited with status {code}"
        return f"was ended by signal {-code}{' (out of memory?)' if code == -signal.SIGKILL else ''}"

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def told(self) -> str:
        """What is wrong with it, in one clause; empty where nothing is."""
        if self.trouble:
            return f"worker {self.number}: {self.trouble}"
        if not self.serving:
            return f"worker {self.number}: starts"
        return f"worker {self.number}: does not answer" if self.silent else ""


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
        self._all = [Worker(number) for number in range(1, config.workers + 1)]
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

    def _orders(self, worker: Worker) -> Orders:
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

    async def _follow(self, worker: Worker) -> None:
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

    async def _live(self, worker: Worker) -> bool:
        """The life of one process; whether another one is due. Why stands in `trouble`."""
        assert self._stopping is not None
        if worker.process is None:
            return not self._stopping.is_set()
        channel = await worker.open(self, self._orders(worker))
        await asyncio.shield(channel.gone)
        how = await worker.reap()
        began = worker.serving
        self._count_off(worker)
        if self._stopping.is_set():
            return False
        worker.trouble = worker.reason or how
        self._deal()
        if not (began or self.complete) and worker.process.returncode >= 0:
            self._fail(f"worker {worker.number} {how}" if not worker.reason else worker.reason)
        return True

    def _fail(self, sentence: str) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(StartError(sentence))

    def _count_off(self, worker: Worker) -> None:
        """Keep what an ended worker had counted: no sum goes back because of it."""
        if worker.state:
            self.ended.add(worker.state["metrics"])
            self.past.update({name: worker.state["stats"][name] for name in KEPT})
        worker.state = {}
        worker.serving = False
        worker.slots = set()
        worker.channel = None

    def heard(self, worker: Worker, message: Message) -> None:
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
