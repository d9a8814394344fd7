"""Owners that sleep past their lease free nothing, prolong nothing, send nothing late; what they know is added."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio
import trustme
from harness import (
    Parsed,
    RedisServer,
    Sidecar,
    StoreProxy,
    Upstream,
    answer,
    duration,
    gate,
    reset_after_content,
    until,
)
from lab import Lab, Settings, busy, elapsed, fresh, problem, stored, times, unknown

pytest_plugins = ("lab_fixtures",)

TIMEOUT_S = 0.3
LEASE_S = 1.0
STORE = {"timeout": duration(TIMEOUT_S)}
RESEND = "/resend/emails"


def routes(lab: Lab, upstream: str = "", ca: str = "") -> dict[str, Settings]:
    # Time-outs that outlast a nap: what is tried here is the lease.
    patient = {"lease": duration(LEASE_S), "timeout": times(total_s=20, connect_s=20)}
    where = {"upstream": upstream, "ca": ca} if upstream else {}
    return {"mail": lab.route(**patient, **where), "resend": lab.route("resend", **patient, **where)}


@pytest_asyncio.fixture
async def pair(lab: Lab) -> Lab:
    """Two sidecars on one store and one upstream."""
    await asyncio.gather(*(lab.sidecar(routes(lab), store=STORE) for _ in range(2)))
    return lab


def ask(sidecar: Sidecar, key: str, target: str = "/mail/emails") -> asyncio.Task[Parsed]:
    return asyncio.create_task(sidecar.send(key, target=target, deadline_s=20))


async def past_the_lease(lab: Lab, key: str) -> None:
    """Wait until the lease of a sleeping owner is over, by the store's clock."""
    name = lab.name(key)
    hold_ms, lease_ms = int(lab.field(name, "hold")), int(lab.field(name, "lease"))
    await until(lambda: lab.left_ms(name) < hold_ms - lease_ms - 50, what="the lease is over")


async def asleep(lab: Lab, key: str, target: str, opened: asyncio.Event, *then: object) -> asyncio.Task[Parsed]:
    """A first attempt whose owner sleeps past its lease while the upstream has its request; `then` answers it."""
    lab.upstream.script(gate(opened, *then))  # type: ignore[arg-type]  # at most one behaviour
    asked = ask(lab.one, key, target)
    await lab.upstream.reached(1)
    lab.one.pause()
    await past_the_lease(lab, key)
    return asked


@pytest.mark.case("C178")
async def test_sleeping_owner_is_unknown_under_hold_and_its_late_success_is_the_answer(pair: Lab) -> None:
    key, opened = fresh(), asyncio.Event()
    asked = await asleep(pair, key, "/mail/emails", opened)
    unknown(await pair.two.send(key))
    opened.set()
    pair.one.resume()
    first = await asked
    assert (first.status, first.replayed) == (200, False)
    stored(first, await pair.two.send(key))
    assert pair.count(key) == 1


@pytest.mark.case("C178")
async def test_owner_that_wakes_renews_and_is_outstanding_again(pair: Lab) -> None:
    key, opened = fresh(), asyncio.Event()
    asked = await asleep(pair, key, "/mail/emails", opened)
    unknown(await pair.two.send(key))
    pair.one.resume()
    busy(await pair.retry(pair.two, lambda one: one.status == 409, key))
    opened.set()
    first = await asked
    stored(first, await pair.two.send(key))
    assert pair.count(key) == 1


