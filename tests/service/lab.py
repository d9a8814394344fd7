"""One upstream, one store and the sidecars between them, and what the tests of the promise say about an answer.

Its fixtures stand in `lab_fixtures.py`. When a lab ends, no key in its store may be without an expiry.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from harness import (
    Parsed,
    Received,
    RedisServer,
    ReplyError,
    Sidecar,
    StoreProxy,
    Upstream,
    answer,
    duration,
    scaled,
    until,
)

Settings = dict[str, Any]

STORE_TIMEOUT_S = 0.4
LEASE_S = 1.5
TOTAL_S = 1.0
AUTHORIZATION = ("Authorization", "Bearer one")
JSON = ("Content-Type", "application/json")
FIELDS = (AUTHORIZATION, JSON)

_numbers = itertools.count(1)


def fresh() -> str:
    """A key that no other test has."""
    return f"key-{next(_numbers)}"


def times(*, connect_s: float = 1.0, total_s: float = TOTAL_S, receive_s: float = 5.0) -> Settings:
    """`timeout:` of a route."""
    return {"connect": duration(connect_s), "total": duration(total_s), "receive": duration(receive_s)}


async def elapsed(begin_s: float, after_s: float) -> None:
    """Wait until `after_s` (scaled) have passed since `begin_s` (`time.monotonic`)."""
    end_s = begin_s + scaled(after_s)
    await until(lambda: time.monotonic() >= end_s, after_s + 5.0)


class Lab:
    """What a test stands on. `one` and `two`: the sidecars that were started first; `closing` is closed at the end."""

    def __init__(self) -> None:
        """Use `start`."""
        self.directory = Path(tempfile.mkdtemp(prefix="lab-"))
        self.upstream = Upstream()
        self.store = RedisServer()
        self.sidecars: list[Sidecar] = []
        self.fronts: list[StoreProxy] = []
        self.closing = contextlib.ExitStack()
        self.shown: dict[Sidecar, int] = {}

    @classmethod
    async def start(cls, options: Mapping[str, str] | None = None) -> Self:
        """An upstream and a store that run; `options` are settings of the store's server."""
        made = cls()
        made.upstream = await Upstream.start()
        made.store.options.update(options or {})
        made.store.start()
        return made

    @property
    def one(self) -> Sidecar:
        """The first sidecar."""
        return self.sidecars[0]

    @property
    def two(self) -> Sidecar:
        """The second sidecar."""
        return self.sidecars[1]

    def route(self, provider: str = "generic", /, **changes: object) -> Settings:
        """A route to the upstream, with time-outs short enough for a test."""
        sends = {"sends": ["POST /emails", "POST /emails/batch"]} if provider == "generic" else {}
        base = {"provider": provider, "upstream": self.upstream.url, "lease": duration(LEASE_S), "timeout": times()}
        return {**base, **sends, **changes}

    def config(self, routes: Mapping[str, Settings] | None = None, **top: object) -> Settings:
        """A configuration with `routes` (`mail`, generic, unless given); `top` adds to its parts."""
        made: Settings = {
            "store": {"url": self.store.url, "timeout": duration(STORE_TIMEOUT_S)},
            "drain": duration(0.05),
            "log": {"level": "info", "format": "json"},
            "routes": dict(routes or {"mail": self.route()}),
        }
        for name, value in top.items():
            made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
        # A copy of each part: parts that two routes share would be written as YAML aliases.
        copied: Settings = json.loads(json.dumps(made))
        return copied

    async def sidecar(
        self,
        routes: Mapping[str, Settings] | None = None,
        *,
        front: StoreProxy | None = None,
        ready: bool = True,
        env: Mapping[str, str] | None = None,
        **top: object,
    ) -> Sidecar:
        """One more running sidecar on this store, through `front` where given."""
        config = self.config(routes, **top)
        if front is not None:
            config["store"]["url"] = front.url
        made = Sidecar(self.directory / f"sidecar-{len(self.sidecars) + 1}", config, env)
        self.sidecars.append(made)
        await made.run(ready=ready)
        return made

    async def front(self) -> StoreProxy:
        """One more front before the store."""
        made = await StoreProxy.start(self.store)
        self.fronts.append(made)
        return made

    def count(self, key: str) -> int:
        """How many requests with `key` the upstream has read whole."""
        return len(self.mails(key))

    async def arrived(self, key: str, count: int = 1) -> None:
        """Wait until the upstream has read `count` requests with `key`."""
        await until(lambda: self.count(key) >= count, what=f"{count} requests with {key} at the upstream")

    def mails(self, key: str) -> list[Received]:
        """The requests with `key` that the upstream has read whole."""
        return [one for one in self.upstream.requests if (one.first("idempotency-key") or b"") == key.encode()]

    # What stands in the store.

    def names(self) -> list[str]:
        """The names of all records; lists left out."""
        keys = self.store.keys()
        return [name.decode() for name in keys if re.fullmatch(rb".*\}:[0-9a-f]{40}", name)]

    def name(self, key: str) -> str:
        """The name of the record whose text is `key`; empty where there is none."""
        return next((name for name in self.names() if self.field(name, "key") == key), "")

    def field(self, name: str, field: str) -> str:
        """One field of a record; empty where it is absent or the record is none of ours."""
        try:
            value = self.store.command("HGET", name, field)
        except ReplyError:
            return ""
        return value.decode("latin-1") if isinstance(value, bytes) else ""

    def state(self, key: str) -> str:
        """`outstanding`, `completed`, `unknown`, or empty where there is no record."""
        name = self.name(key)
        return self.field(name, "state") if name else ""

    def left_ms(self, name: str) -> int:
        """Until the expiry of a key of the store; -1 without one, -2 where it is absent."""
        left = self.store.command("PTTL", name)
        assert isinstance(left, int)
        return left

    def eternal(self) -> list[bytes]:
        """The keys without an expiry: there may be none, ever."""
        keys = self.store.keys()
        return [name for name in keys if self.store.command("PTTL", name) == -1]

    async def until_state(self, key: str, state: str, deadline_s: float = 5.0) -> None:
        """Wait until the record of `key` is in `state`; `deadline_s` is scaled."""
        await until(lambda: self.state(key) == state, deadline_s, what=f"{key} is {state or 'absent'}")

    async def retry(
        self, sidecar: Sidecar, done: Callable[[Parsed], bool], key: str, deadline_s: float = 5.0, **sent: Any
    ) -> Parsed:
        """Repeat the same mail until `done` says yes to its answer, and give that answer."""
        answers: list[Parsed] = []

        async def asked() -> bool:
            answers.append(await sidecar.send(key, **sent))
            return done(answers[-1])

        await until(asked, deadline_s, what=f"a retry of {key} is answered as wanted")
        return answers[-1]

    # The end.

    def reset(self) -> None:
        """Forget what the upstream saw and was told to do."""
        self.upstream.default = answer()
        self.upstream._queue.clear()
        self.upstream.requests.clear()
        self.upstream.begun.clear()
        self.shown = {one: len(one.log()) for one in self.sidecars}

    def show(self) -> None:
        """Print what the sidecars logged since `reset`; pytest shows it for a test that failed."""
        for number, one in enumerate(self.sidecars, 1):
            lines = one.log()[self.shown.get(one, 0) :].splitlines()[-12:]
            print(f"sidecar {number}:", *lines, sep="\n")

    async def close(self) -> None:
        """End everything.

        Raises: AssertionError where a key of the store is without an expiry.
        """
        for one in self.sidecars:
            await one.close()
        for front in self.fronts:
            await front.stop()
        await self.upstream.stop()
        self.closing.close()
        eternal = self.eternal() if self.store._process is not None else []
        self.store.remove()
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not eternal, eternal


