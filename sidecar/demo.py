"""The one-minute story: what becomes of a mail when things go wrong, told by real processes over real sockets.

The stand-in provider, and the real sidecar before it, on free loopback ports, with the embedded store in a
temporary directory. Decides nothing about requests: it sends them, and asks the provider how many mails it accepted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

import aiohttp

from sidecar.stage import DemoError, Program, Seen, Stage
from sidecar.stand_in import StandIn

TWINS = 20
RETRIES = 5

UNKNOWN = "504 outcome-unknown"
FOOTNOTE = """
504 outcome-unknown: the request left, no complete answer came, and nobody knows. The sidecar does
not guess: it sends no second mail, and says so until somebody has looked into the provider's log
and settled the key: `sidecar keys list`, `show KEY`, `resolve KEY --sent` or `--not-sent`.
"""
SCENARIO_COLUMNS, SEEN_COLUMNS = 29, 46


@dataclass(frozen=True, slots=True)
class Scenario:
    """One line of the table: what happens, how many mails are right, and what the client must have seen last."""

    title: str
    mails: int
    last: str
    play: Callable[[Stage, str], Awaitable[list[Seen]]]


async def _retries(stage: Stage, key: str) -> list[Seen]:
    return [await stage.send(key) for _ in range(RETRIES)]


async def _twins(stage: Stage, key: str) -> list[Seen]:
    await stage.provider_will("slow", "300ms")
    lines = await asyncio.gather(*(stage.settle(key) for _ in range(TWINS)))
    refused = [seen for line in lines for seen in line if seen.busy]
    return refused + sorted((line[-1] for line in lines), key=lambda seen: seen.text)


async def _hang_up(stage: Stage, key: str) -> list[Seen]:
    await stage.provider_will("slow", "600ms")
    return [await stage.send(key, patience_s=0.2), *await stage.settle(key)]


async def _lost_answer(stage: Stage, key: str) -> list[Seen]:
    await stage.provider_will("lost")
    return [await stage.send(key), await stage.send(key)]


async def _killed_in_flight(stage: Stage, key: str) -> list[Seen]:
    await stage.provider_will("slow", "5s")
    first = asyncio.create_task(stage.send(key))
    try:
        await stage.accepts()
        await stage.restart_killed()
        return [await first, *await stage.settle(key)]
    finally:
        first.cancel()


async def _killed_after_answer(stage: Stage, key: str) -> list[Seen]:
    first = await stage.send(key)
    await stage.restart_killed()
    return [first, await stage.send(key)]


async def _without_key(stage: Stage, _key: str) -> list[Seen]:
    return [await stage.send(None) for _ in range(RETRIES)]


SCENARIOS = (
    Scenario(f"{RETRIES} sends in a row", 1, "200 replayed", _retries),
    Scenario(f"{TWINS} sends at once, each repeated while told 409", 1, "200 replayed", _twins),
    Scenario("the client hangs up, then retries", 1, "200 replayed", _hang_up),
    Scenario("the provider's answer is lost, then a retry", 1, UNKNOWN, _lost_answer),
    Scenario("the sidecar is killed while the provider works, then retries", 1, UNKNOWN, _killed_in_flight),
    Scenario("the sidecar is killed after the answer, then a retry", 1, "200 replayed", _killed_after_answer),
    Scenario(f"for comparison: {RETRIES} sends without a key", RETRIES, "200", _without_key),
)


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(1, round(seconds * 1000))} ms"


def describe(seen: Iterable[Seen]) -> str:
    """What the client saw, equal neighbours together with the longest time: `200 (5 ms), 4 x 200 replayed (1 ms)`."""
    parts = []
    for text, group in groupby(seen, key=lambda one: one.text):
        times = [one.took_s for one in group]
        parts.append(f"{f'{len(times)} x ' if len(times) > 1 else ''}{text} ({_ms(max(times))})")
    return ", ".join(parts)


def _line(letter: str, title: str, seen: str, mails: str, verdict: str) -> str:
    left = textwrap.wrap(title, SCENARIO_COLUMNS)
    # Only between two answers, never within one.
    joined = seen.replace(" ", "\0").replace(",\0", ", ")
    middle = [line.replace("\0", " ") for line in textwrap.wrap(joined, SEEN_COLUMNS, break_on_hyphens=False)]
    marks = [letter], left, middle, [f"{mails:>5}  {verdict}"]
    rows = zip_longest(*marks, fillvalue="")
    form = f"{{:2}}{{:{SCENARIO_COLUMNS}}}  {{:{SEEN_COLUMNS}}}  {{}}"
    return "\n".join(form.format(*row).rstrip() for row in rows)


def _coloured(verdict: str, right: bool) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return verdict
    return f"\x1b[{32 if right else 31}m{verdict}\x1b[0m"


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _play(stage: Stage, scenarios: Sequence[Scenario]) -> int:
    wrong = 0
    _print(_line("", "what happens", "what the client saw, and its longest wait", "mails", ""))
    for number, scenario in enumerate(scenarios):
        await stage.reset()
        seen = await scenario.play(stage, f"demo-{number}")
        mails = await stage.accepted()
        right = mails == scenario.mails and seen[-1].text == scenario.last
        wrong += not right
        verdict = _coloured("right" if right else f"WRONG: not {scenario.mails} and {scenario.last}", right)
        _print(_line("abcdefgh"[number], scenario.title, describe(seen), str(mails), verdict))
    return wrong


@asynccontextmanager
async def _stage() -> AsyncIterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="sidecar-demo-"))
    # A connection per request: a client that reuses one may repeat on it what it thinks was not read.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with StandIn() as provider, aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            program = Program(directory, provider.url)
            try:
                await program.start(session)
                _print(f"provider  {provider.url}, a stand-in that only counts")
                _print(f"sidecar   {program.url}/mail, with its embedded store in a temporary directory\n")
                yield Stage(session, provider.url, program)
            finally:
                # First, so that a sidecar which still waits for an answer need not wait for a slow one.
                await provider.stop()
                await program.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _demo() -> int:
    task = asyncio.current_task()
    stopping = False

    def stop() -> None:
        # Once: a second Ctrl-C must not cut short the ending of what was started, which takes seconds at most.
        nonlocal stopping
        if not stopping and task is not None:
            stopping = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    start_s = time.monotonic()
    async with _stage() as stage:
        wrong = await _play(stage, SCENARIOS)
    _print(FOOTNOTE)
    took = f"{time.monotonic() - start_s:.1f} s"
    if wrong:
        _print(f"{wrong} of {len(SCENARIOS)} are not right. ({took})")
        return 1
    _print(f"All right: one key, one mail, whatever happened; without a key every send is a mail. ({took})")
    return 0


def run() -> int:
    """Play the story and print it; the exit code: 0 when every count is right, else 1.

    Takes about ten seconds. Ends every process it started, also upon Ctrl-C.
    """
    try:
        return asyncio.run(_demo())
    except asyncio.CancelledError:
        _print("\nstopped")
    except (DemoError, OSError) as exc:
        sys.stderr.write(f"demo: {exc}\n")
    return 1