@pytest.mark.case("C179")
async def test_success_of_a_former_owner_completes_the_record_though_another_attempt_runs(pair: Lab) -> None:
    key, first_open, second_open = fresh(), asyncio.Event(), asyncio.Event()
    asked = await asleep(pair, key, RESEND, first_open)
    pair.upstream.script(gate(second_open))
    second = ask(pair.two, key, RESEND)
    await pair.upstream.reached(2)
    busy(await pair.two.send(key, target=RESEND))
    first_open.set()
    pair.one.resume()
    first = await asked
    assert (first.status, first.json()["id"]) == (200, "upstream-1")
    stored(first, await pair.one.send(key, target=RESEND))
    second_open.set()
    # The second attempt's client gets its own answer; the record keeps the first one recorded.
    assert (await second).json()["id"] == "upstream-2"
    stored(first, await pair.two.send(key, target=RESEND))
    assert await pair.two.metric("sidecar_leases_lost_total", route="resend") == 1
    assert pair.two.log_lines(event="lease-lost")
    assert [one.first("idempotency-key") for one in pair.upstream.requests] == 2 * [key.encode()]


@pytest.mark.case("C180")
async def test_free_answer_of_a_former_owner_frees_nothing(pair: Lab) -> None:
    key, first_open, second_open = fresh(), asyncio.Event(), asyncio.Event()
    asked = await asleep(pair, key, RESEND, first_open, answer(429))
    pair.upstream.script(gate(second_open))
    second = ask(pair.two, key, RESEND)
    await pair.upstream.reached(2)
    first_open.set()
    pair.one.resume()
    assert (await asked).status == 429
    busy(await pair.one.send(key, target=RESEND))
    busy(await pair.two.send(key, target=RESEND))
    second_open.set()
    given = await second
    stored(given, await pair.one.send(key, target=RESEND))
    assert pair.count(key) == 2
    assert await pair.one.metric("sidecar_leases_lost_total", route="resend") == 1


@pytest.mark.case("C180")
async def test_loss_of_a_former_owner_changes_no_completed_record(pair: Lab) -> None:
    key, opened = fresh(), asyncio.Event()
    asked = await asleep(pair, key, RESEND, opened, reset_after_content())
    given = await pair.two.send(key, target=RESEND)
    assert given.status == 200
    opened.set()
    pair.one.resume()
    unknown(await asked)
    stored(given, await pair.one.send(key, target=RESEND))
    assert pair.count(key) == 2


@pytest.mark.case("C179")
@pytest.mark.parametrize("status", [429, 503])
async def test_success_of_a_former_owner_settles_what_a_later_refusal_left_unknown(pair: Lab, status: int) -> None:
    key, opened = fresh(), asyncio.Event()
    asked = await asleep(pair, key, RESEND, opened)
    pair.upstream.script(answer(status))
    assert (await pair.two.send(key, target=RESEND)).status == status
    assert pair.state(key) == "unknown"
    opened.set()
    pair.one.resume()
    first = await asked
    assert first.status == 200
    stored(first, await pair.two.send(key, target=RESEND))
    assert pair.count(key) == 2


@pytest.mark.case("C178")
async def test_pause_shorter_than_the_lease_is_not_noticed(pair: Lab) -> None:
    key, opened = fresh(), asyncio.Event()
    pair.upstream.script(gate(opened))
    asked = ask(pair.one, key)
    await pair.upstream.reached(1)
    pair.one.pause()
    begin_s = time.monotonic()
    busy(await pair.two.send(key))
    await elapsed(begin_s, 0.4 * LEASE_S)
    pair.one.resume()
    await elapsed(begin_s, 1.5 * LEASE_S)
    busy(await pair.two.send(key))
    opened.set()
    stored(await asked, await pair.two.send(key))
    assert pair.count(key) == 1


# The fence: the owner sleeps after its reservation and before its first byte.


@dataclass
class Far:
    """A TLS upstream, and a front before it that can hold the handshake."""

    upstream: Upstream
    front: StoreProxy
    lab: Lab


