"""The stand-in provider: accepts mail, counts it, and misbehaves on request. No mail ever leaves it.

For the demo and for tests of retry code. Knows nothing of the sidecar: what it counts is what a real
provider would have accepted.

    POST /any/path      an accepted mail: 200 {"object": "email", "id": "..."}
    GET /_accepted      {"count": n, "accepted": [...]}, oldest first, without credentials and content
    DELETE /_accepted   forget them, and the answers kept under `native`
    GET, PUT /_mode     {"mode": "lost", "delay": "2s", "times": 1}

A mail counts as accepted once it has arrived whole, before its answer is delayed, lost or cut.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import socket
import struct
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from aiohttp import web

# Above the largest mail of any provider (40 MB, base64 on top).
CONTENT_LIMIT_BYTES = 64 * 1024 * 1024
SLOW_S = 2.0
RETRY_AFTER_S = 1

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}


class Mode(StrEnum):
    """What a POST gets. `ok`, `slow`, `lost` and `cut` accept the mail; the others do not."""

    OK = "ok"
    SLOW = "slow"
    FAIL = "fail"
    REFUSE = "refuse"
    BUSY = "busy"
    LOST = "lost"
    CUT = "cut"
    RESET = "reset"


ACCEPTING = frozenset((Mode.OK, Mode.SLOW, Mode.LOST, Mode.CUT))

# Not accepted, and said so: status, name, message, in the form of a provider's error.
REFUSALS = {
    Mode.FAIL: (500, "internal_server_error", "The stand-in provider fails, as it was told to."),
    Mode.REFUSE: (422, "validation_error", "The stand-in provider refuses this mail, as it was told to."),
    Mode.BUSY: (429, "rate_limit_exceeded", "The stand-in provider is busy, as it was told to be."),
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """One accepted mail. `at_s`: seconds since the start; `digest`: SHA-256 of the content, in hex digits."""

    id: str
    at_s: float
    method: str
    path: str
    key: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class Switch:
    """A mode, and how long each answer waits in it."""

    mode: Mode
    delay_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """`delay_s`; for `slow` without one, two seconds."""
        return SLOW_S if self.mode is Mode.SLOW and not self.delay_s else self.delay_s


def duration_s(text: object) -> float:
    """`2s`, `500ms`, `1m` or a number of seconds.

    Raises: ValueError when it is none of these.
    """
    found = _DURATION.fullmatch(str(text))
    if found is None or isinstance(text, bool):
        raise ValueError(f"delay: {text!r} is no duration such as 2s or 500ms")
    return float(found[1]) * _UNIT_S[found[2]]


class StandIn:
    """The stand-in provider on one port: `async with StandIn() as provider: ... provider.count`."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        mode: str = Mode.OK,
        delay_s: float = 0.0,
        *,
        native: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`port` 0: a free one. `native`: remember answers by Idempotency-Key. `say` gets a line per accepted mail.

        Raises: ValueError when `mode` is none.
        """
        self.host = host
        self.port = port
        self.native = native
        self.accepted: list[Accepted] = []
        self._say = say
        self._lasting = Switch(Mode(mode), delay_s)
        self._passing: Switch | None = None
        self._times = 0
        # Under `native`, by key and credential: the content's digest, and the answer once there is one.
        self._answers: dict[str, tuple[str, bytes | None]] = {}
        self._runner: web.AppRunner | None = None
        self._start_s = 0.0

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def count(self) -> int:
        """How many mails were accepted."""
        return len(self.accepted)

    async def start(self) -> None:
        """Listen.

        Raises: OSError when the address cannot be used.
        """
        app = web.Application(client_max_size=CONTENT_LIMIT_BYTES)
        app.router.add_get("/_accepted", self._list)
        app.router.add_delete("/_accepted", self._forget)
        app.router.add_get("/_mode", self._show_mode)
        app.router.add_put("/_mode", self._put_mode)
        app.router.add_route("*", "/{path:.*}", self._mail)
        # auto_decompress=False: the digest is that of the bytes that were sent.
        self._runner = web.AppRunner(app, auto_decompress=False, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._start_s = asyncio.get_running_loop().time()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError:
            await self.stop()
            raise
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and every connection. May be called twice."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    def set_mode(self, mode: str, delay_s: float = 0.0, times: int | None = None) -> None:
        """Switch for good, or for the next `times` mails (at least 1) and then back.

        Raises: ValueError when `mode` is none or `times` is below 1.
        """
        switch = Switch(Mode(mode), delay_s)
        if times is None:
            self._lasting, self._passing = switch, None
            return
        if times < 1:
            raise ValueError("times: at least 1")
        self._passing, self._times = switch, times

    def forget(self) -> None:
        """Count from zero, and drop the answers kept under `native`."""
        self.accepted.clear()
        self._answers.clear()

    def _take(self) -> Switch:
        switch = self._passing
        if switch is None:
            return self._lasting
        self._times -= 1
        if self._times == 0:
            self._passing = None
        return switch

    async def _mail(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return _error(404, "not_found", "Only a POST is a mail here; GET /_accepted shows them.")
        digest = hashlib.sha256(await request.read()).hexdigest()
        name = self._native_name(request)
        if known := self._answers.get(name):
            return _native(known, digest)
        switch = self._take()
        if switch.mode not in ACCEPTING:
            await asyncio.sleep(switch.wait_s)
            return _refusal(request, switch.mode)
        mail = self._accept(request, digest)
        answer = json.dumps({"object": "email", "id": mail.id}).encode()
        if name:
            self._answers[name] = (digest, None)
        await asyncio.sleep(switch.wait_s)
        # DELETE /_accepted may have come meanwhile: then the mail is forgotten, and so is its answer.
        if name in self._answers:
            self._answers[name] = (digest, answer)
        return _answer(request, switch.mode, answer)

    def _accept(self, request: web.Request, digest: str) -> Accepted:
        mail = Accepted(
            id=str(uuid.uuid4()),
            at_s=round(asyncio.get_running_loop().time() - self._start_s, 3),
            method=request.method,
            path=request.raw_path,
            key=request.headers.get("Idempotency-Key"),
            digest=digest,
        )
        self.accepted.append(mail)
        if self._say is not None:
            key = "without a key" if mail.key is None else f"key {mail.key!r}"
            self._say(f"accepted no. {self.count}: {mail.method} {mail.path}, {key}, content {digest[:12]}")
        return mail

    def _native_name(self, request: web.Request) -> str:
        key = request.headers.get("Idempotency-Key")
        if not self.native or key is None:
            return ""
        # Length first, so that no key and credential read like another pair.
        return f"{len(key)} {key} {request.headers.get('Authorization', '')}"

    async def _list(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"count": self.count, "accepted": [asdict(mail) for mail in self.accepted]})

    async def _forget(self, _request: web.Request) -> web.StreamResponse:
        self.forget()
        return web.Response(status=204)

    async def _show_mode(self, _request: web.Request | None = None) -> web.StreamResponse:
        switch = self._passing or self._lasting
        shown: dict[str, Any] = {"mode": switch.mode, "delay": f"{switch.wait_s:g}s"}
        return web.json_response(shown | ({"times": self._times} if self._passing else {}))

    async def _put_mode(self, request: web.Request) -> web.StreamResponse:
        try:
            text = (await request.text()).strip()
            wanted = {"mode": text} if text in set(Mode) else json.loads(text)
            if not isinstance(wanted, dict) or not wanted.keys() <= {"mode", "delay", "times"}:
                raise ValueError("an object with mode, delay and times is needed")
            times = wanted.get("times")
            if times is not None and type(times) is not int:
                raise ValueError("times: a number is needed")
            self.set_mode(wanted.get("mode", Mode.OK), duration_s(wanted.get("delay", 0)), times)
        except ValueError as exc:
            return _error(400, "mode_unknown", f"{exc}; modes: {', '.join(Mode)}")
        return await self._show_mode()


def _native(known: tuple[str, bytes | None], digest: str) -> web.Response:
    first_digest, answer = known
    if first_digest != digest:
        return _error(409, "invalid_idempotent_request", "This key was used for another mail.")
    if answer is None:
        return _error(409, "concurrent_idempotent_requests", "The first mail under this key is in work.")
    return web.Response(body=answer, content_type="application/json")


def _error(status: int, name: str, message: str, fields: dict[str, str] | None = None) -> web.Response:
    shown = {"statusCode": status, "name": name, "message": message}
    return web.json_response(shown, status=status, headers=fields)


def _refusal(request: web.Request, mode: Mode) -> web.StreamResponse:
    if mode is Mode.RESET:
        return _end(request, reset=True)
    status, name, message = REFUSALS[mode]
    return _error(status, name, message, {"Retry-After": str(RETRY_AFTER_S)} if mode is Mode.BUSY else None)


def _answer(request: web.Request, mode: Mode, answer: bytes) -> web.StreamResponse:
    if mode is Mode.LOST:
        return _end(request)
    if mode is Mode.CUT:
        return _cut(request, answer)
    return web.Response(body=answer, content_type="application/json")


def _end(request: web.Request, *, reset: bool = False) -> web.StreamResponse:
    transport = request.transport
    if transport is not None:
        if reset:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()
    # Goes nowhere: aiohttp finds the transport closed.
    return web.Response()


def _cut(request: web.Request, answer: bytes) -> web.StreamResponse:
    if request.transport is not None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
        request.transport.write(head + answer[: len(answer) // 2])
    return _end(request)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _serve(provider: StandIn) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with provider:
        _print(f"stand-in provider on {provider.url}; GET /_accepted; Ctrl-C ends it")
        _print(f"PUT /_mode takes one of {', '.join(Mode)}")
        await stopped.wait()


def run(host: str, port: int, mode: str = Mode.OK, delay_s: float = 0.0, native: bool = False) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit code: 0, or 1 when the address cannot be used.

    `delay_s`: before every answer, whatever the mode. Prints the address, then a line per accepted mail.

    Raises: ValueError when `mode` is none.
    """
    provider = StandIn(host, port, mode, delay_s, native=native, say=_print)
    try:
        asyncio.run(_serve(provider))
    except OSError as exc:
        sys.stderr.write(f"stand-in: cannot listen on {host}:{port}: {exc.strerror or exc}\n")
        return 1
    return 0
