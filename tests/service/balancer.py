"""The least a load balancer is: turns by turn to whoever is ready, and to another one only where connecting failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness import Client, NoAnswerError, Sidecar, scaled, until
from harness.wire import HEAD_LIMIT_BYTES, read_content, read_head

LOOK_S = 0.1


@dataclass(slots=True)
class Backend:
    """A sidecar as the balancer sees it. `idle`: connections that were answered and not closed."""

    sidecar: Sidecar
    ready: bool = False
    idle: list[Client] = field(default_factory=list)
    served: int = 0


class Balancer:
    """Listens at `base`. `failed`: what it had to tell a client with a 502, one line each."""

    def __init__(self, sidecars: Sequence[Sidecar]) -> None:
        """Use `start`."""
        self.backends = [Backend(one) for one in sidecars]
        self.failed: list[str] = []
        self.base = ""
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._looking: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, sidecars: Sequence[Sidecar]) -> Balancer:
        """Look at every sidecar, then listen on a free port."""
        made = cls(sidecars)
        for backend in made.backends:
            await made._look(backend)
            made._looking.append(asyncio.create_task(made._keep_looking(backend)))
        made._server = await asyncio.start_server(made._connected, "127.0.0.1", 0, limit=HEAD_LIMIT_BYTES)
        made.base = f"http://127.0.0.1:{made._server.sockets[0].getsockname()[1]}"
        return made

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        for backend in self.backends:
            for client in backend.idle:
                client.close()

    async def until_ready(self, backend: Backend) -> None:
        """Wait until a look has found it ready."""
        await until(lambda: backend.ready)

    async def _keep_looking(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(scaled(LOOK_S))
            await self._look(backend)

    async def _look(self, backend: Backend) -> None:
        backend.ready = await _is_ready(backend.sidecar)
        while backend.idle and not backend.ready:
            backend.idle.pop().close()

    def _next(self, but: Backend | None = None) -> Backend | None:
        """The next one that is ready; one that is not where there is no other."""
        self._turn += 1
        turned = self.backends[self._turn % len(self.backends) :] + self.backends[: self._turn % len(self.backends)]
        others = [one for one in turned if one is not but]
        return next((one for one in others if one.ready), others[0] if others else None)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while head := await read_head(reader):
                    content = await read_content(reader, head.fields, to_end=False)
                    writer.write(await self._ask(head.raw + content))
                    await writer.drain()
        finally:
            writer.close()

    async def _ask(self, data: bytes) -> bytes:
        backend = self._next()
        for _ in range(2):
            assert backend is not None
            try:
                client = _kept(backend) or await Client.open(backend.sidecar.base)
            except OSError:
                # Not a byte was sent: the one case in which another one may be asked.
                backend = self._next(but=backend)
                continue
            return await self._exchange(backend, client, data)
        return self._fail("nobody listens")

    async def _exchange(self, backend: Backend, client: Client, data: bytes) -> bytes:
        try:
            got = await client.ask(data)
        except (NoAnswerError, OSError) as exc:
            client.close()
            return self._fail(f"{backend.sidecar.base}: {exc}")
        backend.served += 1
        if (got.first("connection") or b"").lower() == b"close" or not backend.ready:
            client.close()
        else:
            backend.idle.append(client)
        fields = [line for line in got.fields if line[0].lower() not in (b"connection", b"content-length")]
        lines = [b"HTTP/1.1 %d %b" % (got.status, got.reason), *(name + b": " + value for name, value in fields)]
        return b"\r\n".join([*lines, b"Content-Length: %d" % len(got.content), b"", got.content])

    def _fail(self, why: str) -> bytes:
        self.failed.append(why)
        return b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"


def _kept(backend: Backend) -> Client | None:
    """An idle connection that has not ended, as far as can be seen."""
    while backend.idle:
        client = backend.idle.pop()
        if not client.reader.at_eof() and not client.writer.transport.is_closing():
            return client
        client.close()
    return None


async def _is_ready(sidecar: Sidecar) -> bool:
    try:
        async with asyncio.timeout(scaled(1)):
            return (await sidecar.ask_admin("/readyz")).status == 200
    except (OSError, NoAnswerError):
        return False
