"""What makes two requests the same under one key, and what makes the second one a refusal."""

from __future__ import annotations

import json

import pytest
from harness import Parsed, answer, request
from harness.program import MAIL
from harness.wire import Pairs
from lab import AUTHORIZATION, FIELDS, Lab, Settings, fresh, problem, stored

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

FORM = ("Content-Type", "application/x-www-form-urlencoded")
OTHER = MAIL.replace(b"hello", b"goodbye")


def routes(lab: Lab) -> dict[str, Settings]:
    return {
        "mail": lab.route(),
        "off": lab.route(fingerprint="off"),
        "ignore": lab.route(fingerprint={"ignore": ["/sent_at", "/meta/id"]}),
        "put": lab.route(sends=["PUT /things/{id}", "POST /emails"]),
        "conflict": lab.route(fingerprint={"mismatch": 409}),
    }


def pair(lab: Lab, first: Parsed, again: Parsed) -> None:
    """Both were one request: one mail, and its replay."""
    assert lab.upstream.count == 1
    stored(first, again)


@pytest.mark.case("C122")
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (b'{"to":"b@ex.test","subject":"s"}', b'{ "subject":"s", "to":"b@ex.test" }'),
        (b'{"a":{"x":1,"y":[{"p":1,"q":2}]}}', b'{"a":{"y":[{"q":2,"p":1}],"x":1}}'),
        (b'{"a":"\\u0041\\u00e9"}', '{"a":"Aé"}'.encode()),
    ],
)
async def test_the_same_json_written_otherwise_is_a_replay(shared: Lab, one: bytes, two: bytes) -> None:
    key = fresh()
    first = await shared.one.send(key, one)
    pair(shared, first, await shared.one.send(key, two))
    assert shared.upstream.requests[0].content == one


@pytest.mark.case("C122")
@pytest.mark.parametrize("two", [b'{"n":1.0}', b'{"n":"1"}', b'{"n":null}', b"{}", b'{"n":[1]}'])
async def test_other_json_values_are_other_requests(shared: Lab, two: bytes) -> None:
    key = fresh()
    await shared.one.send(key, b'{"n":1}')
    problem(await shared.one.send(key, two), "key-reused", 422, sent="unknown", retryable=False)
    assert shared.upstream.count == 1


@pytest.mark.case("C122")
async def test_multipart_with_another_boundary_is_a_replay_and_another_byte_is_not(shared: Lab) -> None:
    def parts(boundary: bytes, attachment: bytes) -> bytes:
        disposition = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        lines = [disposition % (boundary, name, b"", value) for name, value in ((b"to", b"b"), (b"text", b"hi"))]
        lines.append(disposition % (boundary, b"file", b'; filename="a.bin"', attachment))
        return b"".join(lines) + b"--%b--\r\n" % boundary

    def fields(boundary: str) -> Pairs:
        return [AUTHORIZATION, ("Content-Type", f"multipart/form-data; boundary={boundary}")]

    key = fresh()
    first = await shared.one.send(key, parts(b"AAA", b"abc"), fields=fields("AAA"))
    pair(shared, first, await shared.one.send(key, parts(b"BBB", b"abc"), fields=fields("BBB")))
    other = await shared.one.send(key, parts(b"CCC", b"abd"), fields=fields("CCC"))
    problem(other, "key-reused", 422, sent="unknown", retryable=False)
    assert shared.upstream.count == 1


@pytest.mark.case("C123")
async def test_raw_mime_as_content_is_bytes_and_off_takes_anything(shared: Lab) -> None:
    mime = [AUTHORIZATION, ("Content-Type", "message/rfc822")]
    one, two = b"Date: 1\r\nTo: b\r\n\r\nhi", b"Date: 2\r\nTo: c\r\n\r\nhi"
    key = fresh()
    await shared.one.send(key, one, fields=mime)
    problem(await shared.one.send(key, two, fields=mime), "key-reused", 422, sent="unknown", retryable=False)
    shared.reset()
    first = await shared.one.send(key, one, "/off/emails", mime)
    pair(shared, first, await shared.one.send(key, two, "/off/emails", mime))


