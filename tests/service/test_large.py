"""Large mails: protected as small ones are, in bounded memory, and without making others wait."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Client, Parsed, RedisServer, answer, duration, gate, request, scaled, until
from pair import Pair, each_test, gzipped, module_pair, peak_bytes, post, reset_peak, rss_bytes, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOW_TIMES = {"receive": duration(20), "connect": duration(1), "total": duration(20)}
shared = module_pair(timeout=SLOW_TIMES)
mail = each_test()

MIB = 1024 * 1024
JSON = [("Authorization", "Bearer one"), ("Content-Type", "application/json")]
PLAIN = [("Authorization", "Bearer one"), ("Content-Type", "application/octet-stream")]
PIECE = bytes(range(256)) * 256


def attachment(size_bytes: int) -> bytes:
    """A mail as JSON with one attachment of about so many bytes."""
    data = base64.b64encode(hashlib.sha256(b"seed").digest() * (size_bytes * 3 // 4 // 32))
    return b'{"to":"b@example.com","attachments":[{"content":"' + data + b'"}],"subject":"large"}'


async def upload(client: Client, key: str, content: bytes, fields: list[tuple[str, str]]) -> Parsed:
    """Send in pieces, so that the test's own loop is never held up, and read the answer."""
    length = ("Content-Length", str(len(content)))
    await client.send(request("POST", "/mail/emails", [*fields, length], key=key))
    for at in range(0, len(content), 65536):
        await client.send(content[at : at + 65536])
    return await client.answer(deadline_s=30)


async def large(pair: Pair, key: str, content: bytes, fields: list[tuple[str, str]] = JSON) -> Parsed:
    async with await pair.client() as client:
        return await upload(client, key, content, fields)


@pytest.mark.case("C260")
@pytest.mark.parametrize("size", [MIB + 1, 12 * MIB, 40 * MIB])
async def test_mail_with_attachment_is_protected_whatever_its_size(mail: Pair, size: int) -> None:
    content = attachment(size)
    first, second = [await large(mail, f"attachment {size}", content) for _ in range(2)]
    assert (first.status, second.status, second.replayed, second.content) == (200, 200, True, first.content)
    assert [hashlib.sha256(one.content).digest() for one in mail.upstream.requests] == [
        hashlib.sha256(content).digest()
    ]
    changed = content[:-20] + b"9" + content[-19:]
    assert (await large(mail, f"attachment {size}", changed)).status == 422
    assert mail.count == 1


