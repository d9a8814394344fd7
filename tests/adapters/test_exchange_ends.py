"""The owner's part where it goes wrong: a late owner, a fault of ours, the end of the process, and too much content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from exchange_lab import GUARDED, UNKNOWN, UNREACHABLE, Lab, lab_on, told
from harness import RedisServer, StoreProxy, Upstream, answer, chunked, gate, scaled, stall, until
from harness.stores import RESEND, claim, lapse, rival

from sidecar.config import Retry
from sidecar.errors import Outcome, Sent, StoreError
from sidecar.exchange import Reply, Sending
from sidecar.flights import running_s
from sidecar.metrics import Metrics
from sidecar.record import Completed, Found, Held, Reserved
from sidecar.upstream import Fence, Incoming, Outgoing
from sidecar.upstream import Upstream as Sender


@pytest.fixture
async def lab(store: RedisServer, upstream: Upstream) -> AsyncIterator[Lab]:
    async with lab_on(store.url, upstream) as made:
        yield made


@pytest.fixture
async def faulty(front: StoreProxy, upstream: Upstream) -> AsyncIterator[Lab]:
    """With the front before the store."""
    async with lab_on(front.url, upstream) as made:
        yield made


# The fence.


class Late(Sender):
    """Is held up before the first byte until `passed` is set; `at_fence`: it has got there."""

    at_fence: asyncio.Event
    passed: asyncio.Event

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.at_fence, self.passed = asyncio.Event(), asyncio.Event()

    async def send(self, outgoing: Outgoing, *, fence: Fence | None = None, whole: bool = True) -> Incoming:
        self.at_fence.set()
        await self.passed.wait()
        return await super().send(outgoing, fence=fence, whole=whole)


async def held_up(lab: Lab, sending: Sending) -> tuple[Late, asyncio.Task[Found | Reply]]:
    """An exchange that is reserved and has not written; its own clock shows the lease over."""
    sender = sending.upstream
    assert isinstance(sender, Late)
    task = lab.exchanges.begin(sending)
    await sender.at_fence.wait()
    flight = lab.flights.get(sending.claim.record)
    assert flight is not None
    flight.lease_until_s = running_s()
    return sender, task


async def test_late_owner_renews_before_it_writes(lab: Lab, upstream: Upstream) -> None:
    sending = lab.sending(sender=Late)
    sender, task = await held_up(lab, sending)
    sender.passed.set()
    reply = await task
    assert isinstance(reply, Reply)
    lab.replies.append(reply)
    assert reply.answer is not None
    assert upstream.count == 1


async def test_late_owner_that_lost_its_record_sends_nothing(lab: Lab, upstream: Upstream, store: RedisServer) -> None:
    sending = lab.sending(sender=Late)
    sender, task = await held_up(lab, sending)
    lapse(store, sending.claim)
    assert isinstance(await lab.store.reserve(rival(sending.claim), RESEND), Reserved)
    sender.passed.set()
    reply = await task
    assert isinstance(reply, Reply)
    assert told(reply) == UNKNOWN  # of the key: the other attempt may have sent
    assert upstream.count == 0


async def test_late_owner_that_cannot_ask_sends_nothing(faulty: Lab, upstream: Upstream, front: StoreProxy) -> None:
    sending = faulty.sending(sender=Late)
    sender, task = await held_up(faulty, sending)
    await front.refuse()
    sender.passed.set()
    reply = await task
    assert isinstance(reply, Reply)
    assert told(reply) == UNREACHABLE
    assert upstream.count == 0
    await front.accept()
    await until(lambda: len(faulty.flights) == 0, 5)
    assert isinstance(await faulty.record(sending), Reserved)


# Faults of our own, and the end.


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
async def test_fault_of_ours_is_judged_by_whether_the_fence_let_it_write(lab: Lab, begun: bool) -> None:
    class Broken(Sender):
        async def send(self, outgoing: Outgoing, *, fence: Fence | None = None, whole: bool = True) -> Incoming:
            assert fence is not None
            if begun:
                assert fence.alive()
            raise RuntimeError("K1 secret@example.test")

    sending = lab.sending(sender=Broken)
    reply = await lab.run(sending)
    assert told(reply) == (UNKNOWN if begun else ("internal-error", 500, "no"))
    assert isinstance(await lab.record(sending), Held if begun else Reserved)
    assert "exchange-failed" in lab.log.getvalue()
    assert "secret" not in lab.log.getvalue()


async def test_fault_of_ours_with_the_answer_in_hand_frees_its_content(lab: Lab) -> None:
    class Broken(Metrics):
        def count(self, name: str, *labels: str) -> None:
            if name == "sidecar_answers":
                raise RuntimeError("a fault of ours")

    lab.exchanges._metrics = Broken()
    sending = lab.sending()
    assert told(await lab.run(sending)) == UNKNOWN
    assert isinstance(await lab.record(sending), Held)
    assert lab.memory.held_bytes == 0


async def ended_now(lab: Lab, task: asyncio.Task[Found | Reply]) -> None:
    lab.exchanges.end_now()
    await lab.exchanges.finish()
    assert task.cancelled()
    await until(lambda: len(lab.flights) == 0, 5)
    assert lab.memory.held_bytes == 0


async def test_end_now_before_the_first_byte_releases(lab: Lab, upstream: Upstream) -> None:
    sending = lab.sending(sender=Late)
    _, task = await held_up(lab, sending)
    await ended_now(lab, task)
    assert upstream.count == 0
    assert isinstance(await lab.record(sending), Reserved)


async def test_end_now_after_the_first_byte_is_unknown(lab: Lab, upstream: Upstream) -> None:
    upstream.script(stall())
    sending = lab.sending()
    task = lab.exchanges.begin(sending)
    await upstream.reached()
    await ended_now(lab, task)
    assert isinstance(await lab.record(sending), Held)


async def test_end_now_between_two_attempts_is_unknown(lab: Lab, upstream: Upstream) -> None:
    upstream.script(answer(502))
    sending = lab.sending(native=GUARDED, retry=Retry(attempts=2, backoff_s=60))
    task = lab.exchanges.begin(sending)
    await until(lambda: lab.metrics.counters["sidecar_answers"][("mail", "lost")] == 1)
    await ended_now(lab, task)
    assert isinstance(await lab.record(sending), Held)


async def test_end_now_with_the_answer_in_hand_still_records_it(
    faulty: Lab, upstream: Upstream, front: StoreProxy
) -> None:
    released = asyncio.Event()
    upstream.script(gate(released))
    sending = faulty.sending(one=claim(lease_s=scaled(0.3)))
    task = faulty.exchanges.begin(sending)
    await upstream.reached()
    front.freeze()
    released.set()
    await until(lambda: faulty.flights.unsettled == 1)
    faulty.exchanges.end_now()
    front.thaw()
    await ended_now(faulty, task)
    assert isinstance(await faulty.record(sending), Completed)


# What is kept.


async def test_answer_above_stored_response_is_delivered_and_recorded_without_content(
    lab: Lab, upstream: Upstream
) -> None:
    content = b"x" * 1001
    upstream.default = answer(200, content=content)
    sending = lab.sending()
    reply = await lab.run(sending)
    assert reply.problem is None
    assert reply.content is not None
    assert reply.content.whole() == content
    found = await lab.record(sending)
    assert isinstance(found, Completed)
    assert (found.kept, found.answer.content, found.answer.status) == (False, b"", 200)


@pytest.mark.parametrize(
    ("status", "sent"), [(200, Sent.UNKNOWN), (422, Sent.NO), (502, Sent.UNKNOWN)], ids=["accepted", "refused", "lost"]
)
async def test_answer_above_memory_is_read_to_its_end_and_recorded_without_content(
    store: RedisServer, upstream: Upstream, status: int, sent: Sent
) -> None:
    upstream.default = answer(status, content=b"x" * 5000)
    async with lab_on(store.url, upstream, memory_bytes=1000) as lab:
        sending = lab.sending()
        reply = await lab.run(sending)
        assert told(reply) == (Outcome.RESPONSE_NOT_KEPT, status, sent)
        found = await lab.record(sending)
        if status == 502:
            assert found == Held("answer-lost", "502")
        else:
            assert isinstance(found, Completed)
            assert (found.kept, found.answer.status) == (False, status)
    assert upstream.count == 1


async def test_chunked_answer_is_kept_unchunked(lab: Lab, upstream: Upstream) -> None:
    upstream.default = chunked([b"ab", b"c"], trailer=b"X-T: 1\r\n")
    sending = lab.sending()
    await lab.run(sending)
    found = await lab.record(sending)
    assert isinstance(found, Completed)
    assert found.answer.content == b"abc"
    assert found.answer.fields == ()


async def test_unreserved_exchange_is_recorded_once_the_store_is_back(
    faulty: Lab, upstream: Upstream, front: StoreProxy
) -> None:
    await front.refuse()
    sending = faulty.sending(one=claim(lease_s=scaled(0.1)))
    with pytest.raises(StoreError):
        await faulty.exchanges.begin(sending)
    reply = await faulty.exchanges.begin_unreserved(sending)
    assert isinstance(reply, Reply)
    faulty.replies.append(reply)
    assert reply.answer is not None
    assert not reply.protected
    await front.accept()
    await until(lambda: len(faulty.flights) == 0, 5)
    assert isinstance(await faulty.record(sending), Completed)
    assert upstream.count == 1
