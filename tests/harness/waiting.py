"""Waiting for a condition with a deadline, and the one factor that all durations of the tests go through."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")

# A slow or busy machine sets SIDECAR_TEST_SCALE=3 and every deadline, lease and time-out grows with it.
SCALE = float(os.environ.get("SIDECAR_TEST_SCALE", "1"))

FIRST_LOOK_S = 0.001
LAST_LOOK_S = 0.02


def scaled(seconds: float) -> float:
    """`seconds` times the factor of this machine."""
    return seconds * SCALE


def duration(seconds: float) -> str:
    """`seconds`, scaled, as the configuration writes a duration."""
    return f"{round(scaled(seconds) * 1000)}ms"


@overload
async def until(condition: Callable[[], Awaitable[T]], deadline_s: float = 5.0, *, what: str = "") -> T: ...


@overload
async def until(condition: Callable[[], T], deadline_s: float = 5.0, *, what: str = "") -> T: ...


async def until(condition: Callable[[], T | Awaitable[T]], deadline_s: float = 5.0, *, what: str = "") -> T:
    """What `condition` returns once it is true; it may be a coroutine function. `deadline_s` is scaled.

    Raises: AssertionError when the deadline passes first, naming `what` or the condition.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + scaled(deadline_s)
    pause_s = FIRST_LOOK_S
    while True:
        found = condition()
        value: T = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if loop.time() >= end:
            name = what or getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"not within {scaled(deadline_s):g} s: {name} (last: {value!r})")
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, LAST_LOOK_S)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago.

    It is below those the system hands out to outgoing connections: one of these could take it before its listener does.
    """
    while True:
        port = random.randint(15_000, 32_000)
        if port in _handed_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _handed_out.add(port)
        return port


# By this process: who was given one may not have bound it yet.
_handed_out: set[int] = set()
