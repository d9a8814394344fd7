"""A replay is the stored answer byte for byte: its framing and Date made anew, one mark more, and nothing else."""

from __future__ import annotations

import hashlib
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from harness import Parsed, RedisServer, answer, chunked, together
from pair import Pair, each_test, gzipped, head, module_pair, post, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair({"limits": {"stored_response": "64KiB"}})
mail = each_test()

OLD_DATE = b"Mon, 01 Jan 2024 00:00:00 GMT"
MARKED = (b"Idempotent-Replayed", b"true")
FIELDS = [
    (b"X-One", b"1"),
    (b"set-cookie", b"a=b; Path=/"),
    (b"DATE", OLD_DATE),
    (b"x-one", b"2"),
    (b"Link", b"</a>"),
    (b"SET-COOKIE", b"c=d"),
    (b"Content-Type", b"text/odd"),
    (b"X-Bytes", b"caf\xe9 \x80\xff"),
    (b"Link", b"</b>"),
    (b"Server", b"theirs"),
    (b"set-cookie", b"e=f"),
    (b"Age", b"5"),
    (b"x-request-id", b"req-1"),
    (b"x-ratelimit-remaining", b"7"),
]


def undated(got: Parsed) -> list[tuple[bytes, bytes]]:
    return [(name, b"" if name.lower() == b"date" else value) for name, value in got.fields]


@pytest.mark.case("C244", "C245")
@pytest.mark.parametrize("status", [200, 201, 202, 207, 299, 400, 422])
async def test_replay_has_every_field_in_order_and_every_byte(mail: Pair, status: int) -> None:
    content = bytes(range(256))
    mail.upstream.default = answer(status, FIELDS, content, reason=b"My R\xefason")
    first, *replays = [await mail.ask(post(f"every byte {status}")) for _ in range(21)]
    assert mail.count == 1
    assert first.fields == (*FIELDS, (b"Content-Length", b"256"))
    for got in replays:
        assert (got.status, got.reason, got.content) == (status, b"My R\xefason", content)
        assert sorted(undated(got)) == sorted([*undated(first), MARKED])
        assert [pair for pair in undated(got) if pair not in (MARKED, (b"Content-Length", b"256"))] == undated(first)[
            :-1
        ]
        date = parsedate_to_datetime((got.first("date") or b"").decode())
        assert abs(datetime.now(UTC) - date) < timedelta(seconds=60)
        assert got.first("age") == b"5"


@pytest.mark.case("C244")
async def test_answer_without_content_is_replayed_with_the_id_in_its_field(mail: Pair) -> None:
    mail.upstream.default = answer(202, [("X-Message-Id", "m1")], b"")
    got = [await mail.ask(post("accepted")) for _ in range(6)]
    assert [(one.status, one.content, one.first("x-message-id")) for one in got] == [(202, b"", b"m1")] * 6
    assert [one.replayed for one in got] == [False] + [True] * 5
    assert mail.count == 1


@pytest.mark.case("C246")
async def test_chunked_answer_in_many_pieces_is_replayed_whole_under_one_length(mail: Pair) -> None:
    pieces = [b"piece %d;" % number for number in range(100)]
    mail.upstream.script(chunked(pieces, fields=[("X-A", "1")], trailer=b"X-T: 1\r\n"))
    got = [await mail.ask(post("pieces")) for _ in range(2)]
    assert [one.content for one in got] == [b"".join(pieces)] * 2
    assert got[1].every("content-length") == [b"%d" % len(got[1].content)]
    assert got[1].every("transfer-encoding") == got[1].every("x-t") == []


@pytest.mark.case("C246")
async def test_parallel_replays_are_all_whole(mail: Pair) -> None:
    mail.upstream.default = answer(200, [], b"r" * 60_000)
    first = await mail.ask(post("parallel"))
    got = await together(mail.sidecar.base, [post("parallel")] * 30)
    assert {(one.status, one.content == first.content, one.replayed) for one in got} == {(200, True, True)}
    assert mail.count == 1