@pytest.mark.case("C261")
@pytest.mark.parametrize(("kind", "fields"), [("JSON", JSON), ("bytes", PLAIN)])
async def test_fifty_mebibytes_are_protected_in_bounded_memory(
    mail: Pair, kind: str, fields: list[tuple[str, str]]
) -> None:
    content = attachment(50 * MIB) if kind == "JSON" else PIECE * (50 * MIB // len(PIECE))
    await mail.send(f"warm {kind}")
    reset_peak(mail.sidecar.pid)
    before = rss_bytes(mail.sidecar.pid)
    first, second = [await large(mail, f"fifty {kind}", content, fields) for _ in range(2)]
    assert (first.status, second.replayed, mail.count) == (200, True, 2)
    assert peak_bytes(mail.sidecar.pid) - before < 24 * MIB
    assert mail.upstream.requests[1].content == content


async def latencies(pair: Pair, until_done: asyncio.Task[Parsed]) -> list[float]:
    """How long small requests take, one after the other, while `until_done` runs."""
    taken = []
    async with await pair.client() as client:
        data = post("small beside large")
        while not until_done.done():
            begin_s = time.perf_counter()
            assert (await client.ask(data)).status == 200
            taken.append(time.perf_counter() - begin_s)
            await asyncio.sleep(0.002)
    return sorted(taken)


@pytest.mark.case("C262")
@pytest.mark.parametrize("kind", ["JSON", "bytes", "gzip"])
async def test_small_mails_do_not_wait_for_a_large_one(mail: Pair, kind: str) -> None:
    fields = PLAIN if kind == "bytes" else JSON
    content = PIECE * (50 * MIB // len(PIECE)) if kind == "bytes" else attachment(40 * MIB)
    if kind == "gzip":
        content, fields = gzipped(content, 1), [*JSON, ("Content-Encoding", "gzip")]
    await mail.ask(post("small beside large"))
    beside = asyncio.create_task(large(mail, f"large beside small {kind}", content, fields))
    taken = await latencies(mail, beside)
    assert (await beside).status == 200
    assert len(taken) > 5
    assert taken[int(len(taken) * 0.9)] < scaled(0.1)
    assert taken[int(len(taken) * 0.99)] < scaled(0.3)


@pytest.mark.case("C263")
async def test_bomb_in_a_mail_is_compared_as_bytes_in_bounded_memory(mail: Pair) -> None:
    bomb = gzipped(b" " * 200 * MIB)
    fields = [*JSON, ("Content-Encoding", "gzip")]
    reset_peak(mail.sidecar.pid)
    before = rss_bytes(mail.sidecar.pid)
    sending = asyncio.create_task(large(mail, "bomb", bomb, fields))
    taken = await latencies(mail, sending)
    first, second = await sending, await large(mail, "bomb", bomb, fields)
    assert (first.status, second.replayed) == (200, True)
    assert mail.upstream.requests[0].content == bomb or mail.upstream.requests[1].content == bomb
    assert peak_bytes(mail.sidecar.pid) - before < 24 * MIB
    assert taken[int(len(taken) * 0.99)] < scaled(0.3)


@pytest.mark.case("C263")
async def test_bomb_in_an_answer_is_not_unfolded_without_bound(mail: Pair) -> None:
    bomb = gzipped(b" " * 200 * MIB)
    assert len(bomb) < MIB
    mail.upstream.default = answer(200, [("Content-Encoding", "gzip")], bomb)
    accepting = [*JSON, ("Accept-Encoding", "gzip")]
    await mail.ask(post("answer bomb", fields=accepting))
    reset_peak(mail.sidecar.pid)
    before = rss_bytes(mail.sidecar.pid)
    asking = asyncio.create_task(mail.ask(post("answer bomb", fields=JSON)))
    mail.upstream.default = answer()
    taken = await latencies(mail, asking)
    got = await asking
    assert (got.status, got.replayed, got.content == bomb) == (200, True, True)
    assert peak_bytes(mail.sidecar.pid) - before < 96 * MIB
    assert taken[-1] < scaled(0.5)


@pytest.mark.case("C264")
async def test_full_memory_is_503_and_the_key_stays_free(tmp_path: Path, session_store: RedisServer) -> None:
    limits = {"memory": "1MiB"}
    async with running(tmp_path, session_store.url, {"limits": limits}, timeout=SLOW_TIMES) as pair:
        release = asyncio.Event()
        pair.upstream.default = gate(release)
        content = b"m" * 250_000
        held = [asyncio.create_task(pair.ask(post(f"held {number}", content))) for number in range(4)]
        await pair.upstream.reached(4)
        refused = await pair.ask(post("no room", content))
        assert (refused.status, refused.slug, refused.json()["sent"]) == (503, "overloaded", "no")
        assert int(refused.first("retry-after") or 0) >= 1
        assert await pair.sidecar.metric("sidecar_content_bytes") >= 1_000_000
        release.set()
        assert [(await one).status for one in held] == [200] * 4
        assert ((await pair.ask(post("no room", content))).status, pair.count) == (200, 5)
        await until(lambda: _gone(pair))


async def _gone(pair: Pair) -> bool:
    return await pair.sidecar.metric("sidecar_content_bytes") == 0


@pytest.mark.case("C265")
async def test_too_many_requests_at_once_are_503_and_send_nothing(tmp_path: Path, session_store: RedisServer) -> None:
    async with running(tmp_path, session_store.url, {"limits": {"outstanding": 3}}, timeout=SLOW_TIMES) as pair:
        release = asyncio.Event()
        pair.upstream.default = gate(release)
        held = [asyncio.create_task(pair.ask(post(f"at once {number}"))) for number in range(3)]
        await pair.upstream.reached(3)
        for data in (post("one too many"), request("GET", "/mail/other")):
            refused = await pair.ask(data)
            assert (refused.status, refused.slug, refused.json()["sent"]) == (503, "overloaded", "no")
            assert int(refused.first("retry-after") or 0) >= 1
        assert (await pair.sidecar.ask_admin("/livez")).status == 200
        release.set()
        assert [(await one).status for one in held] == [200] * 3
        assert ((await pair.ask(post("one too many"))).status, pair.count) == (200, 4)


def deleted_files(pid: int) -> Iterator[Path]:
    """Files without a name that a process holds open."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).endswith("(deleted)"):
                yield entry
        except OSError:
            continue


@pytest.mark.case("C266")
async def test_spooled_content_has_no_name_and_is_freed_with_its_request(
    tmp_path: Path, session_store: RedisServer
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    env = {"TMPDIR": str(spool)}
    async with running(tmp_path, session_store.url, env=env, timeout=SLOW_TIMES) as pair:
        release = asyncio.Event()
        pair.upstream.script(gate(release))
        sending = asyncio.create_task(pair.ask(post("spooled", b"spooled-secret" * 100_000)))
        await pair.upstream.reached(1)
        assert list(spool.iterdir()) == []
        held = list(deleted_files(pair.sidecar.pid))
        assert len(held) == 1
        assert (held[0].stat().st_mode & 0o077, held[0].stat().st_size) == (0, 1_400_000)
        release.set()
        assert (await sending).status == 200
        await until(lambda: not list(deleted_files(pair.sidecar.pid)))
        client = await Client.open(pair.sidecar.base)
        await client.send(post("left", b"x" * 2_000_000)[:-10])
        await until(lambda: list(deleted_files(pair.sidecar.pid)))
        client.abort()
        await until(lambda: not list(deleted_files(pair.sidecar.pid)))
        assert pair.count == 1
