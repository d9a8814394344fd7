"""The store: one typed method per Lua script. Nothing but this file and `link.py` speaks Redis.

Two connections: arrivals ask over one, owners renew and settle over the other, so that no flood of arrivals
delays an owner; the operator has a third, made when first asked for. Every call is bounded by `store.timeout`, a
repeat on a new connection included.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)

from sidecar import config
from sidecar.errors import StartError, StoreError
from sidecar.link import Link
from sidecar.message import Answer, RecordId
from sidecar.record import (
    Completed,
    Found,
    Held,
    Later,
    Outstanding,
    Renewal,
    Reserved,
    Reused,
    Unreadable,
    Verdict,
    pack_fields,
    sent_of,
    unpack_fields,
)
from sidecar.safety import unsafe

# Error replies that say "not now": the store is there and does not serve. redis-py makes types of some.
AWAY_TYPES: dict[type[RedisError], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    TryAgainError: "TRYAGAIN",
}
AWAY_WORDS = ("LOADING", "MISCONF", "NOREPLICAS", "BUSY")
# How often the store is looked at, so that /readyz knows of a silent or full one that nobody asks.
LOOK_S = 1.0


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one attempt says of itself with every command: enough to put its record back if the store lost it."""

    record: RecordId
    route: str
    token: bytes
    fingerprint: bytes
    algorithm: bytes
    lease_s: float
    hold_for_s: float
    native: bytes = b""
    credential: bytes = b""
    accept_encoding: bytes = b""
    key_text: bytes = b""
    attempt: int = 1
    earlier_unknown: bool = False
    first_ms: int = 0
    spent_ms: int = 0

    def owned(self, reserved: Reserved) -> Claim:
        """This claim with what the store said of it."""
        return replace(
            self,
            native=reserved.native,
            attempt=reserved.attempt,
            earlier_unknown=reserved.earlier_unknown,
            first_ms=reserved.first_ms,
            spent_ms=reserved.spent_ms,
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """When an unknown record may be tried again. `window_s` None: the provider has no key of its own."""

    resend: bool
    window_s: float | None
    margin_s: float
    resend_after_s: float
    longest_s: float


class Scripts:
    """The Lua files with the part they share in front, and their SHA1 names."""

    NAMES = ("reserve", "renew", "complete", "release", "lose", "resolve", "forget", "show", "find")

    def __init__(self) -> None:
        """Reads the package's own files."""
        folder = files("sidecar") / "lua"
        shared = (folder / "record.lua").read_text("utf-8")
        self.text = {name: shared + (folder / f"{name}.lua").read_text("utf-8") for name in self.NAMES}
        # EVALSHA names a script by its SHA1; nothing secret hangs on it.
        self.sha = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self.text.items()}  # noqa: S324