@pytest_asyncio.fixture
async def far(lab: Lab, tmp_path: Path) -> AsyncIterator[Far]:
    """The first sidecar reaches upstream and store through fronts, the second one directly."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    upstream = await Upstream.start(tls=context)
    front = await StoreProxy.start(cast(RedisServer, upstream))
    store_front = await lab.front()
    try:
        await asyncio.gather(
            lab.sidecar(routes(lab, f"https://127.0.0.1:{front.port}", str(ca)), front=store_front, store=STORE),
            lab.sidecar(routes(lab, upstream.url, str(ca)), store=STORE),
        )
        yield Far(upstream, front, lab)
    finally:
        await front.stop()
        await upstream.stop()


async def before_its_first_byte(far: Far, key: str, target: str = "/mail/emails") -> asyncio.Task[Parsed]:
    """The first sidecar owns the record, hangs in the TLS handshake, and sleeps past its lease."""
    far.front.freeze()
    asked = ask(far.lab.one, key, target)
    await far.lab.until_state(key, "outstanding")
    await until(lambda: far.front.connections == 1)
    far.lab.one.pause()
    await past_the_lease(far.lab, key)
    return asked


def wake(far: Far) -> None:
    far.front.thaw()
    far.lab.one.resume()


@pytest.mark.case("C181")
async def test_owner_asleep_before_its_first_byte_renews_and_sends_where_the_key_is_still_its_own(far: Far) -> None:
    key = fresh()
    asked = await before_its_first_byte(far, key)
    unknown(await far.lab.two.send(key))
    wake(far)
    first = await asked
    assert first.status == 200
    stored(first, await far.lab.two.send(key))
    assert far.upstream.count == 1


@pytest.mark.case("C182")
async def test_owner_asleep_before_its_first_byte_sends_nothing_where_the_key_was_freed_and_used(far: Far) -> None:
    key = fresh()
    asked = await before_its_first_byte(far, key)
    # The operator looked at the provider, found no mail, and freed the key.
    far.lab.store.command("DEL", far.lab.name(key))
    given = await far.lab.two.send(key)
    assert given.status == 200
    wake(far)
    unknown(await asked)
    assert far.upstream.count == 1
    stored(given, await far.lab.one.send(key))


@pytest.mark.case("C182")
async def test_owner_asleep_before_its_first_byte_sends_nothing_where_another_attempt_went_on(far: Far) -> None:
    key = fresh()
    asked = await before_its_first_byte(far, key, RESEND)
    given = await far.lab.two.send(key, target=RESEND)
    assert given.status == 200
    wake(far)
    unknown(await asked)
    stored(given, await far.lab.one.send(key, target=RESEND))
    assert far.upstream.count == 1


@pytest.mark.case("C182")
async def test_owner_asleep_before_its_first_byte_sends_nothing_where_it_cannot_ask(far: Far) -> None:
    key = fresh()
    asked = await before_its_first_byte(far, key)
    (store_front,) = far.lab.fronts
    await store_front.refuse()
    wake(far)
    problem(await asked, "upstream-unreachable", 502, sent="no")
    assert far.upstream.count == 0
    await store_front.accept()
    # The release is told as soon as the store is back: the key is free, not unknown.
    await far.lab.until_state(key, "")
    assert (await far.lab.two.send(key)).status == 200
    assert far.upstream.count == 1


@pytest.mark.case("C183")
async def test_attempt_whose_window_ends_while_it_connects_is_not_sent(lab: Lab, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    upstream = await Upstream.start(tls=context)
    front = await StoreProxy.start(cast(RedisServer, upstream))
    try:
        window = {"field": "Idempotency-Key", "window": duration(1 + LEASE_S + 0.5), "twins": "guarded"}
        route = lab.route(
            lease=duration(LEASE_S),
            timeout=times(total_s=0.5, connect_s=10),
            upstream=f"https://127.0.0.1:{front.port}",
            ca=str(ca),
            native=window,
        )
        await lab.sidecar({"mail": route}, store=STORE)
        key, begin_s = fresh(), time.monotonic()
        upstream.script(reset_after_content())
        unknown(await lab.one.send(key))
        front.freeze()
        asked = ask(lab.one, key)
        await lab.until_state(key, "outstanding")
        await elapsed(begin_s, 1.2)
        front.thaw()
        unknown(await asked)
        assert upstream.count == 1
        unknown(await lab.one.send(key))
        assert upstream.count == 1
    finally:
        await front.stop()
        await upstream.stop()
