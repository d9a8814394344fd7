"""The owner's part with a real upstream and the real store: what each answer does to the record and to the client."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from exchange_lab import FIELDS, GUARDED, UNKNOWN, UNREACHABLE, Lab, lab_on, told
from harness import (
    Behaviour,
    RedisServer,
    Upstream,
    answer,
    close_after_content,
    cut_chunks,
    cut_content,
    gate,
    raw_answer,
    reset_after_content,
    scaled,
    stall,
    until,
)
from harness.stores import HOLD, claim, name, rival

from sidecar.config import Native, Retry, Twins, Unknown
from sidecar.errors import NotSentError
from sidecar.exchange import Reply, native_value
from sidecar.key import IdempotencyKey, Key
from sidecar.record import Completed, Held, Outstanding, Reserved
from sidecar.upstream import Fence, Incoming, Outgoing
from sidecar.upstream import Upstream as Sender

UNGUARDED = replace(GUARDED, twins=Twins.UNGUARDED)
THRICE = Retry(attempts=3, backoff_s=0.001)


@pytest.fixture
async def lab(store: RedisServer, upstream: Upstream) -> AsyncIterator[Lab]:
    async with lab_on(store.url, upstream) as made:
        yield made


# Section 8, row by row.


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299, 400, 422])
async def test_final_answer_completes_the_record(lab: Lab, upstream: Upstream, status: int) -> None:
    content = b"" if status == 204 else b'{"id":"1"}'
    upstream.default = answer(status, [("X-A", b"caf\xe9"), ("x-a", "2"), ("Connection", "keep-alive")], content, "Ok")
    sending = lab.sending()
    reply = await lab.run(sending)
    assert reply.answer is not None
    assert reply.content is not None
    assert (reply.answer.status, reply.answer.reason, reply.content.whole()) == (status, b"Ok", content)
    found = await lab.record(sending)
    assert isinstance(found, Completed)
    assert found.kept
    assert found.answer == replace(reply.answer, content=content)
    assert found.answer.fields[:2] == ((b"X-A", b"caf\xe9"), (b"x-a", b"2"))
    assert b"connection" not in dict(found.answer.fields)
    assert upstream.count == 1


@pytest.mark.parametrize("status", [302, 401, 403, 408, 409, 425, 429, 500, 503])
async def test_free_answer_releases_the_record_and_passes(lab: Lab, upstream: Upstream, status: int) -> None:
    upstream.default = answer(status, [("Retry-After", "7")], b"later")
    sending = lab.sending()
    reply = await lab.run(sending)
    assert reply.answer is not None
    assert reply.content is not None
    assert (reply.answer.status, reply.content.whole()) == (status, b"later")
    assert (b"Retry-After", b"7") in reply.answer.fields
    assert isinstance(await lab.record(sending), Reserved)


@pytest.mark.parametrize("status", [502, 504, 520, 522, 524, 527])
async def test_gateway_answer_is_unknown_and_passes(lab: Lab, upstream: Upstream, status: int) -> None:
    upstream.default = answer(status, content=b"gateway")
    sending = lab.sending()
    reply = await lab.run(sending)
    assert reply.answer is not None
    assert reply.answer.status == status
    assert reply.problem is None
    assert await lab.record(sending) == Held("answer-lost", str(status))


@pytest.mark.parametrize(
    ("behaviour", "seen"),
    [
        (reset_after_content(), ""),
        (close_after_content(), ""),
        (stall(), ""),
        (raw_answer(b"SSH-2.0-x\r\n"), ""),
        (cut_content(), "200"),
        (cut_content(reset=True), "200"),
        (cut_chunks(), "200"),
        (raw_answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "200"),
    ],
    ids=["reset", "closed", "timeout", "no-http", "cut", "cut-reset", "cut-chunks", "bad-chunks"],
)
async def test_lost_answer_is_unknown(lab: Lab, upstream: Upstream, behaviour: Behaviour, seen: str) -> None:
    upstream.script(behaviour)
    sending = lab.sending()
    assert told(await lab.run(sending)) == UNKNOWN
    assert await lab.record(sending) == Held("answer-lost", seen)
    assert upstream.count == 1


async def test_refused_connection_frees_the_key(lab: Lab, upstream: Upstream) -> None:
    await upstream.refuse()
    sending = lab.sending()
    assert told(await lab.run(sending)) == UNREACHABLE
    assert isinstance(await lab.record(sending), Reserved)


async def test_refused_connection_of_a_second_attempt_is_still_unknown(lab: Lab, upstream: Upstream) -> None:
    upstream.script(reset_after_content())
    first = lab.sending(unknown=Unknown.RESEND, native=GUARDED)
    await lab.run(first)
    await upstream.refuse()
    again = lab.sending(unknown=Unknown.RESEND, native=GUARDED, one=rival(first.claim))
    assert told(await lab.run(again)) == UNKNOWN
    assert await lab.record(first) == Held("answer-lost", "")


async def test_record_stays_ours_while_the_exchange_outlives_its_lease(lab: Lab, upstream: Upstream) -> None:
    released = asyncio.Event()
    upstream.script(gate(released))
    one = claim(lease_s=scaled(0.06))
    task = lab.exchanges.begin(lab.sending(one=one))
    await upstream.reached()
    flight = lab.flights.get(one.record)
    assert flight is not None
    await until(lambda: flight.lease_until_s > flight.reserved_at_s + 2 * one.lease_s)
    assert isinstance(await lab.store.reserve(rival(one), HOLD), Outstanding)
    released.set()
    reply = await task
    assert isinstance(reply, Reply)
    lab.replies.append(reply)
    assert isinstance(await lab.store.reserve(rival(one), HOLD), Completed)


async def test_arrival_that_does_not_own_gets_what_was_found_and_keeps_its_content(lab: Lab) -> None:
    sending = lab.sending()
    await lab.store.reserve(sending.claim, HOLD)
    twin = lab.sending(one=rival(sending.claim))
    assert isinstance(await lab.exchanges.begin(twin), Outstanding)
    assert twin.content.whole() == b"{}"  # a waiter may have to forward it yet
    twin.content.close()
    sending.content.close()
    assert lab.upstream.count == 0


# Attempts inside one reservation.


class Refused(Sender):
    """Cannot connect, twice."""

    failures = 2

    async def send(self, outgoing: Outgoing, *, fence: Fence | None = None, whole: bool = True) -> Incoming:
        if self.failures:
            self.failures -= 1
            raise NotSentError("connection_refused")
        return await super().send(outgoing, fence=fence, whole=whole)


async def test_not_sent_is_repeated_anywhere(lab: Lab, upstream: Upstream) -> None:
    sending = lab.sending(retry=THRICE, sender=Refused)
    reply = await lab.run(sending)
    assert reply.answer is not None
    assert upstream.count == 1
    assert isinstance(await lab.record(sending), Completed)


@pytest.mark.parametrize("native", [None, UNGUARDED], ids=["none", "unguarded"])
@pytest.mark.parametrize("behaviour", [reset_after_content(), answer(503), answer(502)], ids=["lost", "503", "502"])
async def test_sent_is_not_repeated_without_a_key_that_guards_twins(
    lab: Lab, upstream: Upstream, native: Native | None, behaviour: Behaviour
) -> None:
    upstream.script(behaviour)
    await lab.run(lab.sending(retry=THRICE, native=native))
    assert upstream.count == 1


@pytest.mark.parametrize("behaviour", [reset_after_content(), answer(503), answer(502)], ids=["lost", "503", "502"])
async def test_sent_is_repeated_under_a_key_that_guards_twins(
    lab: Lab, upstream: Upstream, behaviour: Behaviour
) -> None:
    upstream.script(behaviour, answer(200))
    sending = lab.sending(retry=THRICE, native=GUARDED)
    reply = await lab.run(sending)
    assert reply.answer is not None
    assert reply.answer.status == 200
    assert [request.every("idempotency-key") for request in upstream.requests] == [[b"K1"]] * 2
    assert {request.content for request in upstream.requests} == {b"{}"}
    assert isinstance(await lab.record(sending), Completed)


@pytest.mark.parametrize(
    ("last", "status"),
    [(answer(422), 422), (answer(403), 403), (answer(503), 503)],
    ids=["final-refusal", "free", "free-5xx"],
)
async def test_answer_after_a_lost_one_does_not_prove_that_nothing_left(
    lab: Lab, upstream: Upstream, last: Behaviour, status: int
) -> None:
    upstream.script(reset_after_content(), last, last)
    sending = lab.sending(retry=THRICE, native=GUARDED)
    reply = await lab.run(sending)
    assert reply.answer is not None
    assert reply.answer.status == status
    assert await lab.record(sending) == Held("answer-lost", str(status))


async def test_connection_refused_after_a_lost_answer_is_unknown(lab: Lab, upstream: Upstream) -> None:
    class ThenRefused(Sender):
        async def send(self, outgoing: Outgoing, *, fence: Fence | None = None, whole: bool = True) -> Incoming:
            if upstream.count:
                raise NotSentError("connection_refused")
            return await super().send(outgoing, fence=fence, whole=whole)

    upstream.script(stall())
    sending = lab.sending(retry=THRICE, native=GUARDED, sender=ThenRefused)
    assert told(await lab.run(sending)) == UNKNOWN
    assert isinstance(await lab.record(sending), Held)
    assert upstream.count == 1


# The provider's own key.


def key(value: bytes, source: str = "", field_value: bytes = b"") -> Key:
    return Key(IdempotencyKey(value), source, field_value or value)


@pytest.mark.parametrize(
    ("given", "native", "handed"),
    [
        (key(b"K1"), GUARDED, b"K1"),
        (key(b"K1", field_value=b'"K1"'), GUARDED, b'"K1"'),
        (key(b"K1", field_value=b'"K1"'), replace(GUARDED, field="X-Key"), b"K1"),
        (key(b"K1", source="/id"), GUARDED, b"K1"),
        (
            key(b"k" * 65),
            replace(GUARDED, field="X-Key", max_length=64),
            hashlib.sha256(b"k" * 65).hexdigest().encode(),
        ),
        (key(b"K1"), None, b""),
    ],
    ids=["bare", "quoted", "other-field", "other-source", "too-long", "none"],
)
async def test_native_key_is_handed_on(
    lab: Lab, upstream: Upstream, given: Key, native: Native | None, handed: bytes
) -> None:
    fields = (*FIELDS[:1], (b"IDEMPOTENCY-key", given.field_value), *FIELDS[2:])
    sending = lab.sending(native=native, fields=fields)
    sending.claim = replace(sending.claim, native=native_value(sending.route, given))
    assert sending.claim.native == handed
    await lab.run(sending)
    got = upstream.requests[0]
    if native is not None:
        assert got.every(native.field) == [handed]
    if native is not GUARDED:
        assert got.every("idempotency-key") == [given.field_value]  # as the client wrote it
    assert [line[0] for line in got.fields][:2] == [b"Host", b"IDEMPOTENCY-key"]


async def test_second_attempt_carries_the_first_ones_key(lab: Lab, upstream: Upstream, store: RedisServer) -> None:
    upstream.script(reset_after_content())
    first = lab.sending(native=GUARDED, unknown=Unknown.RESEND)
    await lab.run(first)
    fields = (*FIELDS[:1], (b"Idempotency-Key", b'"K1"'))
    again = lab.sending(native=GUARDED, unknown=Unknown.RESEND, fields=fields, one=rival(first.claim, native=b'"K1"'))
    reply = await lab.run(again)
    assert reply.attempt == 2
    assert [request.every("idempotency-key") for request in upstream.requests] == [[b"K1"], [b"K1"]]
    assert store.command("HGET", name(first.claim), "state") == b"completed"
    assert lab.metrics.counters["sidecar_resends"][("mail", "yes")] == 1
