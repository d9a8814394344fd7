"""The clients: applications that send a mail under a key and come back until it is settled, each in its own manner."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness import Client, NoAnswerError, Parsed, request, scaled

from sidecar.message import Answer
from storm.history import Arrival, End, History
from storm.mix import HOLD, NATIVE, Mix, draw, some_s, source
from storm.provider import digest

# Far longer than any exchange with its waiting, its attempts and its store time-outs can last.
PATIENCE_S = 15.0
# What a client takes for "come back later"; everything else settles its mail, or asks for a person.
AGAIN = (409, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail an application wants to send once: its key, and the content every try has."""

    route: str
    key: str
    path: str
    content: bytes


def mail(seed: int, number: int, mix: Mix) -> Mail:
    """The mail with this number. Some have the content of others: only the key tells them apart."""
    rng = source(seed, "mail", number)
    route = NATIVE if rng.random() < mix.native_share else HOLD
    members: dict[str, object] = {"to": "b@example.com", "subject": rng.choice(("hello", "report"))}
    chance = rng.random()
    if chance < 0.5:
        members["number"] = number
    elif chance < 0.6:
        members["text"] = "x" * rng.randrange(50_000, 200_000)
    path = "/waiting" if rng.random() < 0.3 else "/emails"
    return Mail(route, f"{route}-{number}", path, json.dumps(members).encode())


class Clients:
    """All clients of a run; everything they do is logged in `history`."""

    def __init__(self, bases: Sequence[str], history: History, mix: Mix, seed: int) -> None:
        """`bases`: the addresses of the sidecars, which stay the same over their restarts."""
        self.mails: list[Mail] = []
        self.over = False
        self._bases = bases
        self._history = history
        self._mix = mix
        self._seed = seed
        self._numbers = itertools.count(1)

    async def work(self) -> None:
        """One mail after the other until `over`."""
        while not self.over:
            number = len(self.mails) + 1
            one = mail(self._seed, number, self._mix)
            self.mails.append(one)
            twins = source(self._seed, "twins", number).randint(1, self._mix.twins)
            async with asyncio.TaskGroup() as group:
                for twin in range(twins):
                    group.create_task(self._application(one, source(self._seed, "client", number, twin)))

    async def _application(self, one: Mail, rng: random.Random) -> None:
        """Tries until the mail is settled or it has had enough, and comes back now and then to be told again."""
        more = rng.randint(0, self._mix.returns)
        for _ in range(self._mix.tries):
            arrival = await self.arrive(one, rng, draw(rng, self._mix.manners))
            settled = arrival.answer is not None and arrival.answer.status not in AGAIN
            if self.over or (settled and not more):
                return
            if settled:
                more -= 1
            at_once = rng.random() < 0.4 and arrival.end is not End.REFUSED
            await asyncio.sleep(0.0 if at_once else some_s(rng, 0.1, 1.5))

    async def arrive(self, one: Mail, rng: random.Random, manner: str, sidecar: int | None = None) -> Arrival:
        """One request in one manner, through any sidecar unless one is given."""
        number = rng.randrange(len(self._bases)) if sidecar is None else sidecar
        content = one.content if manner != "other" else one.content[:-1] + b', "other": 1}'
        loop = asyncio.get_running_loop()
        arrival = Arrival(next(self._numbers), one.route, one.key, number, digest(content), loop.time())
        self._history.arrivals.append(arrival)
        try:
            client = await Client.open(self._bases[number])
        except OSError:
            arrival.end, arrival.ended_s = End.REFUSED, loop.time()
            return arrival
        try:
            await self._exchange(client, arrival, self._bytes(one, arrival, content, rng), rng, manner)
        finally:
            arrival.ended_s = loop.time()
            client.close()
        return arrival

    def _bytes(self, one: Mail, arrival: Arrival, content: bytes, rng: random.Random) -> bytes:
        # The same key in both spellings: one to us, two to a provider that compares bytes.
        spelt = f'"{one.key}"' if rng.random() < 0.3 else one.key
        fields = [
            ("Authorization", "Bearer storm"),
            ("Content-Type", "application/json"),
            ("X-Arrival", str(arrival.number)),
        ]
        return request("POST", f"/{one.route}{one.path}", fields, content, key=spelt)

    async def _exchange(self, client: Client, arrival: Arrival, data: bytes, rng: random.Random, manner: str) -> None:
        """Write, wait, and log how it ended."""
        try:
            if manner == "half":
                arrival.whole = False
                await client.send(data[: rng.randrange(1, len(data))])
                await asyncio.sleep(some_s(rng, 0.0, 0.1))
                client.abort()
                arrival.end = End.LEFT
                return
            await client.send(data)
            if manner == "hang-up":
                await asyncio.sleep(some_s(rng, 0.0, 0.2) if rng.random() < 0.7 else 0.0)
                arrival.end = End.LEFT
                return
            patience_s = rng.uniform(0.1, 1.0) if manner == "hasty" else PATIENCE_S
            arrival.answer = _value(await client.answer(deadline_s=patience_s))
            arrival.end = End.ANSWERED
        except TimeoutError:
            arrival.end = End.LEFT if manner == "hasty" else End.UNANSWERED
        except (NoAnswerError, OSError):
            arrival.end = End.CUT

    # When everything is quiet.

    async def settle(self, one: Mail, until_s: float) -> str:
        """Come back under a key until it is settled: `settled`, `unknown`, or `stuck` at `until_s` (the loop's clock).

        It is unknown once several answers in a row said so, over more than the longest lease.
        """
        loop = asyncio.get_running_loop()
        rng = source(self._seed, "quiet", one.key)
        unknown_since_s: float | None = None
        while loop.time() < until_s:
            arrival = await self.arrive(one, rng, "patient")
            if arrival.slug != "outcome-unknown":
                unknown_since_s = None
            elif unknown_since_s is None:
                unknown_since_s = loop.time()
            elif loop.time() - unknown_since_s > scaled(2.0):
                return "unknown"
            if arrival.answer is not None and (arrival.answer.status not in AGAIN or arrival.replayed):
                return "settled"
            await asyncio.sleep(some_s(rng, 0.3, 0.6))
        return "stuck"


def _value(parsed: Parsed) -> Answer:
    return Answer(parsed.status, parsed.reason, parsed.fields, parsed.content)
