"""What the tests of `sidecar keys` and `/v1/records` share: the command, the pages, and keys whose answer was lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from harness import Parsed, close_after_content, request
from harness.client import raw
from harness.program import ROOT, Sidecar
from lab import Lab, Settings, fresh, times, unknown

from sidecar.cli import run

TOKEN = "operators-only"
TOP: Settings = {"admin": {"token": TOKEN}}
BEARER = f"Bearer {TOKEN}"


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(),
        "quick": lab.route(timeout=times(total_s=0.05)),
        "accepting": lab.route(accepted=202, timeout=times(total_s=0.05)),
        "patient": lab.route(timeout=times(total_s=60)),
        "digest": lab.route(record_key="digest"),
    }


@dataclass(frozen=True)
class Ran:
    """What a command ended as."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


async def keys(sidecar: Sidecar, *words: str, token: str | None = None, given: bytes = b"") -> Ran:
    """`sidecar keys` with the configuration of a running sidecar."""
    assert words
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", "keys", words[0], "-c", str(sidecar.file), *words[1:]),
        cwd=sidecar.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(given), 30)
    assert process.returncode is not None
    assert "Traceback" not in err.decode()
    return Ran(process.returncode, out.decode(), err.decode())


async def lose(lab: Lab, route: str = "mail", key: str = "", **sent: Any) -> str:
    """A key whose answer was lost."""
    key = key or fresh()
    lab.upstream.script(close_after_content())
    unknown(await lab.one.send(key, target=f"/{route}/emails", **sent))
    return key


def record_of(lab: Lab, key: str) -> str:
    return lab.name(key).rpartition(":")[2]


async def ask(
    sidecar: Sidecar, target: str, content: bytes | None = None, *, host: str | None = None, **fields: str
) -> Parsed:
    """One question to the admin listener, with its token; a POST where there is content."""
    sent = {"Authorization": BEARER, **({} if content is None else {"Content-Type": "application/json"})}
    sent |= {name.replace("_", "-"): value for name, value in fields.items()}
    pairs = [pair for pair in sent.items() if pair[1]]
    method = "GET" if content is None else "POST"
    data = request(method, target, pairs, content or b"", host=host or f"127.0.0.1:{sidecar.admin_port}")
    return await raw(sidecar.admin, data)


async def said(sidecar: Sidecar, capfd: pytest.CaptureFixture[str], *words: str) -> Ran:
    """The same as `keys`, within this process: for what needs many short runs."""
    capfd.readouterr()
    code = await asyncio.to_thread(run, ["keys", words[0], "-c", str(sidecar.file), *words[1:]])
    return Ran(code, *capfd.readouterr())
