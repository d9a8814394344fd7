"""`store_unavailable: forward`: sent without a reservation while the store is away, marked, and recorded later."""

from __future__ import annotations

import asyncio

import pytest
from harness import StoreProxy, gate, reset_after_content
from lab import AWAY, Lab, Settings, busy, fail, fresh, mend, times, unknown

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

FRONT = True
FORWARD = "/forward/emails"


def routes(lab: Lab) -> dict[str, Settings]:
    return {"forward": lab.route(timeout=times(total_s=8), store_unavailable="forward")}


@pytest.mark.case("C188")
@pytest.mark.parametrize("how", AWAY)
async def test_forward_sends_marked_and_counted_and_is_recorded_once_the_store_is_back(
    shared: Lab, store_front: StoreProxy, how: str
) -> None:
    key = fresh()
    counted = await shared.one.metric("sidecar_requests_total", outcome="unprotected")
    await fail(store_front, how)
    first = await shared.one.send(key, target=FORWARD)
    assert (first.status, first.first("idempotency-protected")) == (200, b"false")
    assert await shared.one.metric("sidecar_requests_total", outcome="unprotected") == counted + 1
    # This process's own flights still count.
    busy(await shared.one.send(key, target=FORWARD))
    await mend(shared, store_front)
    again = await shared.retry(shared.one, lambda one: one.status == 200, key, target=FORWARD)
    assert (again.replayed, again.content, again.first("idempotency-protected")) == (True, first.content, None)
    assert shared.count(key) == 1
    later = await shared.one.send(fresh(), target=FORWARD)
    assert (later.status, later.first("idempotency-protected")) == (200, None)


@pytest.mark.case("C188")
async def test_forwarded_twins_at_one_process_are_one_mail(shared: Lab, store_front: StoreProxy) -> None:
    key, opened = fresh(), asyncio.Event()
    await store_front.refuse()
    shared.upstream.script(gate(opened))
    asked = asyncio.create_task(shared.one.send(key, target=FORWARD))
    await shared.upstream.reached(1)
    busy(await shared.one.send(key, target=FORWARD))
    opened.set()
    assert (await asked).first("idempotency-protected") == b"false"
    assert shared.count(key) == 1


@pytest.mark.case("C188")
async def test_forwarded_and_lost_is_unknown_once_the_store_is_back(shared: Lab, store_front: StoreProxy) -> None:
    key = fresh()
    await store_front.refuse()
    shared.upstream.script(reset_after_content())
    unknown(await shared.one.send(key, target=FORWARD))
    await mend(shared, store_front)
    unknown(await shared.retry(shared.one, lambda one: one.status != 409, key, target=FORWARD))
    assert shared.count(key) == 1


@pytest.mark.case("C199")
@pytest.mark.parametrize("gap_s", [0, 0.2])
async def test_twins_that_arrive_before_the_store_is_given_up_on_are_one_mail(
    shared: Lab, store_front: StoreProxy, gap_s: float
) -> None:
    key = fresh()
    await store_front.refuse()
    first = asyncio.create_task(shared.one.send(key, target=FORWARD))
    await asyncio.sleep(gap_s)
    second = asyncio.create_task(shared.one.send(key, target=FORWARD))
    answers = await asyncio.gather(first, second)
    assert sorted(answer.status for answer in answers) in ([200, 200], [200, 409])
    assert shared.count(key) == 1
