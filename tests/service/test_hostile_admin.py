"""The admin listener against those who should not use it, or cannot: refused in our words, nobody else held up."""

from __future__ import annotations

import json
import random

import pytest
from crowd import each, meanwhile
from harness import Client, NoAnswerError, duration, raw
from harness.wire import split_head
from mutator import CHANGES, SECRET
from pair import Pair, each_test, head, module_pair, rss_bytes
from strict import answers

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair(timeout={"receive": duration(5), "connect": duration(1), "total": duration(2)})
mail = each_test()

MIB = 1024 * 1024
CLOSE = b"Connection: close"
JSON = b"Content-Type: application/json"
RECORD = b"/v1/records/" + b"a" * 40
SLUG = b'"urn:email-idempotency-sidecar:problem:'


def own_host(pair: Pair) -> bytes:
    return b"Host: 127.0.0.1:%d" % pair.sidecar.admin_port


def change(pair: Pair, *lines: bytes, what: bytes = b"/forget", content: bytes = b"{}") -> bytes:
    """A request that would change something."""
    length = b"Content-Length: %d" % len(content)
    return head(b"POST " + RECORD + what + b" HTTP/1.1", own_host(pair), CLOSE, length, *lines) + content


async def given(pair: Pair, data: bytes) -> tuple[int, bytes]:
    """The status and all bytes of the one answer."""
    async with await Client.open(pair.sidecar.admin) as client:
        await client.send(data)
        got = await client.rest()
    (read,) = answers(got)
    assert read.whole
    return read.status, got


@pytest.mark.case("C340")
@pytest.mark.parametrize(
    "host",
    [
        b"evil.test",
        b"localhost.evil.test",
        b"127.0.0.1.evil.test",
        b"127.0.0.1:80@evil.test",
        b"127.0.0.1:evil",
        b"127.0.0.1@evil.test",
        b"[::1].evil.test",
        b"[::1]evil:80",
        b"[::1",
        b"0.0.0.0",
        b"2130706433",
        b"0x7f.1",
        b"",
        b"\xff\xfe",
        b"localhost, evil.test",
        b"evil.test/localhost",
    ],
)
async def test_foreign_host_is_refused_however_it_is_written(mail: Pair, host: bytes) -> None:
    for target in (b"/v1/stats", b"/v1/records", b"/problems"):
        status, got = await given(mail, head(b"GET " + target + b" HTTP/1.1", b"Host: " + host, CLOSE))
        assert status in (400, 403)
        assert SLUG in got
    # A probe of an orchestrator names the address of the pod, whatever that is.
    status, _ = await given(mail, head(b"GET /livez HTTP/1.1", b"Host: 10.1.2.3:8026", CLOSE))
    assert status == 200


@pytest.mark.case("C340")
async def test_absolute_target_names_the_host_and_two_hosts_name_none(mail: Pair) -> None:
    evil = [
        head(b"GET http://evil.test/v1/stats HTTP/1.1", own_host(mail), CLOSE),
        head(b"GET /v1/stats HTTP/1.1", own_host(mail), b"Host: evil.test", CLOSE),
        head(b"GET /v1/stats HTTP/1.1", b"Host: evil.test", own_host(mail), CLOSE),
        head(b"GET /v1/stats HTTP/1.1", CLOSE),
    ]
    for data in evil:
        status, got = await given(mail, data)
        assert status in (400, 403), data
        assert b'"outcomes"' not in got


@pytest.mark.case("C341")
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([JSON, b"Origin: http://evil.test"], 403),
        ([JSON, b"Origin: null"], 403),
        ([JSON, b"Origin: http://127.0.0.1:1"], 403),
        ([JSON, b"Origin: http://127.0.0.1.evil.test"], 403),
        ([JSON, b"Sec-Fetch-Site: cross-site"], 403),
        ([JSON, b"Sec-Fetch-Site: same-site"], 403),
        ([b"Content-Type: text/plain"], 415),
        ([b"Content-Type: text/plain; x=application/json"], 415),
        ([b"Content-Type: application/x-www-form-urlencoded"], 415),
        ([b"Content-Type: multipart/form-data; boundary=application/json"], 415),
        ([], 415),
        ([JSON], 404),
    ],
)
async def test_page_of_another_site_changes_nothing(mail: Pair, lines: list[bytes], status: int) -> None:
    for what, content in ((b"/forget", b"{}"), (b"/resolve", b'{"outcome":"not-sent"}')):
        assert (await given(mail, change(mail, *lines, what=what, content=content)))[0] == status


