"""Requests, answers and targets that are nearly right: whatever comes, valid answers or an end, and nothing is doubled.

SIDECAR_FUZZ is the number of mutants (3,000), SIDECAR_FUZZ_SEED their seed; a failure names both and shows the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from crowd import each
from harness import Client, RedisServer, Turn, duration, request, scaled, until
from harness.behaviours import Behaviour, Received
from mutator import SECRET, Mutator, foreign, mark, mutant_answer
from pair import Pair, rss_bytes, running
from strict import answers, check_request

MUTANTS = int(os.environ.get("SIDECAR_FUZZ", "3000"))
SEED = int(os.environ.get("SIDECAR_FUZZ_SEED", "1"))
WORKERS = 32
QUIET_S = 0.4
PROBE = request("GET", "/nowhere", [("Connection", "close")])
MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def fuzzed(directory: Path, store_url: str) -> AsyncIterator[Pair]:
    """A sidecar that has to live through it all, with nothing in its log that says otherwise."""
    times = {"receive": duration(0.3), "connect": duration(1), "total": duration(0.5)}
    async with running(directory, store_url, timeout=times, key={"missing": "reject"}) as pair:
        pid = pair.sidecar.pid
        yield pair
        assert (await pair.sidecar.ask_admin("/livez")).status == 200
        assert (pair.sidecar.pid, pair.sidecar.exit_code) == (pid, None)
        log = pair.sidecar.log()
        assert SECRET.decode() not in log
        lines = [json.loads(line) for line in log.splitlines()]
        assert [line for line in lines if line["level"] == "error"] == []
        assert [line for line in lines if line.get("outcome") == "internal-error"] == []


async def quiet(client: Client, into: bytearray, *, enough: bool, silence_s: float = QUIET_S) -> bool:
    """Read until the end, or silence, or (with `enough`) a whole answer; whether it ended."""
    try:
        while True:
            async with asyncio.timeout(scaled(silence_s)):
                part = await client.reader.read(65536)
            if not part:
                return True
            into += part
            if enough and _whole(bytes(into)):
                return False
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def _whole(data: bytes) -> bool:
    with contextlib.suppress(ValueError):
        found = answers(data)
        return bool(found) and found[-1].whole
    return False


async def exchange(pair: Pair, pieces: list[bytes]) -> bytes:
    """Everything that comes back for `pieces`, and for a plain request behind them."""
    got = bytearray()
    client = await pair.client()
    try:
        with contextlib.suppress(ConnectionError):
            await client.send_pieces(pieces, gap_s=0.001 if len(pieces) > 1 else 0)
        if not await quiet(client, got, enough=True):
            with contextlib.suppress(ConnectionError):
                await client.send(PROBE)
            await quiet(client, got, enough=False)
    finally:
        client.writer.transport.abort()
    return bytes(got)


async def at_rest(pair: Pair) -> None:
    """Wait until nothing is under way; then nothing may be held either."""

    async def resting() -> bool:
        return bool((await pair.sidecar.ask_admin("/v1/stats")).json()["outstanding"] == 0)

    await until(resting)
    stats = (await pair.sidecar.ask_admin("/v1/stats")).json()
    assert (stats["content_bytes"], stats["unsettled"], stats["waiting"]) == (0, 0, 0)


def doubled(requests: list[Received]) -> list[tuple[bytes, int]]:
    """Keys under which more than one mail of one account was accepted."""
    mails = Counter(
        ((one.first("idempotency-key") or b"").strip(b' \t"'), tuple(one.every("authorization")))
        for one in requests
        if one.target.partition(b"?")[0].strip(b"/") == b"emails"
    )
    return [(key, count) for (key, _), count in mails.items() if count > 1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("C301", "C302", "C303")
async def test_requests_that_are_nearly_right_get_valid_answers_and_are_never_doubled(
    tmp_path: Path, session_store: RedisServer
) -> None:
    mutator = Mutator(SEED)
    statuses: Counter[int] = Counter()
    held: list[int] = []
    async with fuzzed(tmp_path, session_store.url) as pair:

        async def try_out(number: int) -> None:
            data = mutator.mutant(number)
            for _ in range(2):
                got = await exchange(pair, mutator.cuts(number, data))
                try:
                    read = answers(got)
                    assert 500 not in [one.status for one in read]
                    assert SECRET not in got
                except (ValueError, AssertionError) as exc:
                    exc.add_note(f"seed {SEED}, mutant {number}: {data[:3000]!r}\nanswered {got[:3000]!r}")
                    raise
                statuses.update(one.status for one in read)
            if number % 200 == 199:
                held.append(rss_bytes(pair.sidecar.pid))
                assert (await pair.sidecar.ask_admin("/livez")).status == 200

        await each(MUTANTS, try_out, WORKERS)
        await at_rest(pair)
        authority = b"127.0.0.1:%d" % pair.upstream.port
        for one in pair.upstream.begun:
            check_request(one.head, authority)
        assert pair.upstream.malformed == []
        assert [one.head for one in pair.upstream.begun if one.target == b"/emails" and not one.whole] == []
        assert doubled(pair.upstream.requests) == []
        # Some get through and some are refused, or it was no test.
        assert statuses[200] > MUTANTS / 10, statuses
        assert statuses[400] > MUTANTS / 10, statuses
        assert max(held[len(held) // 2 :]) - min(held[: len(held) // 2]) < 24 * MIB, held


def misread(seed: int) -> Behaviour:
    """Answers each request with the mutant that its field X-Number asks for, and perhaps hangs up."""

    async def act(turn: Turn) -> bool:
        assert turn.request is not None
        number = int(turn.request.first("x-number") or b"0")
        await turn.write(mutant_answer(seed, number))
        return number % 3 > 0

    return Behaviour(act)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("C304", "C305")
async def test_answers_that_are_nearly_right_reach_no_other_client_and_send_nothing_again(
    tmp_path: Path, session_store: RedisServer
) -> None:
    seen: Counter[str] = Counter()
    settled: dict[int, str] = {}
    async with fuzzed(tmp_path, session_store.url) as pair:
        pair.upstream.default = misread(SEED)

        async def asked(number: int, data: bytes) -> str:
            """What came for `data`: a status, a slug, or `cut`; nothing of it may be another's."""
            got = bytearray()
            async with await pair.client() as client:
                await client.send(data)
                await quiet(client, got, enough=True, silence_s=5)
            try:
                assert foreign(bytes(got), number) == []
                read = answers(bytes(got))
                assert len(read) <= 1
            except (ValueError, AssertionError) as exc:
                exc.add_note(
                    f"seed {SEED}, answer {number}: {mutant_answer(SEED, number)[:3000]!r}\nread {got[:3000]!r}"
                )
                raise
            if not read or not read[0].whole:
                return "cut"
            return "unknown" if b"outcome-unknown" in read[0].content else str(read[0].status)

        async def try_out(number: int) -> None:
            marked = [("X-Number", str(number)), ("Authorization", "Bearer one")]
            if number % 2:
                seen[await asked(number, request("GET", "/mail/domains", marked))] += 1
                return
            data = request("POST", "/mail/emails", marked, b"{}", key=mark(number))
            first = await asked(number, data)
            again = await asked(number, data)
            seen[first] += 1
            assert first != "cut"
            if first == "unknown" or first.startswith("2"):
                assert again == first, number
                settled[number] = first

        await each(MUTANTS // 2, try_out, WORKERS)
        await at_rest(pair)
        assert pair.upstream.malformed == []
        sent = Counter(int(one.first("x-number") or b"0") for one in pair.upstream.requests)
        # A connection that ends just then may leave one unknown that the upstream never saw.
        assert [number for number, first in settled.items() if sent[number] > 1] == []
        assert [number for number, first in settled.items() if first != "unknown" and sent[number] != 1] == []
        assert seen["200"] > MUTANTS / 20, seen
        assert seen["unknown"] > MUTANTS / 20, seen
