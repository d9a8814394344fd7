"""One connection to the store, in full duplex: many commands under way, one write per turn of the loop.

redis-py connects (`reach.py`) and parses; here commands wait for their replies in order. A command
past its time drops the connection, since the replies behind it could no longer be told apart; what was written
by then may have been applied, may be applied later, or never: `StoreError.applied` is None.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from sidecar.errors import StoreError
from sidecar.reach import clause, drop

Reply = Any
Argument = bytes | str | int

# Reconnecting: soon after a blip, and never a storm of sidecars at the moment a store comes back.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


@dataclass(slots=True)
class _Command:
    arguments: tuple[Argument, ...]
    reply: asyncio.Future[Reply]
    deadline: float


class Link:
    """A connection that comes back by itself. `trouble` is empty while it stands, else one clause why not."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[AbstractConnection]],
        *,
        timeout_s: float,
        ready: Callable[[Link], Awaitable[None]],
    ) -> None:
        """`connect` makes a fresh redis-py connection that stands, or raises StoreError, in bounded time.

        `ready` runs over each new connection before any waiting command, by calls with `now=True`; its
        StoreError means that the store cannot be used yet, and the link tries again.
        """
        self.trouble = "not connected yet"
        self._connect = connect
        self._timeout_s = timeout_s
        self._ready = ready
        self._making: deque[_Command] = deque()
        self._waiting: deque[_Command] = deque()
        self._written: deque[_Command] = deque()
        self._connection: AbstractConnection | None = None
        self._open = False
        self._wake = asyncio.Event()
        self._broken: asyncio.Future[str] | None = None
        # uvloop's handles of a time that is over have no when(): the time is kept beside the handle.
        self._timer: asyncio.TimerHandle | None = None
        self._expires_s = math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Drop the connection; commands under way fail with StoreError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(self._waiting, "the sidecar closes", applied=False)
        if self._timer is not None:
            self._timer.cancel()

    def call(self, *arguments: Argument, timeout_s: float | None = None, now: bool = False) -> asyncio.Future[Reply]:
        """Send a command; the future gets its reply, a RedisError as a value, or raises StoreError in time.

        A caller that is cancelled merely leaves its place in the queue: its reply reaches nobody else.
        `now`: for `ready` alone, over the connection that is just being made, before all that wait for it.
        """
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        limit = self._timeout_s if timeout_s is None else timeout_s
        command = _Command(arguments, reply, loop.time() + limit)
        (self._making if now else self._waiting).append(command)
        if command.deadline < self._expires_s:
            self._expire_at(command.deadline)
        self._wake.set()
        return reply

    def reconnect(self, reason: str) -> None:
        """Give up this connection for a new one; what was written on it may have been applied."""
        if self._open:
            self._break(reason)

    # The life of the connection.

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._live()
                pause_s = FIRST_PAUSE_S
            except StoreError as exc:
                self.trouble = exc.reason
            except Exception as exc:  # noqa: BLE001 - whatever it is, the link tries again and says so
                self.trouble = f"{type(exc).__name__} while connecting"
            finally:
                await self._drop()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self) -> None:
        """One connection, from its first byte to its end. Raises StoreError where it could not be made ready."""
        connection = await self._connect()
        self._connection = connection
        self._broken = asyncio.get_running_loop().create_future()
        tasks = [
            asyncio.get_running_loop().create_task(self._write(connection)),
            asyncio.get_running_loop().create_task(self._read(connection)),
        ]
        try:
            if not await self._made_ready(self._broken):
                raise StoreError(self._broken.result(), applied=False)
            self._open, self.trouble = True, ""
            self._wake.set()
            self.trouble = await self._broken
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _made_ready(self, broken: asyncio.Future[str]) -> bool:
        """Whether the connection can be used; False where it broke meanwhile. Raises: StoreError of `ready`."""
        making = asyncio.get_running_loop().create_task(self._made())
        try:
            either: set[asyncio.Future[Any]] = {making, broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                return False
            making.result()
            return True
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    async def _made(self) -> None:
        await self._ready(self)

    def _break(self, reason: str) -> None:
        # From this moment nothing is written on this connection or read from it: a reply that still comes belongs to
        # a command that was failed, and the next one in line must not get it.
        self._open = False
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)

    @property
    def _over(self) -> bool:
        return self._broken is None or self._broken.done()

    async def _drop(self) -> None:
        self._open = False
        connection, self._connection = self._connection, None
        self._fail(self._making, self.trouble or "the connection ended", applied=False)
        self._fail(self._written, self.trouble or "the connection ended", applied=None)
        if connection is not None:
            await drop(connection)

    @staticmethod
    def _fail(commands: deque[_Command], reason: str, *, applied: bool | None) -> None:
        while commands:
            command = commands.popleft()
            if not command.reply.done():
                command.reply.set_exception(StoreError(reason, applied=applied))

    # Writing, reading, and the time of each command.

    def _take(self) -> list[_Command]:
        """What may be written now: until the connection is ready, only what makes it so."""
        source = self._waiting if self._open else self._making
        taken = [command for command in source if not command.reply.done()]
        source.clear()
        return taken

    async def _write(self, connection: AbstractConnection) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._over:
                    return
                taken = self._take()
                if not taken:
                    continue
                self._written.extend(taken)
                packed = connection.pack_commands([command.arguments for command in taken])
                await connection.send_packed_command(packed, check_health=False)
        except (RedisError, OSError, TimeoutError) as exc:
            self._break(clause(exc))
        except Exception as exc:  # noqa: BLE001 - a link that nobody reads any more would hang all who wait on it
            self._break(f"{type(exc).__name__} on the connection")

    async def _read(self, connection: AbstractConnection) -> None:
        try:
            while True:
                try:
                    reply = await connection.read_response(
                        disable_decoding=True, timeout=math.inf, disconnect_on_error=False
                    )
                except ResponseError as exc:  # an error reply is a reply; LOADING alone is raised as a lost connection
                    reply = exc
                if self._over:
                    return
                if not self._written:
                    raise OSError("a reply nobody asked for")
                command = self._written.popleft()
                if not command.reply.done():
                    command.reply.set_result(reply)
        except (RedisError, OSError, TimeoutError) as exc:
            self._break(clause(exc))
        except Exception as exc:  # noqa: BLE001 - a link that nobody reads any more would hang all who wait on it
            self._break(f"{type(exc).__name__} on the connection")

    def _expire_at(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._expires_s = deadline_s
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._expire)

    def _expire(self) -> None:
        """Fail what is past its time; a written command takes the connection with it."""
        self._timer, self._expires_s = None, math.inf
        now = asyncio.get_running_loop().time()
        if any(command.deadline <= now for command in self._written):
            # It may still be applied, as may all that was written behind it.
            self.trouble = "no reply in time"
            self._fail(self._written, self.trouble, applied=None)
            self._break(self.trouble)
        self._making = self._in_time(self._making, now)
        self._waiting = self._in_time(self._waiting, now)
        deadlines = [command.deadline for command in (*self._written, *self._making, *self._waiting)]
        if deadlines:
            self._expire_at(min(deadlines))

    def _in_time(self, commands: deque[_Command], now: float) -> deque[_Command]:
        """Those of unwritten commands that still have time; the others fail, and surely had no effect."""
        late = deque(command for command in commands if command.deadline <= now)
        kept = deque(command for command in commands if command.deadline > now)
        self._fail(late, self.trouble or "no reply in time", applied=False)
        return kept


def unheeded(reply: asyncio.Future[Reply]) -> None:
    """Let a call end as it will: nobody waits for its reply."""
    reply.add_done_callback(lambda done: done.cancelled() or done.exception())
