"""The real store as the machine sees it: commands at once, its record as a value, time that passes without waiting."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from harness import RedisServer
from harness.stores import connected

from sidecar.ledger import Ledger
from sidecar.message import Answer, RecordId
from sidecar.record import unpack_fields
from sidecar.store import Store

T = TypeVar("T")

# The loop stands still between two steps, for as long as hypothesis likes: no command may be late because of that.
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Mistake:
    """In one script, `old` (which stands there exactly once) becomes `new`."""

    script: str
    old: str
    new: str

    def make(self, store: Store) -> None:
        """Let this store run the script with the mistake in it.

        Raises: AssertionError where it does not fit any more.
        """
        text = store._scripts.text[self.script]
        assert text.count(self.old) == 1, f"{self.script}: {text.count(self.old)} places like {self.old!r}"
        text = text.replace(self.old, self.new)
        store._scripts.text[self.script] = text
        # Not loaded, so the server does not know it and the store runs it by its text.
        store._scripts.sha[self.script] = hashlib.sha1(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Image:
    """All keys of the store at one time: name, serialised value, ms to live."""

    keys: tuple[tuple[bytes, bytes, int], ...]


class World:
    """A `Store` on the real server, in a loop that runs only while something is asked."""

    def __init__(self, server: RedisServer, *, knows_time: bool, mistake: Mistake | None = None) -> None:
        """`knows_time`: whether the account may ask for TIME. `mistake`: what is wrong in the scripts, if anything."""
        self.server = server
        self.knows_time = knows_time
        self.store: Store
        self.ledger: Ledger
        self._mistake = mistake
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()

    def __enter__(self) -> Self:
        url = self.server.url
        if not self.knows_time:
            self.server.command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-time")
            url = url.replace("redis://", "redis://plain:secret@")
        self.store = self.do(self._stack.enter_async_context(connected(url, TIMEOUT_S)))
        self.ledger = Ledger(self.store)
        if self._mistake is not None:
            self._mistake.make(self.store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.do(self._stack.aclose())
        self._loop.close()
        if not self.knows_time:
            self.server.command("ACL", "DELUSER", "plain")

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a command."""
        return self._loop.run_until_complete(work)

    # Time, and what the store forgets.

    def wait(self, seconds: float) -> None:
        """Do to every key what waiting does to it, and to the times within them what waiting does to their age."""
        passed_ms = round(seconds * 1000)
        names = self.server.keys()
        for name in names:
            left_ms = self._number("PTTL", name)
            assert left_ms >= 0, f"{name!r} has no expiry"
            if left_ms <= passed_ms:
                self.server.command("DEL", name)
                continue
            self.server.command("PEXPIRE", name, left_ms - passed_ms)
            self._age(name, passed_ms)

    def _age(self, name: bytes, passed_ms: int) -> None:
        if self.server.command("TYPE", name) == b"hash":
            if self.server.command("HGET", name, "first") not in (None, b"0"):
                self.server.command("HINCRBY", name, "first", -passed_ms)
            return
        members = self.server.command("ZRANGE", name, 0, -1)
        assert isinstance(members, list)
        for member in members:
            assert isinstance(member, bytes)
            self.server.command("ZINCRBY", name, -passed_ms, member)

    def image(self) -> Image:
        """Everything that stands in the store now."""
        found = []
        names = self.server.keys()
        for name in names:
            value = self.server.command("DUMP", name)
            assert isinstance(value, bytes)
            found.append((name, value, self._number("PTTL", name)))
        return Image(tuple(found))

    def become(self, image: Image, passed_s: float) -> None:
        """Forget what happened since `image` was taken, `passed_s` ago: a replica that lagged takes over."""
        self.server.flush()
        passed_ms = round(passed_s * 1000)
        for name, value, left_ms in image.keys:
            if left_ms > passed_ms:
                self.server.command("RESTORE", name, left_ms - passed_ms, value)
                self._age(name, passed_ms)

    # What stands there.

    def _number(self, *words: str | bytes | int) -> int:
        found = self.server.command(*words)
        assert isinstance(found, int)
        return found

    def eternal(self) -> list[bytes]:
        """The keys without an expiry."""
        names = self.server.keys()
        return [name for name in names if self._number("PTTL", name) == -1]

    def record(self, name: str) -> dict[str, Any]:
        """A record's fields and `left_s`, in the words of the model's record; empty where there is none."""
        flat = self.server.command("HGETALL", name)
        assert isinstance(flat, list)
        raw = {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True) if isinstance(key, bytes)}
        if not raw:
            return {}
        fields = {key: value for key, value in raw.items() if isinstance(value, bytes)}
        return {
            "state": fields["state"].decode(),
            "owner": fields["owner"],
            "fingerprint": fields["fp"],
            "attempt": int(fields["attempt"]),
            "earlier": fields["earlier"] == b"1",
            "lease_s": int(fields["lease"]) / 1000,
            "hold_s": int(fields["hold"]) / 1000,
            "native": fields["native"],
            "credential": fields["cred"],
            "accept_encoding": fields["ae"],
            "why": fields.get("why", b"").decode(),
            "seen": fields.get("seen", b"").decode(),
            "answer": _answer(fields),
            "kept": fields.get("kept", b"1") == b"1",
            "resolved": fields.get("resolved") == b"1",
            "left_s": self._number("PTTL", name) / 1000,
        }

    def listed(self, record: RecordId, route: str) -> tuple[bool, bool]:
        """Whether a record stands in the list of unsettled ones, and in that of settled ones."""
        tag = f"sidecar:{{{record[:2]}}}:{route}"
        opened, done = (self.server.command("ZSCORE", f"{tag}:{part}", record) for part in ("open", "done"))
        return opened is not None, done is not None


def _answer(fields: dict[str, bytes]) -> Answer | None:
    if fields["state"] != b"completed":
        return None
    return Answer(int(fields["status"]), fields["reason"], unpack_fields(fields["fields"]), fields["content"])
