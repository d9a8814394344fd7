"""Target, fields and content: what the client wrote is what the upstream reads, and the way back likewise."""

from __future__ import annotations

import hashlib

import pytest
from harness import Parsed, answer, chunked, interim, request
from harness.program import MAIL
from pair import Pair, each_test, gzipped, head, module_pair, post

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair()
mail = each_test()

TARGETS = [
    b"/v2/email/identities/ada%40example.test",
    b"/a?",
    b"/a?x=%41&y=a+b&&z=%C3%A9&=",
    b"//doubled//slashes/",
    b"/x/../y/./z",
    b"/k/%2e%2e/%2F%7e/;p=1",
    b"/a?b?c=/../d//e",
]


@pytest.mark.case("C201")
@pytest.mark.parametrize("target", TARGETS)
async def test_target_of_a_passed_request_keeps_its_bytes(mail: Pair, target: bytes) -> None:
    got = await mail.ask(request("DELETE", b"/mail" + target))
    assert got.status == 200
    assert mail.upstream.requests[0].head.startswith(b"DELETE " + target + b" HTTP/1.1\r\n")


@pytest.mark.case("C201")
@pytest.mark.parametrize("target", [b"/emails?", b"//emails", b"/emails/", b"/emails?to=a%40b&x=+", b"/./emails"])
async def test_target_of_a_send_keeps_its_bytes(mail: Pair, target: bytes) -> None:
    got = [await mail.ask(post(f"target-{target!r}", target="/mail" + target.decode())) for _ in range(2)]
    assert [one.replayed for one in got] == [False, True]
    assert [one.target for one in mail.upstream.requests] == [target]


FIELDS = (
    b"X-Tag: 1",
    b"Authorization: Bearer bytes",
    b"x-tag: 2",
    b"X-TAG: caf\xe9 \xff\x80",
    b"x-amz-content-sha256: UNSIGNED-PAYLOAD",
    b"X-Empty: ",
    b"uSER-aGENT: odd/1",
    b"Cookie: a=b",
    b'X-Quotes: "a\\"b", \'c\'',
    b"Idempotent-Replayed: true",
    b"Idempotency-Protected: false",
    b"Proxy-Status: someone",
    b"X-Forwarded-Host: evil.test",
    b"X-Forwarded-For: 192.0.2.1",
)


@pytest.mark.case("C202", "C203")
@pytest.mark.parametrize("target", [b"/emails", b"/other"])
async def test_fields_reach_the_upstream_byte_for_byte_and_none_is_added(mail: Pair, target: bytes) -> None:
    key = b"Idempotency-Key: fields%b" % target
    lines = (b"HOST: sidecar.test", *FIELDS, key, b"content-length: 3")
    got = await mail.ask(head(b"POST /mail" + target + b" HTTP/1.1", *lines) + b"abc")
    assert got.status == 200
    host = b"HOST: 127.0.0.1:%d" % mail.upstream.port
    assert mail.upstream.requests[0].head == head(
        b"POST " + target + b" HTTP/1.1", host, *FIELDS, key, b"content-length: 3"
    )
    assert mail.upstream.requests[0].content == b"abc"


@pytest.mark.case("C203")
@pytest.mark.parametrize("key", [None, b"bare-request"])
async def test_bare_request_reaches_the_upstream_with_nothing_added(mail: Pair, key: bytes | None) -> None:
    extra = () if key is None else (b"Idempotency-Key: " + key,)
    lines = (b"Host: x", b"Authorization: Bearer bare", *extra, b"Content-Length: 2")
    await mail.ask(head(b"POST /mail/emails HTTP/1.1", *lines) + b"{}")
    await mail.ask(head(b"GET /mail/nothing HTTP/1.1", b"Host: x"))
    host = b"Host: 127.0.0.1:%d" % mail.upstream.port
    assert mail.upstream.requests[0].head == head(b"POST /emails HTTP/1.1", host, *lines[1:])
    assert mail.upstream.requests[1].head == head(b"GET /nothing HTTP/1.1", host)


@pytest.mark.case("C204")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_hop_by_hop_fields_travel_neither_way_nor_into_the_replay(mail: Pair, target: str) -> None:
    dropped = {
        "Connection": "close, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "timeout=5",
        "TE": "trailers",
        "Proxy-Authorization": "x",
        "Proxy-Connection": "close",
        "Upgrade": "h2c",
        "Trailer": "X-Sum",
    }
    back = [("Connection", "X-Up"), ("X-Up", "2"), ("Keep-Alive", "timeout=9"), ("Proxy-Authenticate", "Basic")]
    mail.upstream.default = answer(200, [*back, ("X-Kept", "3")])
    key = f"hops {target}"
    sent = post(key, target=target, fields=[*dropped.items(), ("Authorization", "Bearer hop")])
    first, second = [await mail.ask(sent) for _ in range(2)]
    for name in dropped:
        assert mail.upstream.requests[0].first(name) is None, name
    assert mail.upstream.requests[0].first("authorization") == b"Bearer hop"
    for got in (first, second):
        assert got.first("x-kept") == b"3"
        assert not [name for name, _ in back if got.first(name) not in (None, b"close")]
        assert got.every("connection") == [b"close"]


