"""The code blocks of the README, run as they stand; only addresses are exchanged for those of the test."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Upstream, answer, free_port
from harness.program import Sidecar

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def block(name: str) -> str:
    """The code block behind `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.case("C292")
async def test_quickstart_of_the_readme_ends_with_one_mail(tmp_path: Path) -> None:
    ports = {"8025": free_port(), "8026": free_port(), "8027": free_port()}
    script = block("quickstart")
    for told, used in ports.items():
        script = script.replace(told, str(used))
    # The defaults of the README listen where another sidecar of this machine may.
    script = script.replace(
        "<<'YAML'\n",
        f"<<'YAML'\nlisten: localhost:{ports['8025']}\nadmin: {{listen: localhost:{ports['8026']}}}\ndrain: 0s\n",
    )
    command = tmp_path / "bin" / "sidecar"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sidecar "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join((str(command.parent), os.environ["PATH"]))
    shell = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert shell.stdout is not None
        said = ""
        while '"accepted"' not in said:
            piece = await asyncio.wait_for(asyncio.to_thread(os.read, shell.stdout.fileno(), 65536), 30)
            assert piece, said
            said += piece.decode()
        accepted = json.loads(said[said.rindex('{"count"') :])
        assert accepted["count"] == 1
        assert said.count("HTTP/1.1 200 OK") == 3
        assert said.count("Idempotent-Replayed: true") == 2
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        await asyncio.to_thread(shell.wait)
        if shell.stdout is not None:
            shell.stdout.close()


@pytest.mark.case("C291")
async def test_lines_for_the_resend_sdk_send_one_mail_however_often_they_run(
    tmp_path: Path, upstream: Upstream
) -> None:
    upstream.default = answer(200, [("Content-Type", "application/json")], b'{"id":"1"}')
    config = {
        "store": {"url": f"embedded:{tmp_path / 'data'}"},
        "drain": "0s",
        "routes": {"resend": {"provider": "resend", "upstream": upstream.url}},
    }
    sidecar = await Sidecar.start(tmp_path / "sidecar", config)
    try:
        lines = block("sdk-resend").replace("http://localhost:8025", sidecar.base)
        for _ in range(2):
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", lines], check=True)
        assert upstream.count == 1
        assert upstream.requests[0].target == b"/emails"
    finally:
        await sidecar.close()
