"""The demo: its table is right, a wrong count is a failure, and nothing is left behind, Ctrl-C included."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scaled

from sidecar import demo
from sidecar.stage import Seen, Stage

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "sidecar", "demo"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path), "SIDECAR_CONFIG": "/nowhere"}


def working_in(directory: Path) -> list[str]:
    """Command lines of processes that work inside `directory` or name it: sidecars and store servers of the demo."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(directory) in words or str(directory) in os.readlink(process / "cwd"):
                found.append(words)
        except OSError:
            continue
    return found


def left_in(directory: Path) -> list[str]:
    return [*map(str, directory.iterdir()), *working_in(directory)]


async def test_demo_tells_the_story_and_every_count_is_right(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), scaled(50))
    told = output.decode()
    assert process.returncode == 0, told + errors.decode()
    assert errors == b""
    assert told.count("right") == len(demo.SCENARIOS) + 1
    assert "outcome-unknown" in told
    assert "\x1b" not in told
    assert max(map(len, told.splitlines())) <= 100
    assert left_in(tmp_path) == []


async def test_interrupted_demo_ends_all_it_started(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    while not (line := await process.stdout.readline()).startswith(b"a "):
        assert line, "the demo ended early"
    process.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(process.communicate(), scaled(20))
    assert process.returncode == 1
    assert errors == b""
    assert left_in(tmp_path) == []


async def _one_without_a_key(stage: Stage, key: str) -> list[Seen]:
    return [await stage.send(key), await stage.send(None)]


async def test_wrong_count_is_told_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    async with demo._stage() as stage:
        wrong = await demo._play(stage, [demo.Scenario("a send too many", 1, "200", _one_without_a_key)])
    assert wrong == 1
    assert "    2  WRONG: not 1 and 200" in capsys.readouterr().out


def test_description_puts_equal_neighbours_together() -> None:
    seen = [Seen("200", 0.0051), *(Seen("200 replayed", 0.001 * number) for number in range(3)), Seen("hung up", 1.25)]
    assert demo.describe(seen) == "200 (5 ms), 3 x 200 replayed (2 ms), hung up (1.2 s)"
