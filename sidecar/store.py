"""The store: one typed method per Lua script. What is below it (`nodes.py`) knows servers, and no records.

Every call is bounded by `store.timeout`, a repeat on a new connection, or at another server, included.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)

from sidecar import config
from sidecar.address import Kind, StoreAddress, parse
from sidecar.cluster import ClusterNodes
from sidecar.errors import StartError, StoreError
from sidecar.link import Argument
from sidecar.message import Answer, RecordId
from sidecar.node import Line, Node
from sidecar.nodes import Answered, Nodes, OneNode
from sidecar.reach import Reach
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
from sidecar.safety import Ask, together, unsafe

# Error replies that say "not now": the store is there and does not serve. redis-py makes types of some.
AWAY_TYPES: dict[type[RedisError], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    TryAgainError: "TRYAGAIN",
    MovedError: "MOVED",
    AskError: "ASK",
}
# Of these words, those that speak of a slot of a cluster, while it moves, and not of a server.
ONE_SLOT = ("TRYAGAIN", "MOVED", "ASK")
# What a reservation, or the renewal of one, was granted with.
CONFIRMED = (b"reserved", b"renewed", b"restored")
AWAY_WORDS = ("LOADING", "MISCONF", "NOREPLICAS", "BUSY")


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
    """A Redis or Valkey store that is there, or a reason why not."""

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

        Raises: StartError where `store.ca` cannot be read.
        """
        self._settings = settings
        self._scripts = Scripts()
        self._wall_ms = wall_ms
        self._report = report
        self._observe = observe
        self.warnings: tuple[str, ...] = ()
        address = StoreAddress(Kind.SERVER, (config.Address(unix=socket_path),)) if socket_path else parse(settings.url)
        reach = Reach(address, ca=settings.ca, timeout_s=settings.timeout_s)
        kind = ClusterNodes if address.kind is Kind.CLUSTER else OneNode
        self._nodes: Nodes = kind(
            reach,
            scripts=self._scripts.text,
            replicas=settings.replicas,
            probe=lambda tag: f"{self.begins(tag)}probe",
            report=report,
        )

    @property
    def trouble(self) -> str:
        """Empty while the store serves, else one clause why not."""
        return self._nodes.trouble

    def start(self) -> None:
        """Begin to connect; the store may still be away."""
        self._nodes.start()

    async def close(self) -> None:
        """Drop the connections; nothing may be under way any more."""
        await self._nodes.close()

    # What start-up must know of the servers.

    async def check(self) -> None:
        """Look at what the server promises; fills `warnings`.

        Raises: StartError naming the missing right or the version, or, under `store.strict`, the first unsafe
        setting. StoreError where the store is away: the caller goes on, not ready.
        """
        primaries = self._nodes.primaries()
        if not primaries:
            raise StoreError(self.trouble, applied=False)
        found: list[tuple[str, str]] = []
        unread: list[tuple[str, str]] = []
        for name, node in primaries:
            probe = await node.link(Line.ASKING).call("EVAL", "return 1", 0)
            if isinstance(probe, RedisError):
                raise StartError(f"store: this account may not run scripts (EVAL, EVALSHA): {probe}")
            said: list[str] = []
            warned = await unsafe(_asker(node), said.append, self._settings.replicas)
            found += [(name, sentence) for sentence in warned]
            unread += [(name, sentence) for sentence in said]
        self.warnings = together(found)
        for sentence in (*together(unread), *self.warnings):
            self._report(sentence)
        if self._settings.strict and self.warnings:
            raise StartError(f"store.strict: {self.warnings[0]}")

    # One round trip.

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.timeout_s

    def _arguments(self, claim: Claim, more: tuple[Argument, ...]) -> tuple[Argument, ...]:
        tag = f"{self._settings.prefix}:{{{claim.record[:2]}}}"
        return (
            3,
            f"{tag}:{claim.record}",
            f"{tag}:{claim.route}:open",
            f"{tag}:{claim.route}:done",
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

    async def _run(self, line: Line, script: str, claim: Claim, *more: Argument, confirmed: bool = False) -> list[Any]:
        """One script. `confirmed`: and what it wrote stands at `store.replicas` replicas. Raises: StoreError."""
        arguments = self._arguments(claim, more)
        tag, deadline = claim.record[:2], self._deadline()
        begin_s = time.perf_counter()
        answered = await self._nodes.call(line, tag, deadline, "EVALSHA", self._scripts.sha[script], *arguments)
        if isinstance(answered.reply, NoScriptError):
            # It did not run, so running it by its text is no repeat; of an earlier writing nobody knows.
            doubtful = answered.doubtful
            try:
                answered = await self._nodes.call(line, tag, deadline, "EVAL", self._scripts.text[script], *arguments)
            except StoreError as exc:
                raise StoreError(exc.reason, applied=None if doubtful else exc.applied) from exc
            answered = replace(answered, doubtful=answered.doubtful or doubtful)
        if isinstance(answered.reply, RedisError):
            raise self._away(line, answered)
        result: list[Any] = answered.reply
        if confirmed and self._settings.replicas and result[0] in CONFIRMED:
            result = await self._confirmed(answered, deadline, script, arguments)
        self._observe(script, time.perf_counter() - begin_s)
        return result

    async def _confirmed(
        self, answered: Answered, deadline: float, script: str, arguments: tuple[Argument, ...]
    ) -> list[Any]:
        """The script once more, at the node that ran it, and its replicas' word."""
        asking = answered.asking
        by_name = ("EVALSHA", self._scripts.sha[script], *arguments)
        reply = await answered.node.confirm(*by_name, deadline=deadline, asking=asking)
        if isinstance(reply, NoScriptError):
            by_text = ("EVAL", self._scripts.text[script], *arguments)
            reply = await answered.node.confirm(*by_text, deadline=deadline, asking=asking)
        if isinstance(reply, RedisError):
            # What is repeated here stands already, though perhaps not for long.
            raise StoreError(" ".join(str(reply).split())[:200], applied=None)
        assert isinstance(reply, list)
        return reply

    def _away(self, line: Line, answered: Answered) -> StoreError:
        """The error for an error reply: the server gave it, and the script stopped before its first write."""
        reply = answered.reply
        text = " ".join(str(reply).split())[:200]
        word = AWAY_TYPES.get(type(reply)) or next((word for word in AWAY_WORDS if text.startswith(word)), "")
        if isinstance(reply, ReadOnlyError):
            # A primary that was demoted: the address may lead to another server by now.
            answered.link.reconnect("the server is read-only")
        reason = f"{word}: {text.removeprefix(word).strip()}" if word else text
        if not word:
            self._report(f"unexpected reply: {text}")
        if line is not Line.OPERATING and word not in ONE_SLOT:
            answered.node.refused = reason
        return StoreError(reason, applied=None if answered.doubtful else False)

    # The transitions.

    async def reserve(self, claim: Claim, terms: Terms) -> Found:
        """Ask for the record. Raises: StoreError; with `applied` None a reservation may stand, or come to stand."""
        window = -1 if terms.window_s is None else _ms(terms.window_s)
        reply = await self._run(
            Line.ASKING,
            "reserve",
            claim,
            "resend" if terms.resend else "hold",
            window,
            _ms(terms.margin_s),
            _ms(terms.resend_after_s),
            _ms(terms.longest_s),
            confirmed=True,
        )
        return _found(reply)

    async def renew(self, claim: Claim, *, confirmed: bool = False) -> Renewal:
        """Say that the exchange still runs. Raises: StoreError.

        `confirmed`: as a reservation is, before the first byte: a primary that was replaced renews what is another's.
        """
        return Renewal(_word(await self._run(Line.SETTLING, "renew", claim, confirmed=confirmed)))

    async def complete(
        self, claim: Claim, answer: Answer, *, kept: bool, refusal: bool, ttl_s: float, age_s: float
    ) -> Verdict:
        """Record a final answer. `age_s`: since this attempt was reserved. Raises: StoreError."""
        reply = await self._run(
            Line.SETTLING,
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
        return Verdict(_word(await self._run(Line.SETTLING, "release", claim)))

    async def lose(self, claim: Claim, *, seen: int | None, ttl_s: float, age_s: float) -> Verdict:
        """Record that nobody knows. `seen`: the status of an answer that broke off. Raises: StoreError."""
        status = "" if seen is None else seen
        return Verdict(_word(await self._run(Line.SETTLING, "lose", claim, _ms(ttl_s), _ms(age_s), status)))

    # What the operator asks (`ledger.py`), over a connection of its own: it never delays a mail, nor fails one.

    async def operate(self, script: str, claim: Claim, *more: Argument) -> list[Any]:
        """One script for the operator. Raises: StoreError."""
        return await self._run(Line.OPERATING, script, claim, *more)

    async def read(self, command: str, tag: str, name: str, *more: str | int) -> Any:
        """One command that only reads, about what has this name under a tag. Raises: StoreError."""
        full = f"{self.begins(tag)}{name}"
        answered = await self._nodes.call(Line.OPERATING, tag, self._deadline(), command, full, *more)
        if isinstance(answered.reply, RedisError):
            raise self._away(Line.OPERATING, answered)
        return answered.reply

    def begins(self, tag: str) -> str:
        """What all names under a tag begin with."""
        return f"{self._settings.prefix}:{{{tag}}}:"


def _asker(node: Node) -> Ask:
    """Questions about one server itself; None where it may not be asked."""

    async def ask(*words: str) -> Any:
        reply = await node.link(Line.ASKING).call(*words)
        return None if isinstance(reply, RedisError) else reply

    return ask


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