@pytest.mark.case("C342")
@pytest.mark.parametrize(
    "lines",
    [
        [b"GET /livez HTTP/1.1 " + SECRET],
        [b"GET /livez?" + SECRET + b"\xc3\xa9 HTTP/1.1"],
        [b"GET /livez?" + SECRET * 5000 + b" HTTP/1.1"],
        [b"GET http://[::1/" + SECRET + b" HTTP/1.1"],
        [b"GET http://h:99999999/" + SECRET + b" HTTP/1.1"],
        [b"GET * HTTP/1.1", b"X: " + SECRET],
        [b"GET /livez HTTP/1.1", b"Authorization: Bearer " + SECRET * 5000],
        [b"GET /livez HTTP/1.1", b"X (" + SECRET + b"): 1"],
        [b"GET /livez HTTP/1.1", *[b"X-" + SECRET + b": 1"] * 700],
        [b"GET /livez HTTP/1.1", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"X: " + SECRET],
        [b"BREW /" + SECRET + b" HTTP/1.1"],
        [b"CONNECT " + SECRET + b":1 HTTP/1.1"],
        [b"POST " + RECORD + b"/resolve HTTP/1.1", JSON, b"Content-Encoding: gzip", b"Content-Length: 10"],
        [b"POST " + RECORD + b"/resolve HTTP/1.1", JSON, b"Content-Encoding: deflate", b"Content-Length: 10"],
        [b"POST " + RECORD + b"/resolve HTTP/1.1", JSON, b"Transfer-Encoding: chunked"],
        [b"\x16\x03\x01" + SECRET],
    ],
)
async def test_admin_answers_in_our_own_words(mail: Pair, lines: list[bytes]) -> None:
    data = head(lines[0], own_host(mail), CLOSE, *lines[1:]) + SECRET
    begin = len(mail.sidecar.log())
    async with await Client.open(mail.sidecar.admin) as client:
        await client.send(data)
        got = await client.rest()
    (read,) = answers(got)
    assert 400 <= read.status < 500
    assert SLUG in read.content
    assert SECRET not in got
    assert split_head(got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n").start.startswith(b"HTTP/1.1 ")
    told = mail.sidecar.log()[begin:]
    assert SECRET.decode() not in told
    assert '"error"' not in told


@pytest.mark.case("C342")
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"by":' + b"9" * 100_000 + b"}",
        b'{"by":1e400}',
        b'{"by":NaN}',
        b'{"by":"\\ud800"}',
        b'{"by":"\\u0000"}',
        b'{"by":["x"]}',
        b'{"by":"a b"}',
        b'{"route":"../x"}',
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf{}",
        b'"text"',
        b"null",
        b"[]",
        b"{",
        b'{"outcome":["sent"]}',
        b'{"outcome":"sent","answer":[]}',
        b'{"outcome":"sent","answer":{"status":"200"}}',
        b'{"outcome":"sent","answer":{"status":200,"fields":[["a","b\\r\\nc: d"]]}}',
        b'{"outcome":"sent","answer":{"status":200,"fields":[["a:b","c"]]}}',
        b'{"outcome":"sent","answer":{"status":200,"fields":{"a":"b"}}}',
        b'{"outcome":"sent","answer":{"status":200,"fields":[["a","\\u0100"]]}}',
        b'{"outcome":"sent","answer":{"status":200,"content_base64":5}}',
        b'{"outcome":"sent","answer":{"status":200,"content_base64":"\xc3\xa9"}}',
        b'{"outcome":"sent","answer":{"status":true}}',
        b'{"outcome":"sent","force":1}',
    ],
)
async def test_content_that_is_no_answer_of_an_operator_is_400(mail: Pair, content: bytes) -> None:
    status, got = await given(mail, change(mail, JSON, what=b"/resolve", content=content))
    assert status == 400
    assert SLUG + b'question-malformed"' in got


