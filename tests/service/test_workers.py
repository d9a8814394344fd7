"""`workers: n`: several processes on one port are one system, and one of them may end at any time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Client,
    NoAnswerError,
    Parsed,
    RedisServer,
    Sidecar,
    duration,
    embedded,
    gate,
    scaled,
    slow,
    together,
    until,
)
from pair import Pair, post, running

STORES = ["redis", "embedded"]
TIMES = {"receive": duration(5), "connect": duration(1), "total": duration(6)}


@contextlib.asynccontextmanager
async def two_workers(directory: Path, store_url: str, **route: Any) -> AsyncIterator[Pair]:
    parts = {"workers": 2, "drain": duration(0.2)}
    async with running(directory, store_url, parts, **{"timeout": TIMES, **route}) as pair:
        yield pair


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path: Path, store: RedisServer) -> str:
    return store.url if request.param == "redis" else embedded(tmp_path)


def workers_of(sidecar: Sidecar) -> dict[int, int]:
    """Number and process of each worker that runs."""
    found = {}
    for pid in sidecar.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"sidecar.worker" in words:
                found[int(words[words.index(b"sidecar.worker") + 1])] = pid
    return found


def served_by(sidecar: Sidecar) -> Counter[int]:
    """How many requests each worker has logged."""
    return Counter(line["worker"] for line in sidecar.log_lines(event="request"))


async def all_serve(sidecar: Sidecar, count: int = 2) -> None:
    async def said() -> bool:
        return await sidecar.metric("sidecar_workers") == count

    await until(said, 20)


async def kill_worker(sidecar: Sidecar, number: int) -> None:
    os.kill(workers_of(sidecar)[number], signal.SIGKILL)


async def answers(clients: list[Client]) -> list[Parsed | None]:
    """What each gets, None where its connection ended without an answer; closes them."""

    async def one(client: Client) -> Parsed | None:
        try:
            return await client.answer(deadline_s=20)
        except (NoAnswerError, ConnectionError):
            return None
        finally:
            client.close()

    return await asyncio.gather(*map(one, clients))


# One system.


@pytest.mark.case("C700")
async def test_twins_on_many_connections_to_two_workers_are_one_mail(tmp_path: Path, store_url: str) -> None:
    async with two_workers(tmp_path, store_url, concurrent="wait", wait_limit="20s") as pair:
        pair.upstream.default = slow(0.3)
        got = await together(pair.sidecar.base, [post("twins")] * 200, deadline_s=30)
        assert pair.count == 1
        assert {(one.status, one.content) for one in got} == {(200, got[0].content)}
        assert sum(not one.replayed for one in got) == 1
        by = served_by(pair.sidecar)
        assert set(by) == {1, 2}
        assert min(by.values()) > 40, by
        assert await pair.sidecar.metric("sidecar_requests_total", outcome="replayed") == 199
        assert await pair.sidecar.metric("sidecar_requests_total", outcome="forwarded") == 1
        assert await pair.sidecar.metric("sidecar_request_seconds_count") == 200
        stats = (await pair.sidecar.ask_admin("/v1/stats")).json()
        assert (stats["sends"], stats["workers"], stats["outcomes"]["mail"]["replayed"]) == (200, 2, 199)
        assert await pair.sidecar.stop() == 0
        assert pair.sidecar.processes() == []


@pytest.mark.case("C701")
async def test_request_that_runs_in_a_worker_is_left_alone_by_the_operator(tmp_path: Path, store: RedisServer) -> None:
    async with two_workers(tmp_path, store.url) as pair:
        release = asyncio.Event()
        pair.upstream.default = gate(release)
        clients = [await pair.client() for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(post(f"runs {number}"))
        await pair.upstream.reached(6)
        listed = (await pair.sidecar.ask_admin("/v1/records?state=outstanding")).json()["records"]
        assert [one["runs_here"] for one in listed] == [True] * 6
        for one in listed:
            for change in ("forget", "resolve"):
                told = b'{"outcome":"not-sent"}' if change == "resolve" else b"{}"
                refused = await pair.sidecar.ask_admin(f"/v1/records/{one['id']}/{change}", "POST", told)
                assert (refused.status, refused.json()["type"].rpartition(":")[2]) == (409, "record-outstanding")
                assert "runs in this sidecar" in refused.json()["detail"]
        assert await pair.sidecar.metric("sidecar_outstanding") == 6
        release.set()
        assert [one.status for one in await answers(clients) if one] == [200] * 6
        shown = (await pair.sidecar.ask_admin(f"/v1/records/{listed[0]['id']}")).json()
        assert (shown["state"], shown["runs_here"]) == ("completed", False)


@pytest.mark.case("C702")
async def test_second_sidecar_on_the_port_of_workers_is_refused(tmp_path: Path, store: RedisServer) -> None:
    async with two_workers(tmp_path, store.url) as pair:
        second = Sidecar(tmp_path / "second", "")
        second.file.write_text(pair.sidecar.file.read_text().replace(str(pair.sidecar.admin_port), "0"))
        try:
            await second.run(ready=False)
            assert await second.wait_exit() == 1
        finally:
            await second.close()
        assert "in use" in second.log()
        assert second.processes() == []
        assert (await pair.send("unharmed")).status == 200


# A worker ends.


@pytest.mark.slow
@pytest.mark.case("C703")
async def test_killed_worker_costs_no_second_mail_and_comes_back(tmp_path: Path, store_url: str) -> None:
    async with two_workers(tmp_path, store_url, lease=duration(3)) as pair:
        release = asyncio.Event()
        pair.upstream.default = gate(release)
        clients = [await pair.client() for _ in range(24)]
        for number, client in enumerate(clients):
            await client.send(post(f"in flight {number}"))
        await pair.upstream.reached(24)
        killed = workers_of(pair.sidecar)[1]
        await kill_worker(pair.sidecar, 1)
        # Its listening sockets are served by the other one, at once.
        pair.upstream.default = slow(0.0)
        fresh = await together(pair.sidecar.base, [post(f"fresh {number}") for number in range(20)])
        assert [one.status for one in fresh] == [200] * 20
        ready = await pair.sidecar.ask_admin("/readyz")
        assert ready.status == 200
        release.set()
        got = await answers(clients)
        cut = [number for number, one in enumerate(got) if one is None]
        assert 0 < len(cut) < 24
        assert {one.status for one in got if one is not None} == {200}
        assert pair.count == 44
        await all_serve(pair.sidecar)
        assert workers_of(pair.sidecar)[1] != killed
        assert await pair.sidecar.metric("sidecar_worker_restarts") == 1
        told = [line for line in pair.sidecar.log_lines(event="worker", worker=1) if line["level"] == "error"]
        assert "signal 9" in told[0]["message"]

        async def lapsed() -> bool:
            return (await pair.send(f"in flight {cut[-1]}")).slug == "outcome-unknown"

        await until(lapsed, 10)
        again = [await pair.send(f"in flight {number}") for number in range(24)]
        assert [one.status for one in again] == [504 if number in cut else 200 for number in range(24)]
        assert pair.count == 44
        by = served_by(pair.sidecar)
        await together(pair.sidecar.base, [post(f"later {number}") for number in range(40)])
        assert (served_by(pair.sidecar) - by)[1] > 5
        assert pair.count == 84


@pytest.mark.case("C704")
async def test_sums_never_go_back_when_a_worker_ends(tmp_path: Path, store: RedisServer) -> None:
    names = ("sidecar_requests_total", "sidecar_request_seconds_count", "sidecar_request_seconds_sum")
    async with two_workers(tmp_path, store.url) as pair:

        async def sums() -> list[float]:
            return [await pair.sidecar.metric(name) for name in names]

        await together(pair.sidecar.base, [post(f"{number}") for number in range(30)])
        before = await sums()
        assert before[:2] == [30, 30]
        for number in (1, 2):
            await kill_worker(pair.sidecar, number)
            while await pair.sidecar.metric("sidecar_workers") != 2 or number not in workers_of(pair.sidecar):
                now = await sums()
                assert all(new >= old for new, old in zip(now, before, strict=True)), (before, now)
                before = now
        assert await sums() == before
        await together(pair.sidecar.base, [post(f"{number}") for number in range(30)])
        assert (await sums())[:2] == [60, 60]
        stats = (await pair.sidecar.ask_admin("/v1/stats")).json()
        assert (stats["sends"], stats["outcomes"]["mail"]) == (60, {"forwarded": 30, "replayed": 30})


@pytest.mark.slow
@pytest.mark.case("C705")
async def test_frozen_worker_is_named_and_holds_up_nobody(tmp_path: Path, store: RedisServer) -> None:
    async with two_workers(tmp_path, store.url) as pair:
        await together(pair.sidecar.base, [post(f"{number}") for number in range(20)])
        assert await pair.sidecar.metric("sidecar_requests_total") == 20
        frozen = workers_of(pair.sidecar)[2]
        os.kill(frozen, signal.SIGSTOP)
        try:

            async def named() -> bool:
                begin_s = time.monotonic()
                ready = await pair.sidecar.ask_admin("/readyz")
                metrics = await pair.sidecar.metric("sidecar_requests_total")
                assert time.monotonic() - begin_s < scaled(2.5)
                assert (ready.status, metrics) == (200, 20)
                return "worker 2: does not answer" in ready.json()["notes"]

            await until(named, 10)
            got = await together(pair.sidecar.base, [post(f"meanwhile {number}") for number in range(20)])
            assert [one.status for one in got] == [200] * 20
        finally:
            os.kill(frozen, signal.SIGCONT)
        await all_serve(pair.sidecar)
        assert await pair.sidecar.metric("sidecar_worker_restarts") == 0
        assert pair.count == 40
        assert await pair.sidecar.stop() == 0


# Signals.


@pytest.mark.case("C706")
async def test_drain_of_workers_loses_nothing(tmp_path: Path, store_url: str) -> None:
    async with two_workers(tmp_path, store_url) as pair:
        outcomes: list[int | str] = []

        async def application(number: int) -> None:
            turn = 0
            while True:
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
        await until(lambda: pair.count > 30)
        pair.sidecar.send_signal(signal.SIGTERM)
        assert await pair.sidecar.wait_exit() == 0
        await asyncio.gather(*working)
        assert set(outcomes) <= {200, 503}
        assert outcomes.count(200) == pair.count
        assert pair.sidecar.processes() == []
        assert pair.sidecar.log_lines(event="end")[0]["message"] == "everything is recorded"


@pytest.mark.case("C711")
async def test_worker_killed_within_the_drain_is_replaced_by_the_others_and_told(
    tmp_path: Path, store: RedisServer
) -> None:
    parts = {"workers": 2, "drain": duration(2)}
    async with running(tmp_path, store.url, parts, timeout=TIMES) as pair:
        pair.sidecar.send_signal(signal.SIGTERM)
        await until(lambda: pair.sidecar.log_lines(event="draining"))
        await kill_worker(pair.sidecar, 1)
        got = await together(pair.sidecar.base, [post(f"in the drain {number}") for number in range(20)])
        assert {(one.status, one.first("connection")) for one in got} == {(200, b"close")}
        assert await pair.sidecar.wait_exit() == 1
        assert pair.count == 20
        assert pair.sidecar.log_lines(event="worker", worker=1, level="error")
        assert pair.sidecar.processes() == []


@pytest.mark.case("C707")
async def test_ctrl_c_reaches_every_process_and_outstanding_mails_end(tmp_path: Path, store: RedisServer) -> None:
    async with two_workers(tmp_path, store.url) as pair:
        pair.upstream.default = slow(1.0)
        clients = [await pair.client() for _ in range(10)]
        for number, client in enumerate(clients):
            await client.send(post(f"outstanding {number}"))
        await pair.upstream.reached(10)
        # As a terminal does: the whole group at once.
        os.killpg(pair.sidecar.pid, signal.SIGINT)
        assert await pair.sidecar.wait_exit() == 0
        assert [one.status for one in await answers(clients) if one] == [200] * 10
        assert "Traceback" not in pair.sidecar.log()
        await pair.sidecar.run()
        assert [(await pair.send(f"outstanding {number}")).replayed for number in range(10)] == [True] * 10
        assert pair.count == 10


@pytest.mark.case("C707")
async def test_second_signal_ends_all_workers_now(tmp_path: Path, store: RedisServer) -> None:
    async with two_workers(tmp_path, store.url) as pair:
        never = asyncio.Event()
        pair.upstream.default = gate(never)
        clients = [await pair.client() for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(post(f"cut short {number}"))
        await pair.upstream.reached(6)
        pair.sidecar.send_signal(signal.SIGTERM)
        await until(lambda: pair.sidecar.log_lines(event="draining"))
        begin_s = time.monotonic()
        pair.sidecar.send_signal(signal.SIGTERM)
        assert await pair.sidecar.wait_exit() == 1
        assert time.monotonic() - begin_s < scaled(5)
        assert {(one.status, one.slug) for one in await answers(clients) if one} <= {(504, "outcome-unknown")}
        assert pair.sidecar.processes() == []
        await pair.sidecar.run()
        assert [(await pair.send(f"cut short {number}")).slug for number in range(6)] == ["outcome-unknown"] * 6
        assert pair.count == 6
        never.set()


@pytest.mark.case("C708")
async def test_reload_reaches_all_workers_and_those_that_start_later(tmp_path: Path, store: RedisServer) -> None:
    async with two_workers(tmp_path, store.url, ca="") as pair:
        sidecar = pair.sidecar
        good = sidecar.file.read_text()

        async def slugs() -> set[str]:
            got = await together(sidecar.base, [post(None)] * 24)
            return {one.slug for one in got}

        assert await slugs() == {""}
        sidecar.file.write_text(good.replace("    provider:", "    key: {missing: reject}\n    provider:"))
        sidecar.send_signal(signal.SIGHUP)
        await until(lambda: sidecar.log_lines(event="configuration", message="read again"))
        assert await slugs() == {"key-missing"}
        sidecar.file.write_text("routes: nonsense")
        sidecar.send_signal(signal.SIGHUP)
        await until(lambda: "stays as it is" in sidecar.log())
        assert await slugs() == {"key-missing"}
        before = workers_of(sidecar)
        for number in before:
            await kill_worker(sidecar, number)
            await until(lambda: workers_of(sidecar).get(number, before[number]) != before[number], 10)  # noqa: B023
            await all_serve(sidecar)
        assert await slugs() == {"key-missing"}
        assert len(sidecar.log_lines(event="configuration", message="read again")) == 1


# The supervisor ends.


@pytest.mark.slow
@pytest.mark.case("C709")
async def test_killed_supervisor_leaves_no_worker_and_the_port_free(tmp_path: Path, store_url: str) -> None:
    async with two_workers(tmp_path, store_url) as pair:
        release = asyncio.Event()
        pair.upstream.default = gate(release)
        clients = [await pair.client() for _ in range(10)]
        for number, client in enumerate(clients):
            await client.send(post(f"orphan {number}"))
        await pair.upstream.reached(10)
        workers = workers_of(pair.sidecar)
        await pair.sidecar.kill()

        async def refused() -> bool:
            with contextlib.suppress(OSError):
                (await pair.client()).close()
                return False
            return True

        await until(refused, 5)
        assert workers_of(pair.sidecar) == workers  # their mails run to the end
        release.set()
        assert [one.status for one in await answers(clients) if one] == [200] * 10
        await until(lambda: not workers_of(pair.sidecar), 10)
        if "embedded" not in store_url:
            assert pair.sidecar.processes() == []
        await pair.sidecar.run()
        again = [await pair.send(f"orphan {number}") for number in range(10)]
        assert [(one.status, one.replayed) for one in again] == [(200, True)] * 10
        assert pair.count == 10


@pytest.mark.case("C710")
async def test_start_is_given_up_where_a_worker_cannot_begin(tmp_path: Path, store: RedisServer) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'sidecar.worker' in sys.orig_argv:\n    os._exit(3)\n"
    )
    async with running(tmp_path, store.url, {"workers": 2}, env={"PYTHONPATH": _also(tmp_path)}, ready=False) as pair:
        assert await pair.sidecar.wait_exit() == 1
        told = [line for line in pair.sidecar.log().splitlines() if not line.startswith("{")]
        assert len(told) == 1
        assert "exited with status 3" in told[0]
        assert pair.sidecar.processes() == []


def _also(directory: Path) -> str:
    from harness.program import ROOT

    return os.pathsep.join((str(directory), str(ROOT)))
