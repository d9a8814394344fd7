"""A sidecar with its upstream, for one test or for a whole module, and what the tests of bytes have in common."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from harness import Client, Parsed, RedisServer, Sidecar, Upstream, answer, default_config, raw, request
from harness.program import MAIL

JSON_MAIL = (("Authorization", "Bearer one"), ("Content-Type", "application/json"))
LOG_LINES_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Pair:
    """A running sidecar whose route `mail` leads to `upstream`."""

    sidecar: Sidecar
    upstream: Upstream

    async def ask(self, data: bytes, *, deadline_s: float = 10.0) -> Parsed:
        """Exactly `data` on a connection of its own, and one answer."""
        return await raw(self.sidecar.base, data, deadline_s=deadline_s)

    async def send(self, key: str | None, content: bytes = MAIL, **more: Any) -> Parsed:
        """One mail, as `Sidecar.send`."""
        return await self.sidecar.send(key, content, **more)

    async def client(self) -> Client:
        """A connection to the sidecar."""
        return await self.sidecar.client()

    @property
    def count(self) -> int:
        """How many requests the upstream has read whole."""
        return self.upstream.count

    def forget(self) -> None:
        """As if the upstream had seen nothing yet; it answers 200 again."""
        self.upstream.requests.clear()
        self.upstream.begun.clear()
        self.upstream.malformed.clear()
        self.upstream._queue.clear()
        self.upstream.default = answer()


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    store_url: str,
    parts: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    ready: bool = True,
    at: Upstream | None = None,
    **route: object,
) -> AsyncIterator[Pair]:
    """Start a sidecar, with an upstream unless `at` is one.

    `parts`: top-level settings; `route`: settings of the route `mail`.
    """
    far = at or await Upstream.start()
    url = str(route.pop("upstream", far.url))
    sidecar = Sidecar(directory / "sidecar", {**default_config(url, store_url, **route), **(parts or {})}, env)
    try:
        await sidecar.run(ready=ready)
        yield Pair(sidecar, far)
    except BaseException as exc:
        exc.add_note("\n".join(sidecar.log().splitlines()[-LOG_LINES_SHOWN:]))
        raise
    finally:
        await sidecar.close()
        if at is None:
            await far.stop()


def module_pair(parts: Mapping[str, Any] | None = None, **route: Any) -> object:
    """The fixture `shared`: one pair for all tests of a module."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module", name="shared")
    async def started(tmp_path_factory: pytest.TempPathFactory, session_store: RedisServer) -> AsyncIterator[Pair]:
        session_store.flush()
        async with running(tmp_path_factory.mktemp("shared"), session_store.url, parts, **route) as pair:
            yield pair

    return started


def each_test() -> object:
    """The fixture `mail`: the pair of `shared`, its upstream as new; the log of this test is shown if it fails."""

    @pytest.fixture(name="mail")
    def renewed(shared: Pair) -> Iterator[Pair]:
        shared.forget()
        begin = len(shared.sidecar.log())
        yield shared
        print(shared.sidecar.log()[begin:])

    return renewed


def head(*lines: bytes) -> bytes:
    """A head as bytes, blank line included."""
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(key: str | None, content: bytes = MAIL, target: str = "/mail/emails", fields: Any = JSON_MAIL) -> bytes:
    """A POST of one mail as bytes."""
    return request("POST", target, fields, content, key=key)


def gzipped(content: bytes, level: int = 6) -> bytes:
    """`content` under gzip, the same bytes each time."""
    packer = zlib.compressobj(level, wbits=31)
    return packer.compress(content) + packer.flush()


def rss_bytes(pid: int) -> int:
    """What a process holds in memory now."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most that a process has ever held in memory, or since `reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Let `peak_bytes` begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{name} is not told of process {pid}")
