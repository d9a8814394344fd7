"""The scripted upstream: reads whole requests, decides by chance what becomes of each, and logs what it did.

Under `/native` it is a provider with an idempotency of its own: it remembers the keys it accepted for a window,
answers their repeats with the same content, and refuses a twin while the first request still works. What it has
begun it ends, whatever becomes of the connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass

from harness import Turn, Upstream, scaled
from harness.behaviours import At, Behaviour
from harness.wire import every, first, read_content

from sidecar.message import Answer
from storm.history import History, Request
from storm.mix import NATIVE, STORED_BYTES, TOTAL_S, WINDOW_S, Mix, draw, some_s, source

REASONS = {200: b"OK", 202: b"Accepted", 401: b"Unauthorized", 409: b"Conflict", 422: b"Unprocessable", 503: b"Away"}
FREE = (401, 429, 500, 503)


@dataclass(slots=True)
class Kept:
    """What the provider remembers of a native key. `content` is None while the request works."""

    since_s: float
    status: int = 0
    content: bytes | None = None


class Provider:
    """The upstream of a run. `calm`: from now on it accepts everything at once."""

    def __init__(self, upstream: Upstream, history: History, mix: Mix, seed: int) -> None:
        """`upstream`: started; its default behaviour is ours from now on."""
        self.upstream = upstream
        self.calm = False
        self.resets = False
        self._history = history
        self._mix = mix
        self._seed = seed
        self._kept: dict[bytes, Kept] = {}
        self._seen = Counter[str]()
        self._works: set[asyncio.Task[Answer]] = set()
        upstream.default = Behaviour(self._serve, At.HEAD)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _serve(self, turn: Turn) -> bool:
        assert turn.request is not None
        if self.resets:
            turn.reset()
            return False
        request = self._begin(turn)
        self._seen[request.key] += 1
        rng = source(self._seed, "fate", request.key, self._seen[request.key])
        request.fate = "accept" if self.calm else draw(rng, self._mix.fates)
        if request.fate == "reset-at-head":
            turn.reset()
            return False
        content = await read_content(turn.reader, turn.request.fields, to_end=False)
        request.digest = digest(content)
        request.read_s = self._now()
        work = asyncio.get_running_loop().create_task(self._work(request, rng))
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        return await self._end(turn, request, await asyncio.shield(work), rng)

    def _begin(self, turn: Turn) -> Request:
        received = turn.request
        assert received is not None
        spelt = first(received.fields, b"idempotency-key") or b""
        request = Request(
            number=len(self._history.requests) + 1,
            route=received.target.split(b"/")[1].decode(),
            key=spelt.strip(b'"').decode(),
            native=b"|".join(every(received.fields, b"idempotency-key")),
            arrival=int(first(received.fields, b"x-arrival") or b"0"),
            begun_s=self._now(),
        )
        self._history.requests.append(request)
        return request

    # What becomes of it.

    async def _work(self, request: Request, rng: random.Random) -> Answer:
        fate = request.fate
        if fate == "refuse-unseen":
            return self._answer(request, 422, rng)
        if request.route != NATIVE:
            await asyncio.sleep(self._delay_s(fate, rng))
            return self._decide(request, rng)
        kept = self._remembered(request.native)
        if kept is not None and kept.content is None:
            return self._answer(request, 409, rng)
        if kept is not None:
            request.accepted_s = self._now()
            return self._answer(request, kept.status, rng, kept.content)
        self._kept[request.native] = Kept(request.begun_s)
        await asyncio.sleep(self._delay_s(fate, rng))
        answer = self._decide(request, rng)
        if request.accepted_s is None:
            del self._kept[request.native]  # it remembers what it accepted, nothing else
        else:
            self._kept[request.native].status = answer.status if answer.status < 300 else 200
            self._kept[request.native].content = answer.content
        return answer

    def _remembered(self, native: bytes) -> Kept | None:
        kept = self._kept.get(native)
        if kept is not None and kept.content is not None and self._now() > kept.since_s + scaled(WINDOW_S):
            return None
        return kept

    def _delay_s(self, fate: str, rng: random.Random) -> float:
        if self.calm:
            return 0.0
        if fate in ("accept-late", "refuse-late"):
            return some_s(rng, 1.1 * TOTAL_S, 2.5 * TOTAL_S)
        if fate == "refuse-slow":
            return some_s(rng, 0.5 * TOTAL_S, 0.9 * TOTAL_S)
        return some_s(rng, 0.0, self._mix.answer_s) if rng.random() < 0.5 else 0.0

    def _decide(self, request: Request, rng: random.Random) -> Answer:
        fate = request.fate
        if fate.startswith("accept"):
            request.accepted_s, request.mailed = self._now(), True
            gateway = rng.choice((502, 504))
            return self._answer(request, gateway if fate == "accept-gateway" else rng.choice((200, 202)), rng)
        if fate.startswith("refuse"):
            return self._answer(request, rng.choice((400, 422)), rng)
        return self._answer(request, rng.choice(FREE if fate == "free" else (502, 504)), rng)

    def _answer(self, request: Request, status: int, rng: random.Random, content: bytes | None = None) -> Answer:
        if content is None:
            members = {"id": f"mail-{request.number}", "status": status}
            if request.fate == "accept-large":
                members["text"] = "x" * (STORED_BYTES + rng.randrange(STORED_BYTES))
            content = json.dumps(members).encode()
        fields = (
            (b"Content-Type", b"application/json"),
            (b"X-Upstream", b"%d" % request.number),
            (b"X-Tag", b"a"),
            (b"x-tag", b"caf\xe9"),
            (b"Set-Cookie", b"of=%d" % request.number),
        )
        return Answer(status, REASONS.get(status, b"As Decided"), fields, content)

    # How it is told.

    async def _end(self, turn: Turn, request: Request, answer: Answer, rng: random.Random) -> bool:
        fate = request.fate
        if answer.status != 409:
            if fate.endswith("-reset"):
                turn.reset()
                return False
            if fate.endswith("-close"):
                return False
            if fate.endswith("-stall"):
                await turn.reader.read()
                return False
        if turn.reader.at_eof() or turn.writer.is_closing():
            return False
        # An end that is not announced may meet the next request on its way, and nobody would know of it.
        last = rng.random() < 0.2
        wire = written(answer, chunked=rng.random() < 0.3, last=last)
        if fate.endswith("-cut") and answer.status != 409:
            await turn.write(wire[: len(wire) - rng.randrange(1, 20)])
            return False
        # Logged first: whoever reads it may be faster than this line.
        request.answer, request.answered_s = answer, self._now()
        try:
            await turn.write(wire)
        except OSError:
            request.answer = None
            raise
        return not last


def written(answer: Answer, *, chunked: bool, last: bool) -> bytes:
    """An answer as it goes over the wire. `last`: the connection ends with it, and it says so."""
    framing, content = (b"Content-Length: %d" % len(answer.content)), answer.content
    if chunked:
        framing, content = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    lines = [b"HTTP/1.1 %d %b" % (answer.status, answer.reason)]
    lines += [name + b": " + value for name, value in answer.fields]
    lines += [b"Connection: close"] if last else []
    return b"\r\n".join([*lines, framing, b"", content])


def digest(content: bytes) -> str:
    """What two equal contents have in common."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