class Store:
    """A Redis or Valkey server that is there, or a reason why not."""

    def __init__(
        self,
        settings: config.Store,
        *,
        socket_path: str = "",
        wall_ms: Callable[[], int],
        report: Callable[[str], None],
        observe: Callable[[str, float], None],
    ) -> None:
        """`socket_path`: of the embedded server, else the URL says where.

        `wall_ms`: the wall clock, for the order of lists alone. `report` takes one sentence for the log.

        `observe` takes a script's name and how long its round trip took, in seconds.
        """
        self._settings = settings
        self._scripts = Scripts()
        self._wall_ms = wall_ms
        self._report = report
        self._observe = observe
        self.warnings: tuple[str, ...] = ()
        url = f"unix://{socket_path}" if socket_path else settings.url
        # The pool is never used as one: it is how redis-py reads a URL.
        pool = ConnectionPool.from_url(url)
        self._class: type[AbstractConnection] = pool.connection_class
        self._arguments: dict[str, Any] = {
            **pool.connection_kwargs,
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": settings.timeout_s,
            "decode_responses": False,
            "driver_info": None,
            "health_check_interval": 0,
        }
        self._refused = ""
        self._looking: asyncio.Task[None] | None = None
        self._asking = Link(self._connection, timeout_s=settings.timeout_s, ready=self._ready)
        self._settling = Link(self._connection, timeout_s=settings.timeout_s, ready=self._ready)
        self._operating: Link | None = None

    @property
    def trouble(self) -> str:
        """Empty while the store serves, else one clause why not."""
        return self._asking.trouble or self._settling.trouble or self._refused

    def start(self) -> None:
        """Begin to connect; the store may still be away."""
        self._asking.start()
        self._settling.start()
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """Ask each second whether the store still answers, and, after a refusal, whether it takes writes again."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                for link in (self._asking, self._settling):
                    if not link.trouble:
                        await link.call("PING")
                if self._refused:
                    reply = await self._settling.call("SET", f"{self._settings.prefix}:probe", "1", "PX", 1000)
                    self._refused = "" if not isinstance(reply, RedisError) else self._refused
            except StoreError:
                continue  # the link says why, and comes back by itself

    async def close(self) -> None:
        """Drop the connections; nothing may be under way any more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._asking.close()
        await self._settling.close()
        if self._operating is not None:
            await self._operating.close()

    def _connection(self) -> AbstractConnection:
        return self._class(**self._arguments)

    # Making a connection ready, and what start-up must know of the server.

    async def _ready(self, link: Link) -> None:
        reply = await link.call("PING", now=True)
        if isinstance(reply, RedisError):
            raise StoreError(str(reply), applied=False)
        for name, text in self._scripts.text.items():
            reply = await link.call("SCRIPT", "LOAD", text, now=True)
            if isinstance(reply, NoPermissionError):
                continue  # EVAL alone may still be allowed: `check` finds out
            if isinstance(reply, RedisError):
                raise StoreError(f"script {name}: {reply}", applied=False)

    async def check(self) -> None:
        """Look at what the server promises; fills `warnings`.

        Raises: StartError naming the missing right or the version, or, under `store.strict`, the first unsafe
        setting. StoreError where the store is away: the caller goes on, not ready.
        """
        probe = await self._call(self._asking, "EVAL", "return 1", 0)
        if isinstance(probe, RedisError):
            raise StartError(f"store: this account may not run scripts (EVAL, EVALSHA): {probe}")
        self.warnings = await unsafe(self._ask, self._report)
        for warning in self.warnings:
            self._report(warning)
        if self._settings.strict and self.warnings:
            raise StartError(f"store.strict: {self.warnings[0]}")

    async def _ask(self, *words: str) -> Any:
        """A question about the server itself; None where it may not be asked."""
        reply = await self._call(self._asking, *words)
        return None if isinstance(reply, RedisError) else reply

    # One round trip.

    async def _call(self, link: Link, *arguments: bytes | str | int) -> Any:
        """One command, repeated once on a new connection while `store.timeout` lasts. Error replies are values.

        Raises: StoreError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.timeout_s
        reached = False
        while True:
            try:
                return await link.call(*arguments, timeout_s=deadline - loop.time())
            except StoreError as exc:
                reached = reached or exc.applied is None
                # Every script recognises its own effect, so repeating is safe; only time forbids it.
                if deadline - loop.time() > 0.005 and exc.applied is None:
                    continue
                raise StoreError(exc.reason, applied=None if reached else False) from exc

    async def _run(self, link: Link, script: str, claim: Claim, *more: bytes | str | int) -> list[Any]:
        name = self._name(claim)
        arguments = (
            3,
            name,
            f"{self._tag(claim)}:{claim.route}:open",
            f"{self._tag(claim)}:{claim.route}:done",
            claim.token,
            claim.fingerprint,
            claim.algorithm,
            _ms(claim.lease_s),
            _ms(claim.hold_for_s),
            claim.native,
            claim.credential,
            claim.accept_encoding,
            claim.key_text,
            claim.attempt,
            int(claim.earlier_unknown),
            claim.first_ms,
            claim.spent_ms,
            self._wall_ms(),
            claim.record,
            *more,
        )
        begin_s = time.perf_counter()
        reply = await self._call(link, "EVALSHA", self._scripts.sha[script], *arguments)
        if isinstance(reply, NoScriptError):
            # It did not run, so running it by its text is not a repeat.
            reply = await self._call(link, "EVAL", self._scripts.text[script], *arguments)
        self._observe(script, time.perf_counter() - begin_s)
        if isinstance(reply, RedisError):
            raise self._away(link, reply)
        result: list[Any] = reply
        return result

    def _away(self, link: Link, reply: RedisError) -> StoreError:
        """The error for an error reply: the server gave it, and the script stopped before its first write."""
        text = " ".join(str(reply).split())[:200]
        word = AWAY_TYPES.get(type(reply)) or next((word for word in AWAY_WORDS if text.startswith(word)), "")
        if isinstance(reply, ReadOnlyError):
            # A primary that was demoted: the address may lead to another server by now.
            link.reconnect("the server is read-only")
        reason = f"{word}: {text.removeprefix(word).strip()}" if word else text
        if not word:
            self._report(f"unexpected reply: {text}")
        if link is not self._operating:
            self._refused = reason
        return StoreError(reason, applied=False)

    def _tag(self, claim: Claim) -> str:
        return f"{self._settings.prefix}:{{{claim.record[:2]}}}"

    def _name(self, claim: Claim) -> str:
        return f"{self._tag(claim)}:{claim.record}"

    # The transitions.

    async def reserve(self, claim: Claim, terms: Terms) -> Found:
        """Ask for the record. Raises: StoreError; with `applied` None a reservation may stand, or come to stand."""
        window = -1 if terms.window_s is None else _ms(terms.window_s)
        reply = await self._run(
            self._asking,
            "reserve",
            claim,
            "resend" if terms.resend else "hold",
            window,
            _ms(terms.margin_s),
            _ms(terms.resend_after_s),
            _ms(terms.longest_s),
        )
        return _found(reply)

    async def renew(self, claim: Claim) -> Renewal:
        """Say that the exchange still runs. Raises: StoreError."""
        return Renewal(_word(await self._run(self._settling, "renew", claim)))

    async def complete(
        self, claim: Claim, answer: Answer, *, kept: bool, refusal: bool, ttl_s: float, age_s: float
    ) -> Verdict:
        """Record a final answer. `age_s`: since this attempt was reserved. Raises: StoreError."""
        reply = await self._run(
            self._settling,
            "complete",
            claim,
            _ms(ttl_s),
            _ms(age_s),
            int(refusal),
            answer.status,
            answer.reason,
            pack_fields(answer.fields),
            int(kept),
            answer.content if kept else b"",
        )
        return Verdict(_word(reply))

    async def release(self, claim: Claim) -> Verdict:
        """Free the key. Raises: StoreError."""
        return Verdict(_word(await self._run(self._settling, "release", claim)))

    async def lose(self, claim: Claim, *, seen: int | None, ttl_s: float, age_s: float) -> Verdict:
        """Record that nobody knows. `seen`: the status of an answer that broke off. Raises: StoreError."""
        status = "" if seen is None else seen
        return Verdict(_word(await self._run(self._settling, "lose", claim, _ms(ttl_s), _ms(age_s), status)))

    # What the operator asks (`ledger.py`), over a connection of its own: it never delays a mail, nor fails one.

    def _operators(self) -> Link:
        if self._operating is None:
            self._operating = Link(self._connection, timeout_s=self._settings.timeout_s, ready=self._ready)
            self._operating.start()
        return self._operating

    async def operate(self, script: str, claim: Claim, *more: bytes | str | int) -> list[Any]:
        """One script for the operator. Raises: StoreError."""
        return await self._run(self._operators(), script, claim, *more)

    async def read(self, command: str, tag: str, name: str, *more: str | int) -> Any:
        """One command that only reads, about what has this name under a tag. Raises: StoreError."""
        link = self._operators()
        reply = await self._call(link, command, f"{self.begins(tag)}{name}", *more)
        if isinstance(reply, RedisError):
            raise self._away(link, reply)
        return reply

    def begins(self, tag: str) -> str:
        """What all names under a tag begin with."""
        return f"{self._settings.prefix}:{{{tag}}}:"


def _word(reply: list[Any]) -> str:
    word: bytes = reply[0]
    return word.decode("ascii")


def _found(reply: list[Any]) -> Found:
    return _FOUND[_word(reply)](reply)


def _reserved(reply: list[Any]) -> Found:
    _, attempt, earlier, native, first, spent, left = reply
    return Reserved(attempt, earlier == 1, native, int(first), int(spent), left)


def _completed(reply: list[Any]) -> Found:
    _, _owner, status, reason, packed, content, kept, accept_encoding = reply
    try:
        answer = Answer(int(status), reason, unpack_fields(packed), content)
    except (ValueError, TypeError):
        return Unreadable()
    return Completed(answer, kept == 1, accept_encoding, resolved=kept == 2)


def _reused(reply: list[Any]) -> Found:
    _, state, status, earlier = reply
    return Reused(sent_of(state.decode(), status.decode(), earlier == 1))


_FOUND: dict[str, Callable[[list[Any]], Found]] = {
    "reserved": _reserved,
    "outstanding": lambda reply: Outstanding(reply[1]),
    "later": lambda reply: Later(reply[1]),
    "held": lambda reply: Held(reply[1].decode(), reply[2].decode()),
    "completed": _completed,
    "reused": _reused,
    "unreadable": lambda _: Unreadable(),
}
