"""Clients that leave, hurry or dawdle: what has arrived whole runs to its end, what has not leaves no trace."""

from __future__ import annotations

import asyncio
import time

import pytest
from harness import Client, answer, gate, request, reset_after_content, scaled, slow, until
from harness.program import MAIL
from lab import FIELDS, JSON, Lab, Settings, busy, elapsed, fresh, stored, times, unknown

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(timeout=times(total_s=5, receive_s=1)),
        "wait": lab.route(timeout=times(total_s=5), concurrent="wait"),
    }


def mail(key: str, target: str = "/mail/emails", content: bytes = MAIL) -> bytes:
    return request(target=target, content=content, fields=FIELDS, key=key)


async def logged(lab: Lab, count: int) -> None:
    """Wait until `count` requests are in the log."""
    await until(lambda: len(lab.one.log_lines(event="request")) >= count)


async def leave(lab: Lab, data: bytes, *, how: str) -> None:
    """Send `data`, and leave once the upstream has read a whole request."""
    before = lab.upstream.count
    client = await Client.open(lab.one.base)
    await client.send(data)
    await until(lambda: lab.upstream.count > before)
    match how:
        case "rst":
            client.abort()
        case "fin":
            client.close()
        case "half":
            client.half_close()
            await until(client.reader.at_eof)
            client.close()


@pytest.mark.case("C166")
@pytest.mark.parametrize("how", ["rst", "fin", "half"])
async def test_client_that_left_changes_nothing_and_its_retry_gets_the_answer(shared: Lab, how: str) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, answer(201, [("X-Id", "1")], b"\xff\xfe\x00")))
    lines = len(shared.one.log_lines(event="request"))
    await leave(shared, mail(key), how=how)
    busy(await shared.one.send(key))
    opened.set()
    await shared.until_state(key, "completed")
    again = await shared.one.send(key)
    assert (again.status, again.replayed, again.content, again.first("x-id")) == (201, True, b"\xff\xfe\x00", b"1")
    assert shared.count(key) == 1
    await logged(shared, lines + 3)
    left = [line for line in shared.one.log_lines(event="request")[lines:] if line.get("client") == "left"]
    assert [line["outcome"] for line in left] == ["forwarded"]


@pytest.mark.case("C166")
async def test_loss_after_the_client_left_is_recorded_as_unknown(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, reset_after_content()))
    await leave(shared, mail(key), how="rst")
    opened.set()
    await shared.until_state(key, "unknown")
    unknown(await shared.one.send(key))
    assert shared.count(key) == 1


@pytest.mark.case("C166")
async def test_free_answer_after_the_client_left_frees_the_key(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, answer(503)))
    await leave(shared, mail(key), how="rst")
    opened.set()
    await shared.until_state(key, "")
    assert (await shared.one.send(key)).status == 200
    assert shared.count(key) == 2


@pytest.mark.case("C167")
async def test_hundred_clients_that_left_all_find_their_answers(shared: Lab) -> None:
    shared.upstream.default = slow(0.3)
    keys = [fresh() for _ in range(100)]
    clients = [await Client.open(shared.one.base) for _ in keys]
    for key, client in zip(keys, clients, strict=True):
        client.writer.write(mail(key))
    await shared.upstream.reached(100)
    for client in clients:
        client.abort()
    await until(lambda: len([key for key in keys if shared.state(key) == "completed"]) == 100, 10)
    given = await asyncio.gather(*(shared.one.send(key) for key in keys))
    assert [(one.status, one.replayed) for one in given] == 100 * [(200, True)]
    assert [shared.count(key) for key in keys] == 100 * [1]


@pytest.mark.case("C167")
async def test_impatient_client_that_repeats_while_it_still_runs_sends_once(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened, answer(200, content=b"the one")))
    for _ in range(3):
        client = await Client.open(shared.one.base)
        await client.send(mail(key))
        await shared.upstream.reached(1)
        client.abort()
        busy(await shared.one.send(key))
    opened.set()
    await shared.until_state(key, "completed")
    assert (await shared.one.send(key)).content == b"the one"
    assert shared.count(key) == 1


@pytest.mark.case("C167")
async def test_same_bytes_on_a_new_connection_right_after_a_cut_wait_for_the_first_answer(shared: Lab) -> None:
    for _ in range(10):
        key = fresh()
        shared.upstream.script(slow(0.1))
        client = await Client.open(shared.one.base)
        await client.send(mail(key, "/wait/emails"))
        client.abort()
        again = await shared.one.send(key, target="/wait/emails")
        assert again.status == 200
        assert shared.count(key) == 1


@pytest.mark.case("C168")
@pytest.mark.parametrize("how", ["rst", "fin"])
async def test_client_that_leaves_during_its_upload_leaves_no_trace(shared: Lab, how: str) -> None:
    key = fresh()
    content = b"x" * 2_000_000
    data = mail(key, content=content)
    for part in (len(data) - len(content) + 10, len(data) // 2, len(data) - 1):
        client = await Client.open(shared.one.base)
        await client.send(data[:part])
        lines = len(shared.one.log_lines(event="request"))
        client.abort() if how == "rst" else client.close()
        await logged(shared, lines + 1)
        assert shared.name(key) == ""
    assert shared.upstream.begun == []
    assert (await shared.one.send(key, content, fields=FIELDS)).status == 200
    assert shared.count(key) == 1


@pytest.mark.case("C169")
async def test_trickled_upload_takes_no_reservation_until_it_is_whole(shared: Lab) -> None:
    key = fresh()
    data = mail(key)
    async with await Client.open(shared.one.base) as slow_client:
        for at in range(0, len(data) - 1, 40):
            await slow_client.send_pieces([data[at : min(at + 40, len(data) - 1)]], 0.01)
        assert shared.name(key) == ""
        first = await shared.one.send(key)
        assert first.status == 200
        await slow_client.send(data[-1:])
        stored(first, await slow_client.answer())
    assert shared.count(key) == 1


@pytest.mark.case("C168")
async def test_upload_that_never_ends_is_given_up_in_time(shared: Lab) -> None:
    key = fresh()
    begin_s = time.monotonic()
    async with await Client.open(shared.one.base) as client:
        await client.send(mail(key)[:-1])
        given = await client.answer()
        assert (given.status, given.slug, given.json()["sent"]) == (408, "request-malformed", "no")
        assert given.first("connection") == b"close"
        assert time.monotonic() - begin_s < scaled(3.0)
    assert shared.upstream.begun == []
    assert shared.name(key) == ""


@pytest.mark.case("C169")
async def test_chunked_upload_in_many_pieces_is_sent_whole_and_replayed(shared: Lab) -> None:
    key = fresh()
    head = request(fields=[*FIELDS, ("Transfer-Encoding", "chunked")], key=key)
    chunks = [b"1\r\n%c\r\n" % byte for byte in MAIL] + [b"0\r\n\r\n"]
    async with await Client.open(shared.one.base) as client:
        await client.send_pieces([head, *chunks])
        first = await client.answer()
    stored(first, await shared.one.send(key))
    assert shared.mails(key)[0].content == MAIL
    assert shared.count(key) == 1


@pytest.mark.case("C169")
async def test_client_that_reads_its_answer_late_gets_it_whole(shared: Lab) -> None:
    key = fresh()
    content = bytes(range(256)) * 8000
    shared.upstream.script(answer(200, [JSON], content))
    async with await Client.open(shared.one.base) as client:
        await client.send(mail(key))
        begin_s = time.monotonic()
        await shared.until_state(key, "completed")
        await elapsed(begin_s, 0.3)
        assert (await client.answer()).content == content
    assert shared.count(key) == 1
