"""A scripted upstream on real sockets: reads whole requests byte for byte, records them, misbehaves by name.

    upstream.default = answer(200)              # for every request without a line in the script
    upstream.script(stall(), answer(422))       # the next request stalls, the one after it is refused

`count` is the number of requests it has read whole: the number that the promise is about.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from dataclasses import dataclass, field

from harness.behaviours import At, Behaviour, Received, Turn, answer
from harness.waiting import until
from harness.wire import HEAD_LIMIT_BYTES, Head, read_content, read_head


@dataclass(slots=True)
class Upstream:
    """The scripted upstream. `await Upstream.start()`, later `await upstream.stop()`.

    `requests`: those read whole, in order; `begun`: every head, also of requests that never ended;
    `malformed`: what could not be read, one line each; `connections`: how many were accepted.
    """

    default: Behaviour = field(default_factory=answer)
    tls: ssl.SSLContext | None = None
    host: str = "127.0.0.1"
    port: int = 0
    requests: list[Received] = field(default_factory=list)
    begun: list[Received] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    connections: int = 0
    _queue: deque[Behaviour] = field(default_factory=deque)
    _server: asyncio.Server | None = None
    _open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = field(default_factory=dict)
    _claim: socket.socket | None = None

    @classmethod
    async def start(cls, default: Behaviour | None = None, tls: ssl.SSLContext | None = None) -> Upstream:
        """Listen on a free port of 127.0.0.1; with `tls`, https."""
        upstream = cls(default=default or answer(), tls=tls)
        # Bound and never listening: keeps the port ours while the upstream refuses.
        upstream._claim = socket.socket()
        upstream._claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        upstream._claim.bind((upstream.host, 0))
        upstream.port = upstream._claim.getsockname()[1]
        await upstream.accept()
        return upstream

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    @property
    def count(self) -> int:
        """How many requests were read whole."""
        return len(self.requests)

    @property
    def open_connections(self) -> int:
        """How many connections stand now."""
        return len(self._open)

    def script(self, *behaviours: Behaviour) -> None:
        """Append to the queue: one behaviour a request, in the order in which their heads arrive."""
        self._queue.extend(behaviours)

    async def reached(self, count: int = 1, deadline_s: float = 5.0) -> Received:
        """The request number `count`, once it was read whole.

        Raises: AssertionError when it was not within `deadline_s` (scaled).
        """
        await until(lambda: self.count >= count, deadline_s, what=f"{count} requests at the upstream")
        return self.requests[count - 1]

    async def refuse(self) -> None:
        """Close the port and every connection: connecting is refused from now on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.drop()

    async def accept(self) -> None:
        """Listen again on the same port."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((self.host, self.port))
        self._server = await asyncio.start_server(
            self._connected, sock=sock, limit=HEAD_LIMIT_BYTES, ssl=self.tls, backlog=1024
        )

    async def drop(self) -> None:
        """End every connection that stands."""
        tasks = [task for task in self._open.values() if task is not None]
        for writer, task in list(self._open.items()):
            writer.transport.abort()
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Close everything. May be called twice."""
        await self.refuse()
        if self._claim is not None:
            self._claim.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open[writer] = asyncio.current_task()
        turn = Turn(reader, writer)
        try:
            await self._serve(turn, self.connections)
        except (OSError, asyncio.IncompleteReadError):
            pass  # The other side left in the middle: `begun` has it, `requests` does not.
        except (ValueError, asyncio.LimitOverrunError) as exc:
            self.malformed.append(f"{type(exc).__name__}: {exc}")
        except asyncio.CancelledError:
            pass  # Only `drop` cancels, and it has ended the connection already.
        finally:
            del self._open[writer]
            writer.close()

    async def _serve(self, turn: Turn, connection: int) -> None:
        if self._queue and self._queue[0].at is At.ACCEPT:
            await self._queue.popleft().act(turn)
            return
        while head := await read_head(turn.reader):
            turn.request = self._begin(head, connection)
            behaviour = self._queue.popleft() if self._queue else self.default
            if behaviour.at is At.CONTENT:
                await self._rest(turn)
            if not await behaviour.act(turn):
                return

    def _begin(self, head: Head, connection: int) -> Received:
        method, target, _version = head.start.split(b" ", 2)
        now_s = asyncio.get_running_loop().time()
        received = Received(method, target, head.fields, head.raw, now_s, connection)
        self.begun.append(received)
        return received

    async def _rest(self, turn: Turn) -> None:
        received = turn.request
        assert received is not None
        received.content = await read_content(turn.reader, received.fields, to_end=False)
        received.whole = True
        self.requests.append(received)
        turn.number = len(self.requests)
