"""The end of a process: what is outstanding ends and is recorded, what still comes is served or refused."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from harness import Client, NoAnswerError, Parsed, RedisServer, duration, gate, request, scaled, slow, until
from pair import Pair, post, running

TIMES = {"receive": duration(5), "connect": duration(1), "total": duration(6)}


@contextlib.asynccontextmanager
async def draining(
    tmp_path: Path, store: RedisServer, drain_s: float, times: dict[str, str] = TIMES
) -> AsyncIterator[Pair]:
    async with running(tmp_path, store.url, {"drain": duration(drain_s)}, timeout=times) as pair:
        yield pair


async def not_ready(pair: Pair) -> None:
    """Until the signal has been seen."""

    async def gone() -> bool:
        answer = await pair.sidecar.ask_admin("/readyz")
        return answer.status == 503 and "draining" in answer.json()["reasons"][0]

    await until(gone)


@pytest.mark.case("C268")
async def test_application_that_still_sends_is_served_throughout_the_drain(tmp_path: Path, store: RedisServer) -> None:
    async with draining(tmp_path, store, 1.0) as pair, await pair.client() as standing:
        assert (await standing.ask(post("before"))).first("connection") is None
        begin_s = time.monotonic()
        pair.sidecar.send_signal(signal.SIGTERM)
        await not_ready(pair)
        assert (await pair.sidecar.ask_admin("/livez")).status == 200
        sent = 0
        while time.monotonic() - begin_s < scaled(0.8):
            got = await pair.ask(post(f"during {sent}"))
            assert (got.status, got.first("connection")) == (200, b"close")
            sent += 1
            await asyncio.sleep(scaled(0.1))
        assert (await standing.ask(post("before"))).replayed
        assert await standing.rest() == b""
        assert await pair.sidecar.wait_exit() == 0
        took_s = time.monotonic() - begin_s
        assert scaled(1.0) <= took_s < scaled(3.5)
        assert (sent >= 4, pair.count) == (True, sent + 1)
        with pytest.raises(OSError, match=r"refused|Connect"):
            await Client.open(pair.sidecar.base)


@pytest.mark.case("C268")
async def test_no_request_of_a_busy_application_is_cut_or_doubled(tmp_path: Path, store: RedisServer) -> None:
    """Every request gets a whole answer, or its connection is refused: nothing that was taken ends without one."""
    async with draining(tmp_path, store, 0.3) as pair:
        outcomes: list[int | str] = []
        stop = asyncio.Event()

        async def application(number: int) -> None:
            turn = 0
            while not stop.is_set():
                try:
                    client = await pair.client()
                except ConnectionError:
                    return
                try:
                    outcomes.append((await client.ask(post(f"busy {number}-{turn}"))).status)
                except (NoAnswerError, ConnectionError) as exc:
                    outcomes.append(f"cut: {exc}")
                client.close()
                turn += 1

        working = [asyncio.create_task(application(number)) for number in range(8)]
        await until(lambda: pair.count > 20)
        pair.sidecar.send_signal(signal.SIGTERM)
        assert await pair.sidecar.wait_exit() == 0
        stop.set()
        await asyncio.gather(*working)
        assert set(outcomes) <= {200, 503}
        assert outcomes.count(200) == pair.count


@pytest.mark.case("C269")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_outstanding_mail_ends_and_is_recorded_before_the_exit(
    tmp_path: Path, store: RedisServer, number: signal.Signals
) -> None:
    async with draining(tmp_path, store, 0.2) as pair:
        pair.upstream.script(slow(1.0))
        sending = asyncio.create_task(pair.ask(post("outstanding")))
        await pair.upstream.reached(1)
        pair.sidecar.send_signal(number)
        assert await pair.sidecar.wait_exit() == 0
        first = await sending
        assert (first.status, first.first("connection")) == (200, b"close")
        await pair.sidecar.run()
        again = await pair.ask(post("outstanding"))
        assert (again.status, again.replayed, again.content, pair.count) == (200, True, first.content, 1)


@pytest.mark.case("C269")
async def test_outstanding_mail_of_a_client_that_left_is_recorded_before_the_exit(
    tmp_path: Path, store: RedisServer
) -> None:
    async with draining(tmp_path, store, 0.1) as pair:
        pair.upstream.script(slow(1.0))
        client = await pair.client()
        await client.send(post("left behind"))
        await pair.upstream.reached(1)
        client.abort()
        assert await pair.sidecar.stop() == 0
        await pair.sidecar.run()
        assert ((await pair.ask(post("left behind"))).replayed, pair.count) == (True, 1)


@pytest.mark.case("C270")
async def test_sigint_skips_the_drain(tmp_path: Path, store: RedisServer) -> None:
    async with draining(tmp_path, store, 30.0) as pair:
        assert (await pair.send("before")).status == 200
        begin_s = time.monotonic()
        assert await pair.sidecar.stop(signal.SIGINT) == 0
        assert time.monotonic() - begin_s < scaled(3)


@pytest.mark.case("C270")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_ends_it_now_and_what_was_sent_is_unknown(
    tmp_path: Path, store: RedisServer, second: signal.Signals
) -> None:
    async with draining(tmp_path, store, 30.0) as pair:
        never = asyncio.Event()
        pair.upstream.script(gate(never))
        sending = asyncio.create_task(_either(pair, "cut short"))
        await pair.upstream.reached(1)
        pair.sidecar.send_signal(signal.SIGTERM)
        await not_ready(pair)
        begin_s = time.monotonic()
        pair.sidecar.send_signal(second)
        assert await pair.sidecar.wait_exit() == 1
        assert time.monotonic() - begin_s < scaled(4)
        cut = await sending
        assert cut is None or (cut.status, cut.slug) == (504, "outcome-unknown")
        assert "Traceback" not in pair.sidecar.log()
        await pair.sidecar.run()
        again = await pair.ask(post("cut short"))
        assert (again.status, again.slug, pair.count) == (504, "outcome-unknown", 1)
        never.set()


async def _either(pair: Pair, key: str) -> Parsed | None:
    """The answer, or None where the connection ended without one."""
    with contextlib.suppress(NoAnswerError):
        return await pair.ask(post(key))
    return None


@pytest.mark.case("C271")
async def test_idle_connections_do_not_hold_up_the_end(tmp_path: Path, store: RedisServer) -> None:
    async with draining(tmp_path, store, 0.1, {**TIMES, "receive": duration(1)}) as pair:
        idle = [await pair.client() for _ in range(5)]
        assert (await idle[0].ask(request("GET", "/mail/x"))).status == 200
        await idle[1].send(post("half a mail")[:-10])
        begin_s = time.monotonic()
        pair.sidecar.send_signal(signal.SIGTERM)
        code = await pair.sidecar.wait_exit()
        # The grace period that `check` prints: drain, timeout.total and 5 s.
        assert (code, time.monotonic() - begin_s < scaled(0.1 + 6 + 5)) == (0, True)
        assert (pair.count, pair.upstream.begun[1:]) == (1, [])
        for client in idle:
            client.close()


@pytest.mark.case("C271")
async def test_store_that_is_away_at_the_end_makes_the_exit_code_one(
    tmp_path: Path, private_store: RedisServer
) -> None:
    async with running(tmp_path, private_store.url, {"drain": duration(0.1)}, timeout=TIMES, lease=duration(3)) as pair:
        pair.upstream.script(slow(0.5))
        sending = asyncio.create_task(pair.ask(post("unrecorded")))
        await pair.upstream.reached(1)
        private_store.stop()
        assert (await sending).status == 200
        begin_s = time.monotonic()
        pair.sidecar.send_signal(signal.SIGTERM)
        assert await pair.sidecar.wait_exit() == 1
        assert time.monotonic() - begin_s < scaled(8)
        end = pair.sidecar.log_lines(event="end")
        assert end[0]["message"].startswith("1 ")