PLAIN = b'{"id":"the id, ' + b"long " * 30 + b'"}'
PACKED = gzipped(PLAIN)
CODED = [
    ("Content-Encoding", "gzip"),
    ("Content-Type", "application/json"),
    ("ETag", '"strong"'),
    ("Content-MD5", "x"),
    ("Content-Digest", "sha-256=:x:"),
    ("Digest", "sha-256=x"),
    ("X-Kept", "1"),
]


def coded(key: str, accept: str | None) -> bytes:
    fields = [("Authorization", "Bearer one"), ("Content-Type", "application/json")]
    return post(key, fields=fields if accept is None else [*fields, ("Accept-Encoding", accept)])


@pytest.mark.case("C247")
@pytest.mark.parametrize(
    ("before", "now"),
    [("gzip, br", "gzip, br"), ("gzip", "deflate, gzip;q=0.5"), (None, None), ("gzip", "*"), ("", ""), ("br", "br")],
)
async def test_coded_answer_is_replayed_as_it_came_to_whoever_takes_it(
    mail: Pair, before: str | None, now: str | None
) -> None:
    mail.upstream.default = answer(200, CODED, PACKED)
    key = f"coded {before} {now}".replace(",", "+")
    first, second = await mail.ask(coded(key, before)), await mail.ask(coded(key, now))
    assert [one.content for one in (first, second)] == [PACKED] * 2
    assert hashlib.sha256(second.content).digest() == hashlib.sha256(PACKED).digest()
    assert [pair for pair in second.fields if pair != MARKED] == list(first.fields)
    assert second.first("content-length") == b"%d" % len(PACKED)


@pytest.mark.case("C247")
@pytest.mark.parametrize("now", [None, "identity", "br", "gzip;q=0", "*;q=0"])
async def test_coded_answer_is_decoded_for_a_retry_that_excludes_its_coding(mail: Pair, now: str | None) -> None:
    mail.upstream.default = answer(200, CODED, PACKED)
    key = f"decoded {now}"
    await mail.ask(coded(key, "gzip"))
    got = await mail.ask(coded(key, now))
    assert (got.status, got.content, got.replayed) == (200, PLAIN, True)
    assert got.first("content-length") == b"%d" % len(PLAIN)
    for gone in ("content-encoding", "content-md5", "content-digest", "digest"):
        assert got.first(gone) is None, gone
    assert (got.first("etag"), got.first("x-kept")) == (b'W/"strong"', b"1")
    assert mail.count == 1


@pytest.mark.case("C247")
@pytest.mark.parametrize("coding", ["zstd", "x-own", "gzip"])
async def test_coding_that_cannot_be_undone_stays(mail: Pair, coding: str) -> None:
    mail.upstream.default = answer(200, [("Content-Encoding", coding), ("ETag", '"s"')], b"no such coding")
    await mail.ask(coded(f"stays {coding}", coding))
    got = await mail.ask(coded(f"stays {coding}", "identity"))
    assert (got.content, got.first("content-encoding"), got.first("etag")) == (
        b"no such coding",
        coding.encode(),
        b'"s"',
    )


@pytest.mark.case("C248")
async def test_upstreams_own_mark_passes_fresh_and_is_replaced_on_a_replay(mail: Pair) -> None:
    fields = [("idempotent-replayed", "false"), ("X-A", "1"), ("Idempotent-Replayed", "odd")]
    mail.upstream.default = answer(200, fields)
    first, second = [await mail.ask(post("own mark")) for _ in range(2)]
    assert first.every("idempotent-replayed") == [b"false", b"odd"]
    assert second.every("idempotent-replayed") == [b"true"]
    assert second.fields[:2] == (MARKED, (b"X-A", b"1"))