def problem(given: Parsed, slug: str, status: int, *, sent: str, retryable: bool = True) -> Settings:
    """The members of a problem, which must be this one."""
    assert (given.status, given.slug) == (status, slug), given
    members: Settings = given.json()
    assert (members["status"], members["sent"], members["retryable"]) == (status, sent, retryable), members
    assert members["title"], members
    assert members["detail"], members
    assert not given.replayed, given
    return members


def busy(given: Parsed) -> float:
    """Assert 409 `request-outstanding`; the seconds of its Retry-After, at least 1."""
    problem(given, "request-outstanding", 409, sent="unknown")
    return retry_after(given)


def retry_after(given: Parsed) -> float:
    """The seconds of Retry-After, at least 1."""
    seconds = int(given.first("retry-after") or b"0")
    assert seconds >= 1, given
    return seconds


def unknown(given: Parsed) -> Settings:
    """Assert 504 `outcome-unknown`; its members."""
    return problem(given, "outcome-unknown", 504, sent="unknown")


def away(given: Parsed) -> None:
    """Assert 503 `store-unavailable` with Retry-After."""
    problem(given, "store-unavailable", 503, sent="no")
    retry_after(given)


def error_of(given: Parsed) -> str:
    """The error type in Proxy-Status (RFC 9209 section 2.3)."""
    found = re.fullmatch(rb"[a-z-]+; error=([a-z_]+)", given.first("proxy-status") or b"")
    assert found is not None, given.fields
    return found[1].decode()


def stored(first: Parsed, again: Parsed) -> None:
    """Assert that `again` is the replay of `first`: status, reason, fields in order and count, bytes; and the mark."""
    assert again.replayed, again
    assert not first.replayed, first
    assert (again.status, again.reason, again.content) == (first.status, first.reason, first.content), (first, again)

    def own(given: Parsed) -> list[tuple[bytes, bytes]]:
        made = (b"date", b"idempotent-replayed", b"content-length", b"transfer-encoding", b"connection")
        return [(name, value) for name, value in given.fields if name.lower() not in made]

    assert own(again) == own(first), (first, again)


# A front before the store, as the network or the server may be.

AWAY = ("down", "silent", "frozen", "deaf")


async def fail(front: StoreProxy, how: str) -> None:
    """Take the store away: `down`, connections refused; `silent`, nothing passes; `frozen`, it passes later; `deaf`,
    commands are applied and replies vanish.
    """
    match how:
        case "down":
            await front.refuse()
        case "silent":
            front.black_hole = True
        case "frozen":
            front.freeze()
        case "deaf":
            front.drop_replies = True


async def passed(front: StoreProxy, at: int, text: bytes = b"EVALSHA") -> None:
    """Wait until a command with `text` has come to the front, behind the first `at` bytes."""
    await until(lambda: text in front.commands[at:], what=f"{text!r} comes to the front of the store")


def restore(front: StoreProxy) -> None:
    """Let everything pass again. TCP loses no bytes in the middle: connections that swallowed some end."""
    swallowed = front.drop_replies or front.black_hole
    front.delay_s, front.drop_replies, front.black_hole = 0.0, False, False
    if swallowed:
        front.cut()
    front.thaw()


async def mend(lab: Lab, front: StoreProxy) -> None:
    """Give the store back and wait until the sidecar has noticed."""
    restore(front)
    if front._server is None:
        await front.accept()
    await lab.one.ready(5)