CONTENTS = {
    "binary": bytes(range(256)) * 3,
    "spaced JSON": b' {"b" : 1.0,\r\n\t"a":[ ] , "b":"\\u00e9" }\n\n',
    "gzip": gzipped(b'{"a":1}'),
    "not UTF-8": b"\xff\xfe{\x80",
    "empty": b"",
}


@pytest.mark.case("C205", "C206")
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_content_and_its_labels_reach_the_upstream_unchanged(mail: Pair, kind: str, target: str) -> None:
    content = CONTENTS[kind]
    codings = ["gzip", "br", "zstd", "gzip, br"] if kind in ("gzip", "binary") else [None]
    for number, coding in enumerate(codings):
        digest = hashlib.sha256(content).hexdigest()
        fields = [("Authorization", "Bearer one"), ("Content-Type", "application/json"), ("X-Sha", digest)]
        fields += [("Content-Encoding", coding)] if coding else []
        got = await mail.ask(post(f"content {kind} {number} {target}", content, target, fields))
        assert got.status == 200
        seen = mail.upstream.requests[number]
        assert hashlib.sha256(seen.content).hexdigest().encode() == seen.first("x-sha")
        assert seen.first("content-encoding") == (coding.encode() if coding else None)
        assert seen.every("content-length") == [b"%d" % len(content)]


