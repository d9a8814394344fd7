"""The real program: `python -m sidecar serve` as a process of its own, on free ports, with its log kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import yaml

from harness.client import Client, NoAnswerError, Parsed, raw, request
from harness.upstream import Upstream
from harness.waiting import duration, free_port, until
from harness.wire import Pairs, Text

ROOT = Path(__file__).resolve().parents[2]
MAIL = b'{"from":"a@example.com","to":"b@example.com","subject":"hello","text":"hello"}'
READY_DEADLINE_S = 15.0

Settings = dict[str, Any]


def default_config(upstream: Upstream | str, store_url: str, **changes: object) -> Settings:
    """One route `mail` to `upstream`, with time-outs short enough for a test.

    `changes` are settings of that route (`lease="2s"`); a whole part such as `store` is changed in the result.
    Ports are added by `Sidecar.start`.
    """
    route: Settings = {
        "provider": "generic",
        "upstream": upstream if isinstance(upstream, str) else upstream.url,
        "sends": ["POST /emails", "POST /emails/batch"],
        "lease": duration(3),
        "timeout": {"receive": duration(5), "connect": duration(1), "total": duration(2)},
    }
    return {
        "store": {"url": store_url, "timeout": duration(1)},
        "drain": duration(0.1),
        "log": {"level": "info", "format": "json"},
        "routes": {"mail": {**route, **changes}},
    }


def embedded(directory: Path) -> str:
    """A `store.url` for an embedded store in `directory`."""
    return f"embedded:{directory / 'data'}"


class Sidecar:
    """One running sidecar. `base` and `admin` stay the same over `restart`."""

    def __init__(self, directory: Path, config: Settings | str, env: Mapping[str, str] | None = None) -> None:
        """`config`: settings without ports, or a file's text, in which `{port}` and `{admin_port}` are replaced."""
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port, self.admin_port = free_port(), free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.admin = f"http://127.0.0.1:{self.admin_port}"
        self.env = dict(env or {})
        self.file = directory / "config.yaml"
        self.log_file = directory / "sidecar.log"
        self.write_config(config)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    async def start(
        cls,
        directory: Path,
        config: Settings | str,
        *,
        env: Mapping[str, str] | None = None,
        ready: bool = True,
    ) -> Self:
        """Write the configuration, start the program, and wait for `/readyz` unless `ready` is False.

        Raises: AssertionError with the log when it does not become ready.
        """
        sidecar = cls(directory, config, env)
        await sidecar.run(ready=ready)
        return sidecar

    def write_config(self, config: Settings | str) -> None:
        """Replace the configuration file; a running sidecar reads it upon SIGHUP or `restart`."""
        if isinstance(config, str):
            text = config.replace("{port}", str(self.port)).replace("{admin_port}", str(self.admin_port))
        else:
            admin = {"listen": f"127.0.0.1:{self.admin_port}", **config.get("admin", {})}
            listen = {"listen": f"127.0.0.1:{self.port}"}
            text = yaml.safe_dump({**listen, **config, "admin": admin}, sort_keys=False)
        self.file.write_text(text, encoding="utf-8")

    async def run(self, *, ready: bool = True) -> None:
        """Start the program, which must not run."""
        assert self._process is None, "the sidecar runs already"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR_")}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond
                [sys.executable, "-m", "sidecar", "serve", "-c", str(self.file)],
                cwd=self.directory,
                env={**inherited, "PYTHONPATH": path, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if ready:
            await self.ready()

    async def ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until `/readyz` answers 200.

        Raises: AssertionError with the log when the program ends or the deadline (scaled) passes first.
        """
        try:
            await until(self._is_ready, deadline_s, what="/readyz answers 200")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log()}") from exc

    async def _is_ready(self) -> bool:
        assert self.exit_code is None, f"the sidecar ended with exit code {self.exit_code}"
        with contextlib.suppress(OSError, NoAnswerError):
            return (await self.ask_admin("/readyz")).status == 200
        return False

    @property
    def pid(self) -> int:
        """The process id of the running program."""
        assert self._process is not None, "the sidecar does not run"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return None if self._process is None else self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the program."""
        assert self._process is not None, "the sidecar does not run"
        self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.send_signal(signal.SIGCONT)

    async def wait_exit(self, deadline_s: float = 15.0) -> int:
        """The exit code, once the program has ended. `deadline_s` is scaled.

        Raises: AssertionError with the log when it has not.
        """
        process = self._process
        assert process is not None, "the sidecar does not run"
        try:
            await until(lambda: process.poll() is not None, deadline_s, what="the sidecar ends")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log()}") from exc
        self._process = None
        return process.returncode

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send `number` and wait for the exit code."""
        self.send_signal(number)
        return await self.wait_exit()

    async def kill(self) -> None:
        """SIGKILL to the program alone, and wait; an embedded store's server may live on, as in real life."""
        self.send_signal(signal.SIGKILL)
        await self.wait_exit()

    async def restart(self, number: signal.Signals = signal.SIGTERM, *, ready: bool = True) -> None:
        """Stop (unless it has ended already) and run again with the same file, ports and store."""
        if self._process is not None:
            await self.stop(number)
        await self.run(ready=ready)

    async def close(self) -> None:
        """End everything that was started here, whatever its state, orphans of killed sidecars included."""
        if self._process is not None and self._process.poll() is None:
            self.send_signal(signal.SIGCONT)
            self.send_signal(signal.SIGINT)
            try:
                await until(lambda: self.exit_code is not None, 5)
            except AssertionError:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._process = None
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Processes that work inside this sidecar's directory: itself, workers, and embedded servers."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if Path(os.readlink(entry)).is_relative_to(self.directory.resolve()):
                    found.append(int(entry.parent.name))
        return sorted(found)

    def log(self) -> str:
        """Everything it wrote to stdout and stderr, over all runs."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def log_lines(self, **wanted: object) -> list[dict[str, Any]]:
        """The log's JSON lines, or those whose members equal `wanted`; other lines are left out."""
        lines = []
        for text in self.log().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and all(line.get(name) == value for name, value in wanted.items()):
                    lines.append(line)
        return lines

    async def client(self) -> Client:
        """`async with await sidecar.client() as client`: a connection of its own.

        Raises: OSError when nobody listens.
        """
        return await Client.open(self.base)

    async def send(
        self,
        key: Text | None = None,
        content: bytes = MAIL,
        target: Text = "/mail/emails",
        fields: Pairs = (("Authorization", "Bearer one"), ("Content-Type", "application/json")),
        *,
        deadline_s: float = 10.0,
    ) -> Parsed:
        """POST one mail on a connection of its own and read the answer.

        Raises: NoAnswerError, TimeoutError, OSError.
        """
        data = request("POST", target, fields, content, key=key)
        return await raw(self.base, data, deadline_s=deadline_s)

    async def ask_admin(self, target: str, method: str = "GET", content: bytes = b"", **fields: str) -> Parsed:
        """One request to the admin listener; `fields` with `_` for `-`.

        Raises: NoAnswerError, TimeoutError, OSError.
        """
        sent = [(name.replace("_", "-"), value) for name, value in fields.items()]
        if content:
            sent.append(("Content-Type", "application/json"))
        host = f"127.0.0.1:{self.admin_port}"
        return await raw(self.admin, request(method, target, sent, content, host=host))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` whose labels contain `labels`; 0 where there is none."""
        text = (await self.ask_admin("/metrics")).content.decode()
        total = 0.0
        for line in text.splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, rest = sample.partition("{")
            if found == name and all(f'{label}="{text}"' in rest for label, text in labels.items()):
                total += float(value)
        return total


class StartSidecar(Protocol):
    """The factory behind the fixture `sidecar`."""

    def __call__(
        self,
        config: dict[str, Any] | str | None = None,
        *,
        store: str | None = None,
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        **changes: object,
    ) -> Awaitable[Sidecar]:
        """Start a sidecar; without `config`, `default_config` with `changes` to its route `mail`."""


async def start_all(*sidecars: Sidecar) -> None:
    """Run several at once: on two cores the second one starts beside the first."""
    await asyncio.gather(*(sidecar.run() for sidecar in sidecars))
