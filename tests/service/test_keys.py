"""What is one key and what are two: spelling, limits and scope."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from harness import Parsed, answer, echo, gate, request
from harness.program import MAIL
from harness.wire import Pairs
from lab import AUTHORIZATION, FIELDS, JSON, Lab, Settings, fresh, problem, stored

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(),
        "other": lab.route(),
        "resend": lab.route("resend"),
        "strict": lab.route(key={"missing": "reject", "max_length": 10}),
        "also": lab.route(key={"field": "Idempotency-Key", "also": ["amz-sdk-invocation-id", "/meta/key"]}),
        "postmark": lab.route(credential=["X-Postmark-Server-Token", "api-key"]),
        "aws": lab.route(credential=["aws-access-key"]),
        "open": lab.route(scope=["route"]),
        "teams": lab.route(scope=["credential", "field:X-Team"]),
    }


async def send_raw(lab: Lab, *lines: bytes, content: bytes = MAIL) -> Parsed:
    """One mail whose key lines are exactly `lines`."""
    head = request("POST", "/mail/emails", FIELDS, content)
    start, _, rest = head.partition(b"\r\n")
    async with await lab.one.client() as client:
        return await client.ask(b"\r\n".join((start, *lines, rest)))


def pair(lab: Lab, first: Parsed, again: Parsed) -> None:
    """Both were one request: one mail, and its replay."""
    assert lab.upstream.count == 1
    stored(first, again)


def bad(lab: Lab, given: Parsed) -> None:
    """The key was refused and nothing was sent."""
    problem(given, "key-malformed", 400, sent="no", retryable=False)
    assert lab.upstream.count == 0


# Spelling.


@pytest.mark.case("C111")
async def test_quoted_and_bare_key_are_one_and_each_goes_upstream_as_it_was_written(shared: Lab) -> None:
    for first_text, again_text in (("{}", '"{}"'), ('"{}"', "{}"), ('"a\\"b\\\\{}"', '"a\\"b\\\\{}"')):
        shared.reset()
        key = fresh()
        first = await shared.one.send(first_text.format(key))
        again = await shared.one.send(again_text.format(key))
        pair(shared, first, again)
        assert shared.upstream.requests[0].first("idempotency-key") == first_text.format(key).encode()


@pytest.mark.case("C112")
@pytest.mark.parametrize(
    "lines",
    [
        (b"Idempotency-Key: K1", b"Idempotency-Key: K1"),
        (b"Idempotency-Key: K1", b"Idempotency-Key: K2"),
        (b"Idempotency-Key: K1", b"idempotency-KEY: K1"),
        (b"Idempotency-Key: K1", b"Idempotency-Key: "),
    ],
)
async def test_two_key_lines_are_refused_and_nothing_is_sent(shared: Lab, lines: tuple[bytes, ...]) -> None:
    bad(shared, await send_raw(shared, *lines))


@pytest.mark.case("C112")
@pytest.mark.parametrize(
    "text",
    ["K1, K1", "K1,K2", '"K1', 'K1"', 'K"1', '"K1";v=1', '"K1" x', '"K1", "K2"', '"K\\1"', '"K1"K2', "é" * 3],
)
async def test_key_that_is_no_single_key_is_refused(shared: Lab, text: str) -> None:
    bad(shared, await send_raw(shared, b"Idempotency-Key: " + text.encode()))


@pytest.mark.case("C113")
@pytest.mark.parametrize("control", [b"\x01", b"\x7f", b"\t", b"\x1f"])
async def test_control_byte_in_a_key_is_refused(shared: Lab, control: bytes) -> None:
    given = await send_raw(shared, b"Idempotency-Key: K" + control + b"1")
    assert given.status == 400
    assert given.slug in ("key-malformed", "request-malformed")
    assert shared.upstream.count == 0


@pytest.mark.case("C113")
@pytest.mark.parametrize("control", [b"\n", b"\r", b"\0"])
async def test_line_break_or_nul_in_a_key_is_refused_and_the_connection_ends(shared: Lab, control: bytes) -> None:
    head = request("POST", "/mail/emails", [*FIELDS, ("Idempotency-Key", b"K1" + control + b"X-Evil:1")], MAIL)
    async with await shared.one.client() as client:
        assert (await client.ask(head)).status == 400
        assert await client.rest() == b""
    assert shared.upstream.begun == []


@pytest.mark.case("C113")
async def test_percent_text_in_a_key_stays_text(shared: Lab) -> None:
    key = fresh() + "%0d%0aX-Evil:1"
    first = await shared.one.send(key)
    pair(shared, first, await shared.one.send(key))
    assert shared.upstream.requests[0].first("idempotency-key") == key.encode()
    assert shared.upstream.requests[0].first("x-evil") is None


@pytest.mark.case("C114")
async def test_longest_key_is_taken_one_more_is_refused_and_the_decoded_key_counts(shared: Lab) -> None:
    start = fresh()
    for text in (start.ljust(255, "x"), start.ljust(256, "y"), f'"{start.ljust(256, "z")}"'):
        shared.reset()
        first = await shared.one.send(text)
        pair(shared, first, await shared.one.send(text))
    shared.reset()
    for text in (start.ljust(257, "x"), "é" * 200, f'"{"x" * 257}"'):
        bad(shared, await send_raw(shared, b"Idempotency-Key: " + text.encode()))
    given = await shared.one.send("12345678901", target="/strict/emails")
    bad(shared, given)
    assert (await shared.one.send("1234567890", target="/strict/emails")).status == 200


@pytest.mark.case("C115")
async def test_keys_that_differ_in_case_or_punctuation_are_two(shared: Lab) -> None:
    start = fresh()
    parts = ("K", "k", ":a", "/a", "%3Aa", "{a}", "{a", "a}b{c}", "*", "a b", "a  b", "..", "\\a", "$a", "'a'")
    texts = [f"{start}{part}" for part in parts]
    for text in texts:
        assert (await shared.one.send(text)).status == 200
    assert shared.upstream.count == len(texts)
    for text in texts:
        assert (await shared.one.send(text)).replayed
    assert shared.upstream.count == len(texts)


@pytest.mark.case("C111")
async def test_blanks_around_a_key_do_not_count(shared: Lab) -> None:
    key = fresh()
    first = await send_raw(shared, b"Idempotency-Key:  \t" + key.encode() + b" \t ")
    pair(shared, first, await shared.one.send(key))


@pytest.mark.case("C116")
async def test_bad_key_is_told_before_a_missing_credential_and_the_upstream_is_not_asked(shared: Lab) -> None:
    given = await shared.one.send("K1, K2", fields=(), target="/resend/emails")
    members = problem(given, "key-malformed", 400, sent="no", retryable=False)
    assert members["name"] == "invalid_idempotency_key"
    assert shared.upstream.begun == []


@pytest.mark.case("C117")
async def test_further_sources_give_the_key_in_their_order_and_never_meet(shared: Lab) -> None:
    key = fresh()
    content = json.dumps({"meta": {"key": key}}).encode()
    told = [*FIELDS, ("amz-sdk-invocation-id", key)]
    target = "/also/emails"
    for fields, key_field in ((FIELDS, None), (told, None), (told, key)):
        shared.reset()
        first = await shared.one.send(key_field, content, target, fields)
        pair(shared, first, await shared.one.send(key_field, content, target, fields))


# Scope.


async def fresh_each(lab: Lab, key: str, target: str, *all_fields: Pairs) -> None:
    """Every one of `all_fields` is a mail of its own under `key`, and each is replayed to itself alone."""
    lab.upstream.default = echo()
    for number, fields in enumerate(all_fields):
        content = b'{"caller": %d}' % number
        assert (await lab.one.send(key, content, target, [*fields, JSON])).content == content
    assert lab.upstream.count == len(all_fields)
    for number, fields in enumerate(all_fields):
        content = b'{"caller": %d}' % number
        again = await lab.one.send(key, content, target, [*fields, JSON])
        assert (again.replayed, again.content) == (True, content)
    assert lab.upstream.count == len(all_fields)


@pytest.mark.case("C118")
async def test_two_credentials_and_none_never_share_a_record(shared: Lab) -> None:
    fields: tuple[Pairs, ...] = (
        [("Authorization", "Bearer A")],
        [("Authorization", "Bearer B")],
        [],
        [("Authorization", "")],
    )
    await fresh_each(shared, fresh(), "/mail/emails", *fields)


@pytest.mark.case("C118")
async def test_each_provider_field_is_a_credential(shared: Lab) -> None:
    basic = base64.b64encode(b"api:secret").decode()
    await fresh_each(
        shared, fresh(), "/mail/emails", [("Authorization", f"Basic {basic}")], [("Authorization", "Basic x")]
    )
    shared.reset()
    await fresh_each(
        shared,
        fresh(),
        "/postmark/emails",
        [("X-Postmark-Server-Token", "A")],
        [("X-Postmark-Server-Token", "B")],
        [("api-key", "A")],
        [("api-key", "B")],
        [("api-key", "A"), ("X-Postmark-Server-Token", "A")],
        [("Authorization", "no credential here")],
    )


@pytest.mark.case("C119")
async def test_aws_access_key_id_alone_is_the_credential(shared: Lab) -> None:
    def signed(access: str, day: int) -> Pairs:
        text = f"AWS4-HMAC-SHA256 Credential={access}/2026090{day}/eu-west-1/ses/aws4_request, SignedHeaders=host"
        return [("Authorization", f"{text}, Signature=ab{day}"), ("X-Amz-Date", f"2026090{day}T000000Z"), JSON]

    key, target = fresh(), "/aws/emails"
    first = await shared.one.send(key, target=target, fields=signed("AKIAONE", 1))
    pair(shared, first, await shared.one.send(key, target=target, fields=signed("AKIAONE", 2)))
    assert not (await shared.one.send(key, target=target, fields=signed("AKIATWO", 1))).replayed
    assert shared.upstream.count == 2


@pytest.mark.case("C120")
async def test_one_key_on_two_routes_is_two_mails(shared: Lab) -> None:
    key = fresh()
    for target in ("/mail/emails", "/other/emails"):
        assert not (await shared.one.send(key, target=target)).replayed
    for target in ("/mail/emails", "/other/emails"):
        assert (await shared.one.send(key, target=target)).replayed
    assert shared.count(key) == 2


@pytest.mark.case("C120")
async def test_route_scope_and_field_scope_say_who_shares(shared: Lab) -> None:
    key = fresh()
    cookie = answer(200, [("Set-Cookie", "sid=1")])
    shared.upstream.script(cookie)
    first = await shared.one.send(key, target="/open/emails", fields=[("Authorization", "A")])
    again = await shared.one.send(key, target="/open/emails", fields=[("Authorization", "B")])
    assert (again.replayed, again.content, shared.count(key)) == (True, first.content, 1)
    # Only the credential in the scope says that this client is the one the cookie was for.
    assert (first.first("set-cookie"), again.first("set-cookie")) == (b"sid=1", None)
    key = fresh()
    shared.reset()
    team = [[AUTHORIZATION, ("X-Team", "A")], [AUTHORIZATION, ("X-Team", "B")], [AUTHORIZATION]]
    await fresh_each(shared, key, "/teams/emails", *team, [("Authorization", "Bearer two"), ("X-Team", "A")])


@pytest.mark.case("C121")
async def test_busy_key_of_one_credential_does_not_block_another_nor_another_key(shared: Lab) -> None:
    key = fresh()
    opened = asyncio.Event()
    shared.upstream.script(gate(opened))
    async with await shared.one.client() as client:
        await client.send(request(content=MAIL, fields=FIELDS, key=key))
        await shared.upstream.reached(1)
        other = await shared.one.send(key, fields=[("Authorization", "Bearer two")])
        unrelated = await shared.one.send(fresh())
        assert (other.status, unrelated.status, shared.upstream.count) == (200, 200, 3)
        opened.set()
        assert (await client.answer()).status == 200