@pytest.mark.case("C342")
async def test_question_with_anything_in_it_is_answered(mail: Pair) -> None:
    for query in ("limit=%ff", "limit=1&limit=2", "key=%ff%fe%00", "key=%ed%a0%80", "cursor=" + "9" * 3000, "limit=-1"):
        status, _ = await given(mail, head(b"GET /v1/records?" + query.encode() + b" HTTP/1.1", own_host(mail), CLOSE))
        assert status in (200, 400), query
    for path in ("//evil.test/v1/stats", "/v1/../v1/stats", "/v1/records/" + "%2e" * 40, "/v1/records//", "/livez/"):
        status, _ = await given(mail, head(b"GET " + path.encode() + b" HTTP/1.1", own_host(mail), CLOSE))
        assert status in (400, 404), path


@pytest.mark.slow
@pytest.mark.case("C343")
async def test_admin_requests_that_are_nearly_right_harm_nothing(mail: Pair) -> None:
    rng = random.Random(1)
    seeds = [
        head(b"GET /v1/records?limit=5&state=unknown HTTP/1.1", own_host(mail), b"Authorization: Bearer " + SECRET),
        head(b"GET /metrics HTTP/1.1", own_host(mail), b"Accept: text/plain"),
        change(mail, JSON, what=b"/resolve", content=b'{"outcome":"sent","provider_id":"x"}'),
        change(mail, JSON, b"Origin: null"),
    ]
    for number in range(600):
        data = seeds[number % len(seeds)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            data = rng.choice(CHANGES)(rng, data)
        got = b""
        async with await Client.open(mail.sidecar.admin) as client:
            await client.send(data)
            try:
                read = await client.answer(deadline_s=0.2)
                got = read.head + read.content
                answers(got)
                assert read.status != 500, data
            except (NoAnswerError, TimeoutError):
                pass
            client.writer.transport.abort()
        assert SECRET not in got
    assert (await mail.sidecar.ask_admin("/livez")).status == 200
    assert mail.sidecar.log_lines(level="error") == []
    assert SECRET.decode() not in mail.sidecar.log()


async def _hammer(pair: Pair, data: bytes, times: int) -> None:
    for _ in range(times):
        async with await Client.open(pair.sidecar.admin) as client:
            await client.ask(data, deadline_s=20)


def slow_ones(pair: Pair, how: str) -> bytes:
    """What each of many connections begins and never ends."""
    if how == "slow heads":
        return head(b"GET /metrics HTTP/1.1", own_host(pair), b"X: ")[:-4]
    if how == "slow contents":
        return (
            head(b"POST " + RECORD + b"/forget HTTP/1.1", own_host(pair), JSON, b"Content-Length: 10000") + b'{"by":"'
        )
    return b""


def quick_ones(pair: Pair, how: str) -> bytes:
    """What is asked again and again."""
    match how:
        case "huge contents":
            return change(pair, JSON, content=json.dumps({"by": "x" * (2 * MIB)}).encode())
        case "many lists":
            return head(b"GET /v1/records?state=completed&limit=200 HTTP/1.1", own_host(pair), CLOSE)
        case _:
            return head(b"GET /metrics HTTP/1.1", own_host(pair), CLOSE)


@pytest.mark.slow
@pytest.mark.case("C344")
@pytest.mark.parametrize("how", ["slow heads", "slow contents", "huge contents", "many scrapes", "many lists"])
async def test_admin_listener_under_siege_does_not_hold_up_the_data_plane(mail: Pair, how: str) -> None:
    begin = rss_bytes(mail.sidecar.pid)
    clients = [await Client.open(mail.sidecar.admin) for _ in range(100)]
    data = quick_ones(mail, how)

    async def ask(number: int) -> None:
        assert (await raw(mail.sidecar.admin, data, deadline_s=20)).status in (200, 400)

    try:
        for client in clients:
            await client.send(slow_ones(mail, how))
        async with meanwhile(mail, f"beside {how}") as felt:
            await each(20 if how == "huge contents" else 100, ask, 10)
        assert (await mail.sidecar.ask_admin("/readyz")).status == 200
    finally:
        for client in clients:
            client.writer.transport.abort()
    felt.quick(median_s=0.25, longest_s=1.5)
    assert rss_bytes(mail.sidecar.pid) - begin < 60 * MIB
    assert mail.sidecar.log_lines(level="error") == []
