"""The exchanges of one process between a scripted upstream and the real store."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from harness import Upstream, scaled, until
from harness.stores import HOLD, claim, connected, rival

from sidecar import config
from sidecar.config import Native, Origin, Policy, Route, Send, Timeout, Twins
from sidecar.content import Content, Memory
from sidecar.exchange import Exchanges, Reply, Sending
from sidecar.flights import Flights
from sidecar.logline import Log
from sidecar.message import Fields
from sidecar.metrics import Metrics
from sidecar.record import Found
from sidecar.store import Claim, Store
from sidecar.upstream import Upstream as Sender

FIELDS: Fields = ((b"Host", b"sidecar.test"), (b"Idempotency-Key", b"K1"), (b"Content-Length", b"2"))
GUARDED = Native("Idempotency-Key", window_s=3600, twins=Twins.GUARDED)
TOTAL_S = scaled(0.3)


@dataclass
class Lab:
    """Exchanges of one process. Every content it lent has been given back when it closes."""

    upstream: Upstream
    store: Store
    flights: Flights
    exchanges: Exchanges
    memory: Memory
    metrics: Metrics
    log: io.StringIO
    replies: list[Reply] = field(default_factory=list)
    senders: list[Sender] = field(default_factory=list)

    def sending(
        self,
        *,
        one: Claim | None = None,
        native: Native | None = None,
        sender: type[Sender] = Sender,
        fields: Fields = FIELDS,
        **policy: Any,
    ) -> Sending:
        """A protected request to the scripted upstream."""
        origin = Origin("http", self.upstream.host, self.upstream.port)
        timeout = Timeout(connect_s=scaled(2), total_s=TOTAL_S)
        made = Policy(**policy)
        self.senders.append(sender(origin, timeout=timeout, keepalive_s=5, header_bytes=65536))
        send = Send("POST /send", b"POST", (b"send",), None, made)
        content = Content(self.memory)
        content.write(b"{}")
        return Sending(
            route=Route(name="mail", upstream=origin, sends=(send,), native=native, timeout=timeout, policy=made),
            policy=made,
            upstream=self.senders[-1],
            method=b"POST",
            target=b"/send",
            fields=fields,
            content=content,
            claim=one or claim(native=b"K1" if native else b""),
        )

    async def run(self, sending: Sending) -> Reply:
        """The reply of a request that becomes the owner."""
        reply = await self.exchanges.begin(sending)
        assert isinstance(reply, Reply)
        self.replies.append(reply)
        return reply

    async def record(self, sending: Sending) -> Found:
        """What the next arrival finds, once the store serves again."""
        await until(lambda: not self.store.trouble, 5)
        return await self.store.reserve(rival(sending.claim), HOLD)


@asynccontextmanager
async def lab_on(
    url: str, upstream: Upstream, *, memory_bytes: int = 1 << 20, stored_bytes: int = 1000
) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(connected(url, scaled(0.3)))
        memory, metrics, stream = Memory(memory_bytes), Metrics(), io.StringIO()
        log = Log(config.Log(), stream)
        flights = Flights(store, metrics=metrics, log=log)
        flights.start()
        stack.push_async_callback(flights.close)
        exchanges = Exchanges(store, flights, memory=memory, stored_bytes=stored_bytes, metrics=metrics, log=log)
        lab = Lab(upstream, store, flights, exchanges, memory, metrics, stream)
        yield lab
        exchanges.end_now()
        await exchanges.finish()
        await upstream.drop()
        for sender in lab.senders:
            await sender.close()
        for reply in lab.replies:
            reply.close()
        assert memory.held_bytes == 0


def told(reply: Reply) -> tuple[str, int, str]:
    """Slug, status and `sent` of a problem."""
    assert reply.problem is not None
    return reply.problem.slug, reply.problem.status, reply.problem.sent


UNKNOWN = ("outcome-unknown", 504, "unknown")
UNREACHABLE = ("upstream-unreachable", 502, "no")
