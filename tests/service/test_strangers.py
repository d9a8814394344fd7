"""Many clients with contents of their own, who leave when they like: nobody ever reads a byte of another's.

SIDECAR_STRANGERS is the number of visits (800, about four requests each), SIDECAR_FUZZ_SEED their seed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from crowd import each
from harness import Client, NoAnswerError, Turn, answer, chunked, cut_content, duration, request, scaled, until
from harness.behaviours import Behaviour, Received
from mutator import foreign, mark
from pair import Pair, each_test, module_pair
from strict import answers

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair(timeout={"receive": duration(2), "connect": duration(1), "total": duration(0.6)})
mail = each_test()

VISITS = int(os.environ.get("SIDECAR_STRANGERS", "800"))
SEED = int(os.environ.get("SIDECAR_FUZZ_SEED", "1"))
WORKERS = 40
LARGE = 40_000


# How likely the upstream is to answer in each way; `BUSY` frees the key.
WEIGHTS = (6, 6, 4, 1, 1, 1, 1)
BUSY = 4


def chance(seed: int, head: bytes) -> tuple[random.Random, int]:
    """What decides over the answer to a head, the same each time it comes; and the way."""
    rng = random.Random(f"{seed} {head!r}")
    return rng, rng.choices(range(len(WEIGHTS)), WEIGHTS)[0]


def mirror(seed: int) -> Behaviour:
    """Gives each request its own field and content back, sooner or later, in one way or another."""

    async def act(turn: Turn) -> bool:
        assert turn.request is not None
        rng, way = chance(seed, turn.request.head)
        whose = turn.request.first("x-mark") or b""
        content = whose + b":" + turn.request.content
        await asyncio.sleep(scaled(rng.choice((0, 0, 0.001, 0.005, 0.03))))
        fields = [(b"X-Mark", whose), (b"Set-Cookie", whose)]
        ways = (
            answer(200, fields, content),
            answer(200, fields, content),
            chunked([content[:10], content[10:]], fields=fields),
            answer(422, fields, content),
            answer(503, fields, content),
            answer(200, [*fields, (b"Connection", b"close")], content),
            cut_content(content, len(content) // 2, reset=rng.random() < 0.5),
        )
        return await ways[way].act(turn)

    return Behaviour(act)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a visitor. `again`: under a key that was used in this visit before."""

    data: bytes
    number: int
    again: bool = False


def asks(rng: random.Random, visit: int) -> list[Ask]:
    """What one visitor sends, in order, all of it marked as his."""
    made: list[Ask] = []
    for step in range(rng.randrange(1, 8)):
        if made and rng.random() < 0.25:
            made.append(Ask(made[rng.randrange(len(made))].data, visit, again=True))
            continue
        own = mark(visit)
        size = rng.choice((0, 0, 1, 1, LARGE))
        fields = [(b"Authorization", b"Bearer " + own), (b"X-Mark", own)]
        content = b"%d:" % step + (own + b",") * (size // 17 + 1)
        match rng.randrange(4):
            case 0:
                data = request("GET", b"/mail/domains?%d" % step, fields)
            case 1:
                data = request("POST", "/mail/other", fields, content)
            case _:
                # The same few keys for everybody: only the credential tells them apart.
                data = request("POST", "/mail/emails", fields, content, key=b"key-%d" % step)
        made.append(Ask(data, visit))
    return made


async def leave_early(rng: random.Random, client: Client, data: bytes) -> None:
    """Write some of it, perhaps read some, and go, in one way or another."""
    await client.send(data[: rng.randrange(len(data) + 1)])
    if rng.random() < 0.5:
        await asyncio.sleep(scaled(rng.choice((0, 0.001, 0.004, 0.02))))
    match rng.randrange(3):
        case 0:
            client.writer.transport.abort()
        case 1:
            client.close()
        case 2:
            client.half_close()
            client.close()


async def one_by_one(client: Client, wanted: Sequence[Ask]) -> bytes:
    """Ask on one connection, each after the answer to the one before; what came in all."""
    got = b""
    for ask in wanted:
        try:
            read = await client.ask(ask.data)
        except NoAnswerError as exc:
            return got + exc.head  # the upstream broke off what passed
        got += read.head + read.content
        assert read.first("x-mark") in (None, mark(ask.number))
        if read.first("connection") == b"close":
            break
    return got


async def pipelined(client: Client, wanted: Sequence[Ask]) -> bytes:
    """Ask all at once, and read until everything is answered or the connection ends."""
    await client.send(b"".join(ask.data for ask in wanted[:-1]) + _last(wanted[-1].data))
    got = await client.rest()
    assert len(answers(got)) <= len(wanted)
    return got


def _last(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


def doubled(requests: Sequence[Received]) -> list[tuple[bytes | None, ...]]:
    """Accounts and keys under which more than one mail came that was not refused as too many."""
    mails = Counter(
        (one.first("authorization"), one.first("idempotency-key"))
        for one in requests
        if one.target == b"/emails" and chance(SEED, one.head)[1] != BUSY
    )
    return [name for name, count in mails.items() if count > 1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("C332", "C333")
async def test_nobody_reads_a_byte_of_another_whoever_leaves_when(mail: Pair) -> None:
    mail.upstream.default = mirror(SEED)
    done: Counter[str] = Counter()

    async def visit(number: int) -> None:
        rng = random.Random(SEED * 1_000_003 + number)
        wanted = asks(rng, number)
        way = rng.choice(("left", "one by one", "one by one", "pipelined"))
        async with await mail.client() as client:
            if way == "left":
                await leave_early(rng, client, b"".join(ask.data for ask in wanted))
                got = b""
            else:
                got = await (one_by_one if way == "one by one" else pipelined)(client, wanted)
        assert foreign(got, number) == [], f"seed {SEED}, visit {number}"
        done[way] += len(wanted)

    await each(VISITS, visit, WORKERS)

    async def resting() -> bool:
        now = (await mail.sidecar.ask_admin("/v1/stats")).json()
        return (now["outstanding"], now["content_bytes"], now["unsettled"]) == (0, 0, 0)

    await until(resting)
    assert min(done.values()) > VISITS / 4, done
    # No content of one in the request of another, either.
    for one in mail.upstream.begun:
        assert foreign(one.head + one.content, *foreign(one.first("x-mark") or b"")) == []
    assert mail.upstream.malformed == []
    assert doubled(mail.upstream.requests) == []
    assert mail.sidecar.log_lines(level="error") == []


@pytest.mark.case("C332")
async def test_equal_keys_of_many_accounts_at_once_are_as_many_mails_with_their_own_answers(mail: Pair) -> None:
    mail.upstream.default = mirror(-1)
    seen: dict[int, list[bytes]] = defaultdict(list)

    async def account(number: int) -> None:
        own = mark(10_000 + number % 100)
        fields = [(b"Authorization", b"Bearer " + own), (b"X-Mark", own)]
        async with await mail.client() as client:
            got = await client.ask(request("POST", "/mail/emails", fields, own, key="everybody's"))
        assert foreign(got.head + got.content, 10_000 + number % 100) == []
        if got.status == 200:
            seen[number % 100].append(got.content)

    await each(300, account, 40)
    assert all(len(set(contents)) == 1 for contents in seen.values())
    assert len(seen) > 60