@pytest.mark.case("C207")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_request_in_many_chunks_arrives_whole_and_its_trailer_is_dropped(mail: Pair, target: str) -> None:
    pieces = [b"%d," % number * (number % 7 + 1) for number in range(200)]
    fields = [("Authorization", "Bearer one"), ("Transfer-Encoding", "chunked"), ("Trailer", "X-Sum")]
    parts = [request("POST", target, fields, key=f"chunks {target}")]
    parts += [b"%X;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    async with await mail.client() as client:
        await client.send_pieces([*parts, b"0\r\nX-Sum: 77\r\nIdempotency-Key: other\r\n\r\n"])
        assert (await client.answer()).status == 200
    seen = mail.upstream.requests[0]
    assert seen.content == b"".join(pieces)
    assert seen.first("x-sum") is None
    assert seen.first("trailer") is None
    assert seen.every("idempotency-key") == [f"chunks {target}".encode()]
    assert len(seen.every("content-length") + seen.every("transfer-encoding")) == 1


ANSWER: list[tuple[str, str | bytes]] = [
    ("X-One", "1"),
    ("set-cookie", "a=b; Path=/"),
    ("x-one", "2"),
    ("Content-Type", "text/odd; charset=x"),
    ("SET-COOKIE", "c=d"),
    ("Date", "Mon, 01 Jan 2024 00:00:00 GMT"),
    ("X-Bytes", b"caf\xe9 \x80\xff"),
    ("Server", "theirs"),
    ("Content-Length", "4"),
    ("X-Last", ""),
]


@pytest.mark.case("C208")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
@pytest.mark.parametrize("status", [200, 207, 404, 422, 500, 599])
async def test_fresh_answer_is_the_upstreams_byte_for_byte(mail: Pair, target: str, status: int) -> None:
    mail.upstream.default = answer(status, ANSWER, b"\x00\xff\r\n", reason=b"Quite F\xefne")
    async with await mail.client() as client:
        got = await client.ask(post(f"answer {target} {status}", target=target))
    lines = [b"%b: %b" % (_bytes(name), _bytes(value)) for name, value in ANSWER]
    assert got.head == head(b"HTTP/1.1 %d Quite F\xefne" % status, *lines)
    assert got.content == b"\x00\xff\r\n"


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


@pytest.mark.case("C209")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_answer_has_exactly_one_framing_and_it_is_true(mail: Pair, target: str) -> None:
    whole = b"first,second,third"
    fields = [("Content-Type", "text/plain"), ("Trailer", "X-Sum")]
    mail.upstream.script(
        chunked([b"first,", b"second,", b"third"], fields=fields, trailer=b"X-Sum: 1\r\n"), answer(200, [], whole)
    )
    for key in ("framing by chunks", "framing by length"):
        for _ in range(2 if "emails" in target else 1):
            got = await mail.ask(post(key + target, target=target))
            assert got.content == whole
            assert len(got.every("content-length") + got.every("transfer-encoding")) == 1
            assert got.first("x-sum") is None


@pytest.mark.case("C210")
async def test_answers_without_content_leave_the_socket_fit_for_the_next_request(mail: Pair) -> None:
    get = request("GET", "/mail/next")
    async with await mail.client() as client:
        for status in (204, 304):
            fields = [("ETag", '"e"')] if status == 304 else []
            mail.upstream.script(answer(status, fields, b""))
            got = await client.ask(request("GET", "/mail/none"))
            assert (got.status, got.every("transfer-encoding")) == (status, [])
            if status == 204:
                assert got.every("content-length") == []
            assert (await client.ask(get)).content.startswith(b'{"object"')
        mail.upstream.script(answer(200, [("Content-Length", "512")], b""))
        got = await client.ask(request("HEAD", "/mail/head"))
        assert got.every("content-length") == [b"512"]
        assert (await client.ask(get)).content.startswith(b'{"object"')
        mail.upstream.script(answer(204, [("X-Message-Id", "m")], b""))
        kept: list[Parsed] = [await client.ask(post("a 204")) for _ in range(2)]
        assert [(one.status, one.content, one.first("x-message-id")) for one in kept] == [(204, b"", b"m")] * 2
        assert [one.every("content-length") + one.every("transfer-encoding") for one in kept] == [[], []]
        assert [one.replayed for one in kept] == [False, True]
        assert (await client.ask(get)).content.startswith(b'{"object"')


@pytest.mark.case("C211")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_interim_answers_are_dropped_and_only_the_final_one_is_kept(mail: Pair, target: str) -> None:
    mail.upstream.script(interim(103, [("Link", "</a>")], interim(102, [], answer(200, [], b"final"))))
    for number in range(2 if "emails" in target else 1):
        got = await mail.ask(post(f"interim {target}", target=target))
        assert (got.status, got.interim, got.content, got.first("link")) == (200, (), b"final", None)
        assert got.replayed == bool(number)
    assert mail.count == 1


@pytest.mark.case("C212")
async def test_redirect_is_given_to_the_client_and_neither_followed_nor_kept(mail: Pair) -> None:
    for status in (302, 307, 308):
        mail.forget()
        mail.upstream.script(answer(status, [("Location", f"{mail.upstream.url}/elsewhere")], b""))
        got = await mail.ask(post(f"redirect {status}"))
        assert (got.status, got.first("location")) == (status, f"{mail.upstream.url}/elsewhere".encode())
        assert mail.count == 1
        again = await mail.ask(post(f"redirect {status}"))
        assert (again.status, again.replayed, mail.count) == (200, False, 2)


@pytest.mark.case("C213")
async def test_cookie_of_one_client_is_sent_for_nobody(mail: Pair) -> None:
    mail.upstream.default = answer(200, [("Set-Cookie", "sid=A; Path=/")])
    for credential in ("A", "B", "A"):
        await mail.ask(post(None, fields=[("Authorization", credential)]))
        await mail.ask(request("GET", "/mail/other", [("Authorization", credential)]))
    assert [one.first("cookie") for one in mail.upstream.requests] == [None] * 6


@pytest.mark.case("C214")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_long_fields_many_fields_and_a_long_target_arrive_unchanged(mail: Pair, target: str) -> None:
    long = [("Authorization", "Bearer one"), ("X-Certificate", "c" * 12 * 1024)]
    many = [("Authorization", "Bearer one"), *((f"X-Line-{number}", str(number)) for number in range(120))]
    query = "?" + "q" * 9 * 1024
    for number, (fields, more) in enumerate(((long, ""), (many, ""), ([], query))):
        got = await mail.ask(post(f"long {target} {number}", MAIL, target + more, fields))
        assert got.status == 200
        seen = mail.upstream.requests[number]
        assert [pair for pair in seen.fields if pair[0].startswith((b"X-", b"Auth"))] == [
            (name.encode(), value.encode()) for name, value in fields
        ]
        assert seen.target.decode().endswith(more)


@pytest.mark.case("C215")
async def test_key_that_looks_like_an_escape_stays_text_in_both_directions(mail: Pair) -> None:
    key = "K1%0d%0aX-Evil:1"
    got = [await mail.ask(post(key)) for _ in range(2)]
    assert [one.replayed for one in got] == [False, True]
    assert mail.upstream.requests[0].first("idempotency-key") == key.encode()
    assert [one.first("x-evil") for one in got] == [None, None]
    assert mail.upstream.requests[0].first("x-evil") is None
