"""A `Store` on the real server for tests, and claims to ask it with."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from harness.server import RedisServer
from harness.waiting import until
from sidecar import config
from sidecar.message import Answer, RecordId
from sidecar.store import Claim, Store, Terms

OK = Answer(200, b"OK", ((b"Content-Type", b"application/json"),), b'{"id":"1"}')
REFUSED = Answer(422, b"Unprocessable Content", (), b'{"error":"to"}')
HOLD = Terms(resend=False, window_s=None, margin_s=0, resend_after_s=0, longest_s=1)
RESEND = Terms(resend=True, window_s=3600, margin_s=1, resend_after_s=0, longest_s=1)
_numbers = itertools.count(1)


@asynccontextmanager
async def trying(url: str, timeout_s: float = 1.0, **settings: Any) -> AsyncIterator[Store]:
    """A store that has begun to connect and may never serve. `settings`: more of `store:`."""
    store = Store(
        config.Store(url=url, timeout_s=timeout_s, **settings),
        wall_ms=lambda: time.time_ns() // 1_000_000,
        report=print,
        observe=lambda _script, _took_s: None,
    )
    store.start()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def connected(url: str, timeout_s: float = 1.0, **settings: Any) -> AsyncIterator[Store]:
    """A store that serves. `settings`: more of `store:`."""
    async with trying(url, timeout_s, **settings) as store:
        await until(lambda: not store.trouble, 5)
        yield store


def claim(**changes: Any) -> Claim:
    """A claim on a record of its own; its lease is long, so that it is over only where a test says so."""
    number = next(_numbers)
    made = Claim(
        record=RecordId(f"{number:040x}"),
        route="mail",
        token=b"owner-%d" % number,
        fingerprint=b"fingerprint",
        algorithm=b"1",
        lease_s=60,
        hold_for_s=600,
        native=b"native-1",
        credential=b"account",
        accept_encoding=b"gzip",
        key_text=b"K1",
    )
    return replace(made, **changes)


def rival(one: Claim, **changes: Any) -> Claim:
    """Another attempt under the same record."""
    return replace(one, token=b"rival-%d" % next(_numbers), **changes)


def name(one: Claim) -> str:
    """The Redis key of a claim's record."""
    return f"sidecar:{{{one.record[:2]}}}:{one.record}"


def lapse(server: RedisServer, one: Claim, beyond_s: float = 0) -> None:
    """Let the lease of a record be over by `beyond_s`: what waiting does to PTTL, without the waiting."""
    left_s = one.hold_for_s - one.lease_s - beyond_s
    server.command("PEXPIRE", name(one), round(left_s * 1000) - 1)
