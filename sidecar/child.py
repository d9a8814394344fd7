"""One worker as its supervisor knows it: its process, the line to it, and what it said last.

It is started by exec, never by a plain fork: a copy of the supervisor would hold the locks of the embedded store beyond
its parent's death.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from sidecar import __version__
from sidecar.control import Channel, ControlError, Message, Orders, pack

# How long it may owe an answer before others take its clients.
SILENT_S = 2.5
# From the end of the line to that of the process: it has nothing left to do.
EXIT_S = 5.0

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
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
        self.reason = ""
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

    async def open(self, heard: Callable[[Child, Message], None], orders: Orders) -> Channel:
        """Begin to talk with it; `heard` takes what it tells."""
        assert self._end is not None
        self.channel = await Channel.open(self._end, partial(heard, self), lambda _: None)
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
