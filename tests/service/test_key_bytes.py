"""Every byte there is, in keys, in names and values of fields, and in targets."""

from __future__ import annotations

import pytest
from harness import Client, request
from pair import Pair, each_test, head, module_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair()
mail = each_test()

TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def keyed(line: bytes, content: bytes = b"{}", *more: bytes) -> bytes:
    """A send whose key line is exactly `line`."""
    length = b"Content-Length: %d" % len(content)
    return head(b"POST /mail/emails HTTP/1.1", b"Host: h", line, length, *more) + content


PRINTABLE = set(range(0x20, 0x7F)) - {0x22, 0x2C}


@pytest.mark.case("C312")
@pytest.mark.parametrize(
    ("begin", "end", "taken"),
    [
        # At the ends space and tab are trimmed: both would leave one key.
        (b"", b"-end", PRINTABLE - {0x20} | {0x09}),
        (b"begin-", b"", PRINTABLE - {0x20} | {0x09}),
        (b"in-", b"-in", PRINTABLE),
        # Within quotes a comma is text, and a backslash has to be followed by a quote or another one.
        (b'"quoted-', b'-quoted"', PRINTABLE - {0x5C} | {0x2C}),
    ],
)
async def test_key_with_any_byte_is_its_own_or_is_refused(
    mail: Pair, begin: bytes, end: bytes, taken: set[int]
) -> None:
    seen = set()
    for code in range(256):
        if code == 0x20 and code not in taken:
            continue
        # Another content under each: two keys that met would be 422.
        got = await mail.ask(keyed(b"Idempotency-Key: " + begin + bytes((code,)) + end, b"[%d]" % code))
        if got.status == 200:
            seen.add(code)
        else:
            assert (got.status, got.slug in ("key-malformed", "request-malformed")) == (400, True), (code, got)
        assert not got.replayed
    assert seen == taken
    assert mail.count == len(taken)


@pytest.mark.case("C312")
async def test_field_with_any_byte_travels_as_it_is_or_is_refused(mail: Pair) -> None:
    passed: dict[int, bytes | None] = {}
    for code in range(256):
        line = b"X-Byte: a" + bytes((code,)) + b"z"
        got = await mail.ask(head(b"GET /mail/x HTTP/1.1", b"Host: h", line))
        assert got.status in (200, 400)
        if got.status == 200:
            passed[code] = mail.upstream.requests[-1].first("x-byte")
    legal = {0x09, *range(0x20, 0x7F), *range(0x80, 0x100)}
    assert set(passed) == legal
    assert all(value == b"a" + bytes((code,)) + b"z" for code, value in passed.items())


@pytest.mark.case("C312")
async def test_field_name_with_any_byte_is_a_token_or_is_refused(mail: Pair) -> None:
    for code in range(256):
        before = mail.count
        got = await mail.ask(head(b"GET /mail/x HTTP/1.1", b"Host: h", b"X" + bytes((code,)) + b"Y: v"))
        if code in TOKEN:
            assert got.status == 200, code
            assert (b"X" + bytes((code,)) + b"Y", b"v") in mail.upstream.requests[-1].fields
        elif code == 0x3A:
            assert (b"X", b"Y: v") in mail.upstream.requests[-1].fields
        else:
            assert (got.status, mail.count) == (400, before), code


@pytest.mark.case("C312")
async def test_target_with_any_byte_keeps_it_or_is_refused(mail: Pair) -> None:
    for code in range(256):
        before = mail.count
        got = await mail.ask(b"GET /mail/a" + bytes((code,)) + b"z HTTP/1.1\r\nHost: h\r\n\r\n")
        if 0x21 <= code <= 0x7E and code != 0x23:
            assert (got.status, mail.upstream.requests[-1].target) == (200, b"/a" + bytes((code,)) + b"z")
        else:
            assert (got.status, mail.count) == (400, before), code


@pytest.mark.case("C312")
async def test_keys_made_to_look_alike_stay_apart(mail: Pair) -> None:
    alike = [
        b"a",
        b"A",
        b"a.",
        b"a%00",
        b"a\\",
        b"a*",
        b"{a}",
        b"a}{b",
        b"a:b",
        b"a/b",
        b"../a",
        b"a b",
        b"a  b",
        b"%61",
    ]
    alike += [b"a" * size for size in (2, 255, 256)]
    async with await Client.open(mail.sidecar.base) as client:
        for number, key in enumerate(alike):
            got = await client.ask(keyed(b"Idempotency-Key: " + key, b"[%d]" % number))
            assert (got.status, got.replayed) == (200, False), key
    assert mail.count == len(alike)
    # The same bytes under another credential, or as another route's key, are another record as well.
    for number, given in enumerate((b"Bearer a", b"Bearer a ", b"bearer a", b"", b"Bearer a:6:record")):
        got = await mail.ask(keyed(b"Idempotency-Key: a", b"[9%d]" % number, b"Authorization: " + given))
        assert got.status in ((200,) if number != 1 else (422,)), given


@pytest.mark.case("C312")
async def test_key_above_its_limit_is_refused_however_it_is_quoted(mail: Pair) -> None:
    for key in (b"a" * 257, b'"' + b"a" * 257 + b'"', b'"' + b'\\"' * 257 + b'"', b"a" * 60_000):
        got = await mail.ask(keyed(b"Idempotency-Key: " + key))
        assert (got.status, got.slug) == (400, "key-malformed")
    assert (await mail.ask(keyed(b'Idempotency-Key: "' + b'\\"' * 256 + b'"'))).status == 200
    assert (await mail.ask(request("POST", "/mail/emails", [], b"{}", key=b'"' + b'"' * 3))).status == 400
    assert mail.count == 1
