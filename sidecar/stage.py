"""What the demo plays on: the sidecar as a process of its own, and a client that never repeats anything by itself.

Knows neither the scenarios nor which outcome is right.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from sidecar.directory import Directory
from sidecar.errors import SidecarError, StartError

MAIL = {"from": "shop@example.com", "to": "you@example.com", "subject": "Your order", "text": "Thank you."}

READY_S = 20.0
STOP_S = 8.0
SETTLE_S = 15.0
LOOK_S = 0.05

# The lease is short so that a killed sidecar's key is settled while one watches; it cannot be
# shorter than three of the store's time-outs.
CONFIG = """\
listen: 127.0.0.1:{port}
admin: {{listen: "127.0.0.1:{admin_port}"}}
store: {{url: {store}, timeout: 500ms}}
drain: 0s
log: {{level: warning, format: json}}
routes:
  mail:
    provider: generic
    upstream: {upstream}
    sends: [POST /emails]
    lease: 2s
    timeout: {{receive: 5s, connect: 1s, total: 10s}}
"""


class DemoError(SidecarError):
    """The demo could not be played to its end; one sentence, perhaps with the sidecar's last words."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw of one request. `text`: status and mark, or the slug; `took_s`: until the answer."""

    text: str
    took_s: float

    @property
    def busy(self) -> bool:
        """Whether the client is told to come back."""
        return self.text.startswith("409 ")


class Program:
    """The sidecar's process. `start` waits until it is ready; `close` leaves nothing behind."""

    def __init__(self, directory: Path, upstream: str) -> None:
        """`directory` holds configuration, log and store."""
        self._directory = directory
        port, admin_port = _free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self._admin = f"http://127.0.0.1:{admin_port}"
        store = json.dumps(f"embedded:{directory / 'store'}")
        config = CONFIG.format(port=port, admin_port=admin_port, store=store, upstream=upstream)
        file = directory / "config.yaml"
        file.write_text(config, encoding="utf-8")
        self._command = [sys.executable, "-m", "sidecar", "serve", "-c", str(file)]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Start it and wait until it is ready.

        Raises: DemoError with the end of its log.
        """
        with (self._directory / "log").open("ab") as log:
            # A session of its own: the terminal's Ctrl-C is for the demo, which ends the sidecar itself.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end_s = time.monotonic() + READY_S
        while not await self._ready(session):
            if self._process.returncode is not None or time.monotonic() > end_s:
                lines = (self._directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()
                raise DemoError("\n".join(["the sidecar did not become ready; its log ends with:", *lines[-10:]]))
            await asyncio.sleep(LOOK_S)

    async def _ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self._admin}/readyz") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def kill(self) -> None:
        """SIGKILL: no word of farewell to anybody."""
        await self._end(signal.SIGKILL)

    async def close(self) -> None:
        """End it and, where it was killed, the store's server that outlived it."""
        await self._end(signal.SIGINT)
        store = Directory(str(self._directory / "store"))
        with suppress(StartError):
            store.occupy()
        store.release()

    async def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(number)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        finally:
            # After the time limit, or cancelled while it stopped in order.
            if process.returncode is None:
                process.kill()
                await process.wait()


class Stage:
    """Provider, sidecar and a client that never repeats anything by itself."""

    def __init__(self, session: aiohttp.ClientSession, provider: str, program: Program) -> None:
        """`provider`: its address."""
        self._session = session
        self._provider = provider
        self.program = program

    async def send(self, key: str | None, *, patience_s: float | None = None) -> Seen:
        """Send the mail once, and hang up after `patience_s`."""
        fields = {"Authorization": "Bearer demo"} | ({"Idempotency-Key": key} if key else {})
        timeout = aiohttp.ClientTimeout(total=patience_s)
        start_s = time.monotonic()
        try:
            url = f"{self.program.url}/mail/emails"
            async with self._session.post(url, json=MAIL, headers=fields, timeout=timeout) as answer:
                content = await answer.read()
        except TimeoutError:
            return Seen("hung up", time.monotonic() - start_s)
        except aiohttp.ClientError:
            return Seen("connection lost", time.monotonic() - start_s)
        return Seen(_text(answer, content), time.monotonic() - start_s)

    async def settle(self, key: str) -> list[Seen]:
        """Send, and again as long as the answer is that the first request is outstanding.

        Raises: DemoError when that never ends.
        """
        seen = [await self.send(key)]
        end_s = time.monotonic() + SETTLE_S
        while seen[-1].busy:
            if time.monotonic() > end_s:
                raise DemoError(f"the key is still outstanding after {SETTLE_S:g} s")
            await asyncio.sleep(4 * LOOK_S)
            seen.append(await self.send(key))
        return seen

    async def provider_will(self, mode: str, delay: str = "0s") -> None:
        """Tell the provider what to do with the next mail, for one time."""
        wanted = {"mode": mode, "delay": delay, "times": 1}
        async with self._session.put(f"{self._provider}/_mode", json=wanted) as answer:
            answer.raise_for_status()

    async def accepted(self) -> int:
        """How many mails the provider says it accepted since `reset`."""
        async with self._session.get(f"{self._provider}/_accepted") as answer:
            return int((await answer.json())["count"])

    async def accepts(self) -> None:
        """Wait until the provider has accepted a mail.

        Raises: DemoError when it does not.
        """
        end_s = time.monotonic() + SETTLE_S
        while not await self.accepted():
            if time.monotonic() > end_s:
                raise DemoError(f"the provider has no mail after {SETTLE_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def reset(self) -> None:
        """Let the provider count from zero."""
        async with self._session.delete(f"{self._provider}/_accepted") as answer:
            answer.raise_for_status()

    async def restart_killed(self) -> None:
        """SIGKILL to the sidecar, and a new one on the same store."""
        await self.program.kill()
        await self.program.start(self._session)


def _text(answer: aiohttp.ClientResponse, content: bytes) -> str:
    text = str(answer.status)
    if answer.headers.get("Idempotent-Replayed") == "true":
        return f"{text} replayed"
    if answer.content_type == "application/problem+json":
        return f"{text} {str(json.loads(content)['type']).rpartition(':')[2]}"
    return text


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
