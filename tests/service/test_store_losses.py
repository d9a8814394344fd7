"""A store that restarts, forgets, is full, or serves nobody for now: the same process never sends twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
from harness import Parsed, ReplyError, Sidecar, answer, gate, reset_after_content, scaled, until
from harness.behaviours import Behaviour
from lab import LEASE_S, STORE_TIMEOUT_S, Lab, away, busy, elapsed, fresh, stored, times, unknown

pytest_plugins = ("lab_fixtures",)


async def start(lab: Lab) -> None:
    await lab.sidecar({"mail": lab.route(timeout=times(total_s=8)), "resend": lab.route("resend")})


def ask(sidecar: Sidecar, key: str) -> asyncio.Task[Parsed]:
    return asyncio.create_task(sidecar.send(key))


async def in_flight(lab: Lab, key: str, opened: asyncio.Event, then: Behaviour | None = None) -> asyncio.Task[Parsed]:
    lab.upstream.script(gate(opened, then))
    count = lab.upstream.count
    asked = ask(lab.one, key)
    await lab.upstream.reached(count + 1)
    return asked


def configure(lab: Lab, name: str, value: str) -> None:
    assert lab.store.command("CONFIG", "SET", name, value) == b"OK"


# Forgetting.


@pytest.mark.case("C189")
async def test_flush_during_a_flight_makes_the_same_process_send_nothing_twice(lab: Lab) -> None:
    await start(lab)
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened)
    lab.store.flush()
    for _ in range(3):
        busy(await lab.one.send(key))
    opened.set()
    first = await asked
    assert first.status == 200
    stored(first, await lab.one.send(key))
    lab.store.flush()
    assert lab.count(key) == 1


@pytest.mark.case("C189")
@pytest.mark.parametrize(
    ("then", "state"), [(answer(200), "completed"), (reset_after_content(), "unknown"), (answer(503), "")]
)
async def test_outcome_of_a_flight_whose_record_was_flushed_is_put_back(lab: Lab, then: Behaviour, state: str) -> None:
    await start(lab)
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened, then)
    lab.store.flush()
    opened.set()
    first = await asked
    assert lab.state(key) == state
    if state == "completed":
        stored(first, await lab.one.send(key))
    elif state == "unknown":
        unknown(await lab.one.send(key))
    assert lab.count(key) == 1


@pytest.mark.case("C189")
async def test_flushed_record_of_a_running_flight_stands_again_for_other_processes_after_a_renewal(lab: Lab) -> None:
    await start(lab)
    await lab.sidecar({"mail": lab.route(timeout=times(total_s=8))})
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened)
    lab.store.flush()
    await lab.until_state(key, "outstanding", LEASE_S)
    busy(await lab.two.send(key))
    assert lab.one.log_lines(event="record-restored")
    opened.set()
    stored(await asked, await lab.two.send(key))
    assert lab.count(key) == 1


@pytest.mark.case("C190")
async def test_flushed_scripts_are_not_noticed(lab: Lab) -> None:
    await start(lab)
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened)
    lab.store.command("SCRIPT", "FLUSH")
    busy(await lab.one.send(key))
    opened.set()
    first = await asked
    stored(first, await lab.one.send(key))
    lab.store.command("SCRIPT", "FLUSH")
    assert (await lab.one.send(fresh())).status == 200
    for then, state in ((answer(429), ""), (reset_after_content(), "unknown")):
        other = fresh()
        opened = asyncio.Event()
        asked = await in_flight(lab, other, opened, then)
        lab.store.command("SCRIPT", "FLUSH")
        opened.set()
        assert (await asked).status in (429, 504)
        assert lab.state(other) == state


# Ending and coming back.


@pytest.mark.case("C191")
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_store_that_restarts_during_a_flight_gets_its_outcome_and_forgets_nothing(lab: Lab, how: str) -> None:
    await start(lab)
    before, key, opened = fresh(), fresh(), asyncio.Event()
    done = await lab.one.send(before)
    asked = await in_flight(lab, key, opened)
    lab.store.kill() if how == "killed" else lab.store.stop()
    busy(await lab.one.send(key))
    away(await lab.one.send(fresh()))
    opened.set()
    first = await asked
    assert first.status == 200
    await asyncio.to_thread(lab.store.start)
    stored(first, await lab.retry(lab.one, lambda one: one.status == 200, key))
    stored(done, await lab.one.send(before))
    assert (lab.count(key), lab.count(before)) == (1, 1)


@pytest.mark.case("C191")
async def test_frozen_store_holds_up_nobody_longer_than_its_timeout(lab: Lab) -> None:
    await start(lab)
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened)
    lab.store.pause()
    begin_s = time.monotonic()
    away(await lab.one.send(fresh()))
    assert (await lab.one.send(None)).status == 200
    opened.set()
    first = await asked
    assert first.status == 200
    assert time.monotonic() - begin_s < scaled(3 * STORE_TIMEOUT_S + 0.5)
    lab.store.resume()
    stored(first, await lab.retry(lab.one, lambda one: one.status == 200, key))
    assert (await lab.retry(lab.one, lambda one: one.status == 200, fresh())).status == 200
    assert lab.count(key) == 1


@pytest.mark.case("C191")
async def test_store_that_is_absent_at_the_start_is_served_once_it_is_there(lab: Lab) -> None:
    lab.store.stop()
    begin_s = time.monotonic()
    one = await lab.sidecar(ready=False)

    async def open_port() -> bool:
        with contextlib.suppress(OSError):
            return (await one.ask_admin("/livez")).status == 200
        return False

    await until(open_port)
    assert time.monotonic() - begin_s < scaled(3.0)
    key = fresh()
    away(await one.send(key))
    assert (await one.ask_admin("/readyz")).status == 503
    assert (await one.send(None)).status == 200
    await asyncio.to_thread(lab.store.start)
    await one.ready()
    assert (await one.send(key)).status == 200
    assert lab.count(key) == 1


@pytest.mark.case("C191")
async def test_store_that_loads_a_large_file_serves_nobody_until_it_has(lab: Lab) -> None:
    await start(lab)
    before = fresh()
    done = await lab.one.send(before)
    for number in range(300):
        lab.store.command("SET", f"ballast:{number}", "x", "PX", 600_000)
    lab.store.command("BGREWRITEAOF")

    def rewritten() -> bool:
        information = lab.store.command("INFO", "persistence")
        assert isinstance(information, bytes)
        return b"aof_rewrite_in_progress:0" in information and b"aof_rewrite_scheduled:0" in information

    await until(rewritten)
    lab.store.kill()
    # So many microseconds a key: loading takes a second or so.
    lab.store.options |= {"key-load-delay": "5000", "loading-process-events-interval-bytes": "1024"}
    loading = asyncio.create_task(asyncio.to_thread(lab.store.start))
    seen = False
    while not loading.done():
        key = fresh()
        given = await lab.one.send(key)
        if given.status == 503:
            away(given)
            assert lab.count(key) == 0
        reasons = (await lab.one.ask_admin("/readyz")).json()["reasons"]
        seen = seen or any("loading" in reason.lower() for reason in reasons)
    await loading
    assert seen, "the reason was never told"
    key = fresh()
    begin_s = time.monotonic()
    assert (await lab.retry(lab.one, lambda one: one.status == 200, key)).status == 200
    assert time.monotonic() - begin_s < scaled(2.0)
    assert lab.count(key) == 1
    stored(done, await lab.one.send(before))


# There, and serving nobody for now.


async def refused_writes(lab: Lab, *words: str, back: tuple[str, ...], reason: str, replays: bool = True) -> None:
    """`words` make the server refuse writes, `back` mends it; nothing is sent, replays go on, what runs is recorded."""
    await start(lab)
    before, key, opened = fresh(), fresh(), asyncio.Event()
    done = await lab.one.send(before)
    asked = await in_flight(lab, key, opened)
    count = lab.upstream.count
    lab.store.command(*words)
    new = fresh()
    for _ in range(2):
        away(await lab.one.send(new))
    assert lab.upstream.count == count

    async def told() -> bool:
        given = await lab.one.ask_admin("/readyz")
        return given.status == 503 and reason in str(given.json()["reasons"])

    await until(told, what=f"/readyz names {reason}")
    again = await lab.one.send(before)
    stored(done, again) if replays else away(again)
    begin_s = time.monotonic()
    await elapsed(begin_s, LEASE_S + 0.2)
    busy(await lab.one.send(key))
    opened.set()
    first = await asked
    assert first.status == 200
    busy(await lab.one.send(key))
    lab.store.command(*back)
    stored(first, await lab.retry(lab.one, lambda one: one.status == 200, key))
    assert (await lab.retry(lab.one, lambda one: one.status == 200, new)).status == 200
    assert (lab.count(key), lab.count(new), lab.count(before)) == (1, 1, 1)
    await lab.one.ready()


@pytest.mark.case("C192")
async def test_full_store_refuses_new_keys_and_replays_renews_and_frees_old_ones(lab: Lab) -> None:
    await refused_writes(lab, "CONFIG", "SET", "maxmemory", "1", back=("CONFIG", "SET", "maxmemory", "0"), reason="OOM")


@pytest.mark.case("C192")
async def test_read_only_replica_refuses_new_keys_until_it_is_a_primary_again(lab: Lab) -> None:
    """A demoted primary may lag behind the new one, so it is not asked for replays either."""
    back = ("REPLICAOF", "NO", "ONE")
    await refused_writes(lab, "REPLICAOF", "127.0.0.1", "1", back=back, reason="READONLY", replays=False)


@pytest.mark.case("C192")
async def test_primary_without_enough_replicas_refuses_new_keys(lab: Lab) -> None:
    await refused_writes(
        lab,
        "CONFIG",
        "SET",
        "min-replicas-to-write",
        "1",
        back=("CONFIG", "SET", "min-replicas-to-write", "0"),
        reason="NOREPLICAS",
    )


@pytest.mark.case("C193")
async def test_full_store_still_renews_so_that_other_processes_find_a_flight_outstanding(lab: Lab) -> None:
    await start(lab)
    await lab.sidecar({"mail": lab.route(timeout=times(total_s=8))})
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened, answer(503))
    configure(lab, "maxmemory", "1")
    begin_s = time.monotonic()
    for after_s in (1.2 * LEASE_S, 1.8 * LEASE_S):
        await elapsed(begin_s, after_s)
        busy(await lab.two.send(key))
    # A release needs no memory either.
    opened.set()
    assert (await asked).status == 503
    assert lab.state(key) == ""
    configure(lab, "maxmemory", "0")
    assert (await lab.two.send(key)).status == 200
    assert lab.count(key) == 2


@pytest.mark.case("C193")
@pytest.mark.parametrize(("then", "status"), [(reset_after_content(), 504), (answer(201), 201)], ids=["lost", "2xx"])
async def test_outcome_that_a_full_store_cannot_take_is_told_when_it_can(
    lab: Lab, then: Behaviour, status: int
) -> None:
    await start(lab)
    await lab.sidecar({"mail": lab.route(timeout=times(total_s=8))})
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened, then)
    configure(lab, "maxmemory", "1")
    opened.set()
    first = await asked
    assert first.status == status
    begin_s = time.monotonic()
    await elapsed(begin_s, LEASE_S + 0.2)
    busy(await lab.one.send(key))
    given = await lab.two.send(key)
    assert given.status in (409, 504)
    configure(lab, "maxmemory", "0")
    await lab.until_state(key, "completed" if status == 201 else "unknown")
    again = await lab.two.send(key)
    stored(first, again) if status == 201 else unknown(again)
    assert lab.count(key) == 1


@pytest.mark.case("C192")
async def test_store_busy_with_a_foreign_script_is_away_for_as_long(lab: Lab) -> None:
    await start(lab)
    configure(lab, "busy-reply-threshold", "10")
    key, opened = fresh(), asyncio.Event()
    asked = await in_flight(lab, key, opened)

    def spin() -> None:
        with contextlib.suppress(ReplyError, OSError):
            lab.store.command("EVAL", "while true do end", 0, deadline_s=20)

    spinning = asyncio.create_task(asyncio.to_thread(spin))
    new = fresh()
    await until(lambda: not spinning.done())
    away(await lab.retry(lab.one, lambda one: one.status == 503, new))
    opened.set()
    first = await asked
    assert first.status == 200
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(lab.store.path))
        other.sendall(b"SCRIPT KILL\r\n")
        assert other.recv(100) == b"+OK\r\n"
    await spinning
    stored(first, await lab.retry(lab.one, lambda one: one.status == 200, key))
    assert (await lab.retry(lab.one, lambda one: one.status == 200, new)).status == 200
    assert (lab.count(key), lab.count(new)) == (1, 1)
