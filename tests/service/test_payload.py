"""What makes two requests the same: seen from outside, a handful of each kind; the tables are in the core's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import RedisServer, request, slow
from pair import Pair, each_test, gzipped, module_pair, post, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared = module_pair()
mail = each_test()

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
BEARER = ("Authorization", "Bearer one")


def multipart(boundary: str, file: bytes = b"\x00\xff", name: str = "a.bin", to: bytes = b"b@example.com") -> bytes:
    """Two parts under this boundary."""
    parts = [
        b'Content-Disposition: form-data; name="to"\r\n\r\n' + to,
        b'Content-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: x/y\r\n\r\n%b'
        % (name.encode(), file),
    ]
    mark = b"--" + boundary.encode()
    return mark + b"\r\n" + (b"\r\n" + mark + b"\r\n").join(parts) + b"\r\n" + mark + b"--\r\n"


PARTS = "multipart/form-data; boundary="
SAME = {
    "members in another order, at any depth": (
        JSON,
        b'{"a":1,"b":{"c":[1,2],"d":null}}',
        JSON,
        b'{"b":{"d":null,"c":[1,2]},"a":1}',
    ),
    "other white space": (JSON, b'{"a":[1,2]}', JSON, b'\r\n{ "a" :\t[1, 2] } \n'),
    "escapes of the same text": (JSON, b'{"a":"\xc3\xa9/"}', JSON, b'{"\\u0061":"\\u00e9\\/"}'),
    "media type with parameters": (JSON, b'{"a":1}', JSON + "; charset=utf-8", b'{"a": 1}'),
    "form in another order of names": (FORM, b"a=1&b=2&a=3", FORM, b"b=2&a=1&a=3"),
    "form escaped otherwise": (FORM, b"to=a%40b.test&s=x+y", FORM, b"to=a@b.test&s=x%20y"),
    "multipart under another boundary": (PARTS + "one", multipart("one"), PARTS + "two", multipart("two")),
    "nothing twice": (JSON, b"", JSON, b""),
    "the same bytes": ("text/plain", b"\xff\x00 a", "text/plain", b"\xff\x00 a"),
}
OTHER = {
    "another value": (JSON, b'{"a":1}', JSON, b'{"a":2}'),
    "another order in an array": (JSON, b'{"a":[1,2]}', JSON, b'{"a":[2,1]}'),
    "number written otherwise": (JSON, b'{"a":1}', JSON, b'{"a":1.0}'),
    "number and text": (JSON, b'{"a":1}', JSON, b'{"a":"1"}'),
    "null and absent": (JSON, b'{"a":1,"b":null}', JSON, b'{"a":1}'),
    "large numbers apart by one": (JSON, b'{"a":9007199254740993}', JSON, b'{"a":9007199254740992}'),
    "empty, then not": (JSON, b"", JSON, b"{}"),
    "tail of a long text": (JSON, b'{"a":"%b1"}' % (b"x" * 2_000_000), JSON, b'{"a":"%b2"}' % (b"x" * 2_000_000)),
    "another media type": (JSON, b'{"a":1}', "text/plain", b'{"a":1}'),
    "form value": (FORM, b"a=1&a=2", FORM, b"a=2&a=1"),
    "one byte of a file": (PARTS + "one", multipart("one"), PARTS + "two", multipart("two", b"\x00\xfe")),
    "name of a file": (PARTS + "one", multipart("one"), PARTS + "two", multipart("two", name="b.bin")),
    "plain bytes": ("text/plain", b"a b", "text/plain", b"a  b"),
    "broken JSON": (JSON, b'{"a":1', JSON, b'{"a": 1'),
    "doubled members": (JSON, b'{"a":1,"a":2}', JSON, b'{"a":2,"a":1}'),
}


async def twice(mail: Pair, key: str, pair: tuple[str, bytes, str, bytes]) -> tuple[int, bool, int]:
    """Status and mark of the second answer, and how many requests the upstream has read."""
    first_type, first, second_type, second = pair
    await mail.ask(post(key, first, fields=[BEARER, ("Content-Type", first_type)]))
    got = await mail.ask(post(key, second, fields=[BEARER, ("Content-Type", second_type)]))
    assert got.slug == ("" if got.replayed else "key-reused")
    assert mail.upstream.requests[0].content == first
    return got.status, got.replayed, mail.count


@pytest.mark.case("C254")
@pytest.mark.parametrize("what", SAME)
async def test_same_mail_written_otherwise_is_replayed(mail: Pair, what: str) -> None:
    assert await twice(mail, f"same {list(SAME).index(what)}", SAME[what]) == (200, True, 1)


@pytest.mark.case("C255")
@pytest.mark.parametrize("what", OTHER)
async def test_other_mail_under_the_key_is_refused_and_not_forwarded(mail: Pair, what: str) -> None:
    key = f"other {list(OTHER).index(what)}"
    assert await twice(mail, key, OTHER[what]) == (422, False, 1)
    again = await mail.ask(post(key, OTHER[what][1], fields=[BEARER, ("Content-Type", OTHER[what][0])]))
    assert (again.status, again.replayed, mail.count) == (200, True, 1)


@pytest.mark.case("C256")
@pytest.mark.parametrize("target", ["/mail/emails/batch", "/mail/emails?x=1", "/mail/emails?", "/mail/emails?b=2&a=1"])
async def test_other_path_or_query_under_the_key_is_refused(mail: Pair, target: str) -> None:
    key = f"target {target}".replace("?", "!")
    start = "/mail/emails?a=1&b=2" if "b=2" in target else "/mail/emails"
    first = await mail.ask(post(key, target=start))
    got = await mail.ask(post(key, target=target))
    if target.endswith("?"):
        # No query and an empty one: the same by the bytes that follow the first `?`.
        assert (got.status, got.replayed) in ((200, True), (422, False))
    else:
        assert (first.status, got.status, got.slug) == (200, 422, "key-reused")
    assert mail.count == 1


@pytest.mark.case("C256")
async def test_other_spellings_of_the_path_are_the_same_mail(mail: Pair) -> None:
    targets = [
        "/mail/emails",
        "/mail//emails",
        "/mail/emails/",
        "/mail/%65mails",
        "/mail/x/../emails",
        "//mail/./emails",
    ]
    got = [await mail.ask(post("spelt", target=target)) for target in targets]
    assert [one.replayed for one in got] == [False] + [True] * 5
    assert mail.count == 1


@pytest.mark.case("C257")
async def test_other_fields_alone_are_the_same_mail(mail: Pair) -> None:
    base = [BEARER, ("Content-Type", JSON)]
    more = [("User-Agent", "x/2"), ("traceparent", "00-2-2-01"), ("X-Forwarded-For", "192.0.2.7"), ("Date", "now")]
    got = [await mail.ask(post("fields alone", fields=fields)) for fields in (base, [*base, *more], [*more, *base])]
    assert [one.replayed for one in got] == [False, True, True]
    assert mail.count == 1


@pytest.mark.case("C258")
async def test_coded_content_is_compared_undone_and_forwarded_as_it_came(mail: Pair) -> None:
    content = b'{"b":1,"a":"' + b"x" * 500 + b'"}'
    fields = [BEARER, ("Content-Type", JSON), ("Content-Encoding", "gzip")]
    first = gzipped(content, 9)
    got = [
        await mail.ask(post("coded", data, fields=fields if coded else fields[:2]))
        for data, coded in (
            (first, True),
            (gzipped(content, 1), True),
            (gzipped(b" " + content), True),
            (content, False),
        )
    ]
    assert [one.replayed for one in got] == [False, True, True, True]
    refused = await mail.ask(post("coded", gzipped(content + b" 1"), fields=fields))
    assert (refused.status, mail.count) == (422, 1)
    assert mail.upstream.requests[0].content == first


@pytest.mark.case("C259")
async def test_ignored_members_do_not_count_and_the_provider_saw_the_first(
    tmp_path: Path, session_store: RedisServer
) -> None:
    rules = {"ignore": ["/sent_at", "/meta/trace", "/not/there"]}
    async with running(tmp_path, session_store.url, fingerprint=rules) as pair:
        mails = [b'{"to":"b","sent_at":%d,"meta":{"trace":%d,"x":1}}' % (number, number) for number in range(3)]
        got = [await pair.ask(post("ignored", content)) for content in mails]
        assert [one.replayed for one in got] == [False, True, True]
        assert [one.content for one in pair.upstream.requests] == mails[:1]
        other = await pair.ask(post("ignored", mails[0].replace(b'"x":1', b'"x":2')))
        assert (other.status, pair.count) == (422, 1)


@pytest.mark.case("C259")
async def test_fingerprint_may_be_off(tmp_path: Path, session_store: RedisServer) -> None:
    async with running(tmp_path, session_store.url, fingerprint="off") as pair:
        got = [await pair.ask(post("off", content)) for content in (b"{}", b'{"other":1}')]
        assert [one.replayed for one in got] == [False, True]
        assert pair.count == 1


@pytest.mark.case("C255")
async def test_other_content_is_told_before_anything_else_of_the_record(mail: Pair) -> None:
    mail.upstream.default = slow(0.6)
    async with await mail.client() as client:
        await client.send(post("busy"))
        await mail.upstream.reached(1)
        other = await mail.ask(post("busy", b"{}"))
        same = await mail.ask(post("busy"))
        assert (other.status, other.slug, same.status, same.slug) == (422, "key-reused", 409, "request-outstanding")
        assert (await client.answer()).status == 200
    assert mail.count == 1


@pytest.mark.case("C256")
async def test_key_of_a_passed_method_meets_no_send(mail: Pair) -> None:
    data = request("PUT", "/mail/emails", [BEARER], b"{}", key="put then post")
    assert (await mail.ask(data)).status == 200
    assert (await mail.ask(post("put then post", b"{}"))).replayed is False
    assert mail.count == 2