@pytest.mark.case("C249")
async def test_mark_may_have_another_name_or_none(tmp_path: Path, session_store: RedisServer) -> None:
    for number, (setting, name) in enumerate((("X-Seen-Before", b"X-Seen-Before"), ("off", None))):
        async with running(tmp_path / str(number), session_store.url, replay_field=setting) as pair:
            pair.upstream.default = answer(200, [("Date", OLD_DATE)])
            first, second = [await pair.ask(post(f"mark {number}")) for _ in range(2)]
            added = [pair for pair in undated(second) if pair not in undated(first)]
            assert added == ([] if name is None else [(name, b"true")])
            assert second.content == first.content


@pytest.mark.case("C250")
async def test_cookie_is_replayed_under_the_scope_of_a_credential_alone(
    tmp_path: Path, session_store: RedisServer
) -> None:
    async with running(tmp_path, session_store.url, scope=["route"]) as pair:
        pair.upstream.default = answer(200, [("Set-Cookie", "a=b"), ("X-A", "1")])
        first, second = [await pair.ask(post("no cookie")) for _ in range(2)]
        assert (first.first("set-cookie"), second.first("set-cookie")) == (b"a=b", None)
        assert (second.replayed, second.first("x-a")) == (True, b"1")


@pytest.mark.case("C251")
@pytest.mark.parametrize("status", [200, 422])
@pytest.mark.parametrize("size", [64 * 1024, 64 * 1024 + 1, 3_000_000])
async def test_answer_too_large_to_keep_is_delivered_whole_and_its_key_stays_used(
    mail: Pair, status: int, size: int
) -> None:
    mail.upstream.default = answer(status, [("X-A", "1")], b"L" * size)
    first, *later = [await mail.ask(post(f"large answer {status} {size}")) for _ in range(3)]
    assert (first.status, first.content == b"L" * size, first.first("x-a")) == (status, True, b"1")
    assert mail.count == 1
    for got in later:
        assert got.status == status
        if size > 64 * 1024:
            assert (got.slug, got.replayed) == ("response-not-kept", False)
            assert got.json()["retryable"] is False
        else:
            assert (got.content, got.replayed) == (first.content, True)


@pytest.mark.case("C252")
async def test_first_callers_request_fields_do_not_shape_what_others_get(mail: Pair) -> None:
    mail.upstream.default = answer(200, [("Vary", "Accept"), ("X-A", "1")], PLAIN)
    odd = [("Range", "bytes=0-1"), ("If-None-Match", "*"), ("X-Fields", "id"), ("Accept", "text/none"), ("Prefer", "x")]
    base = [("Authorization", "Bearer one"), ("Content-Type", "application/json")]
    first = await mail.ask(post("shaped", fields=[*base, *odd]))
    second = await mail.ask(post("shaped", fields=[*base, ("User-Agent", "b"), ("traceparent", "00-1-2-01")]))
    third = await mail.ask(post("shaped", fields=[*base, *odd]))
    assert [pair for pair in second.fields if pair != MARKED] == list(first.fields)
    assert second.content == third.content == first.content == PLAIN
    assert second.fields == third.fields
    assert mail.count == 1


@pytest.mark.case("C253")
async def test_replay_for_a_client_of_http_1_0(mail: Pair) -> None:
    first = await mail.ask(post("old client"))
    lines = (b"Authorization: Bearer one", b"Content-Type: application/json", b"Idempotency-Key: old client")
    content = post("old client").partition(b"\r\n\r\n")[2]
    data = head(b"POST /mail/emails HTTP/1.0", *lines, b"Content-Length: %d" % len(content)) + content
    got = await mail.ask(data)
    assert (got.status, got.content, got.replayed) == (200, first.content, True)
    assert got.first("connection") == b"close"


@pytest.mark.case("C247")
async def test_deflated_answer_is_undone_too(mail: Pair) -> None:
    mail.upstream.default = answer(200, [("Content-Encoding", "deflate")], zlib.compress(PLAIN))
    await mail.ask(coded("deflated", "deflate"))
    got = await mail.ask(coded("deflated", "gzip"))
    assert (got.content, got.first("content-encoding")) == (PLAIN, None)