@pytest.mark.case("C123")
async def test_ignored_members_do_not_count_and_the_first_ones_were_sent(shared: Lab) -> None:
    def content(at: int, text: str) -> bytes:
        return json.dumps({"text": text, "sent_at": at, "meta": {"id": at}}).encode()

    key, target = fresh(), "/ignore/emails"
    first = await shared.one.send(key, content(1, "a"), target)
    pair(shared, first, await shared.one.send(key, content(2, "a"), target))
    assert shared.upstream.requests[0].content == content(1, "a")
    other = await shared.one.send(key, content(2, "b"), target)
    problem(other, "key-reused", 422, sent="unknown", retryable=False)


@pytest.mark.case("C124")
async def test_mismatch_has_the_status_the_route_says(shared: Lab) -> None:
    key = fresh()
    await shared.one.send(key, target="/conflict/emails")
    other = await shared.one.send(key, b"{}", "/conflict/emails")
    problem(other, "key-reused", 409, sent="unknown", retryable=False)
    assert shared.upstream.count == 1


@pytest.mark.case("C122")
async def test_form_pairs_may_move_between_names_and_not_within_one(shared: Lab) -> None:
    fields = [AUTHORIZATION, FORM]
    key = fresh()
    first = await shared.one.send(key, b"to=a&to=b&text=x+y", fields=fields)
    pair(shared, first, await shared.one.send(key, b"text=x%20y&to=a&to=b", fields=fields))
    other = await shared.one.send(key, b"to=b&to=a&text=x+y", fields=fields)
    problem(other, "key-reused", 422, sent="unknown", retryable=False)
    assert shared.upstream.count == 1


@pytest.mark.case("C124")
async def test_other_content_path_query_or_method_is_refused_and_not_sent(shared: Lab) -> None:
    key = fresh()
    first = await shared.one.send(key)
    for content, target in (
        (OTHER, "/mail/emails"),
        (b"", "/mail/emails"),
        (MAIL, "/mail/emails/batch"),
        (MAIL, "/mail/emails?x=1"),
    ):
        problem(await shared.one.send(key, content, target), "key-reused", 422, sent="unknown", retryable=False)
    stored(first, await shared.one.send(key))
    assert shared.count(key) == 1
    key = fresh()
    async with await shared.one.client() as client:
        assert (await client.ask(request("PUT", "/put/things/1", FIELDS, MAIL, key=key))).status == 200
    reused = await shared.one.send(key, target="/put/emails")
    problem(reused, "key-reused", 422, sent="unknown", retryable=False)
    assert shared.count(key) == 1


@pytest.mark.case("C125")
async def test_key_of_a_recorded_refusal_is_reused_with_sent_no(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(answer(422))
    assert (await shared.one.send(key)).status == 422
    problem(await shared.one.send(key, OTHER), "key-reused", 422, sent="no", retryable=False)
    assert shared.count(key) == 1


@pytest.mark.case("C124")
async def test_empty_content_twice_is_a_replay(shared: Lab) -> None:
    key = fresh()
    first = await shared.one.send(key, b"")
    stored(first, await shared.one.send(key, b""))
    problem(await shared.one.send(key, b"x"), "key-reused", 422, sent="unknown", retryable=False)
    assert shared.count(key) == 1


@pytest.mark.case("C124")
async def test_other_fields_alone_are_the_same_request(shared: Lab) -> None:
    key = fresh()
    first = await shared.one.send(key, fields=[*FIELDS, ("User-Agent", "a"), ("traceparent", "00-1")])
    again = await shared.one.send(key, fields=[*FIELDS, ("User-Agent", "b"), ("X-Forwarded-For", "::1")])
    stored(first, again)
    assert shared.count(key) == 1
