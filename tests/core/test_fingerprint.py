"""The fingerprint: what makes two requests the same, through media types, codings, fields and rules."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.config import FingerprintRules
from sidecar.fingerprint import Fingerprint, Fingerprinter
from sidecar.message import Fields

JSON: Fields = ((b"Content-Type", b"application/json"),)
FORM: Fields = ((b"content-type", b"application/x-www-form-urlencoded"),)
GZIP: Fields = ((b"Content-Encoding", b"gzip"),)
RULES = FingerprintRules()
OFF = FingerprintRules(enabled=False)


def fed(
    content: bytes,
    fields: Fields = (),
    *,
    rules: FingerprintRules = RULES,
    size: int = 65536,
    watch: tuple[str, ...] = (),
    route: str = "resend",
    method: bytes = b"POST",
    path: bytes = b"/emails",
    query: bytes | None = None,
    limit_bytes: int = 1 << 20,
) -> tuple[Fingerprint, dict[str, bytes]]:
    fingerprinter = Fingerprinter(
        rules,
        route=route,
        method=method,
        path=path,
        query=query,
        fields=fields,
        watch=watch,
        limit_bytes=limit_bytes,
    )
    for at in range(0, len(content), size):
        for _ in fingerprinter.feed(content[at : at + size]):
            pass
    return fingerprinter.finish(), dict(fingerprinter.watched())


def fingerprint(content: bytes, fields: Fields = (), **how: object) -> Fingerprint:
    return fed(content, fields, **how)[0]  # type: ignore[arg-type]


def multipart(mark: bytes, *values: bytes, name: bytes = b"a") -> tuple[bytes, Fields]:
    head = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
    content = b"".join(head % (mark, name) + value + b"\r\n" for value in values) + b"--%b--\r\n" % mark
    return content, ((b"Content-Type", b"multipart/form-data; boundary=" + mark),)


# Head


def test_head_counts() -> None:
    content = b'{"to":"b@ex.test"}'
    found = [
        fingerprint(content, JSON),
        fingerprint(content, JSON, route="other"),
        fingerprint(content, JSON, method=b"PUT"),
        fingerprint(content, JSON, path=b"/emails/batch"),
        fingerprint(content, JSON, path=b"/emails", query=b""),
        fingerprint(content, JSON, query=b"a=1&b=2"),
        fingerprint(content, JSON, query=b"b=2&a=1"),
        fingerprint(content, JSON, route="resendP", method=b"OST"),
        fingerprint(content, JSON, method=b"POST/", path=b"emails"),
        fingerprint(content),
        fingerprint(content, ((b"Content-Type", b""),)),
        fingerprint(content, ((b"Content-Type", b"text/plain"),)),
        fingerprint(content, ((b"Content-Type", b"application/problem+json"),)),
        fingerprint(content, (*JSON, *JSON)),
    ]
    assert {len(digest) for digest in found} == {32}
    # Content without a type and with an empty one are the same to every reader.
    assert found[9] == found[10]
    assert len(set(found)) == len(found) - 1


def test_header_fields_do_not_count_unless_named() -> None:
    fields: Fields = ((b"User-Agent", b"x"), (b"X-Forwarded-For", b"1.2.3.4"), (b"traceparent", b"00-1"))
    assert fingerprint(b"{}", (*JSON, *fields)) == fingerprint(b"{}", JSON)
    rules = FingerprintRules(fields=("x-batch-validation", "X-B"))
    found = [
        fingerprint(b"{}", (*JSON, *more), rules=rules)
        for more in (
            (),
            ((b"X-Batch-Validation", b""),),
            ((b"X-Batch-Validation", b"strict"),),
            ((b"X-Batch-Validation", b"permissive"),),
            ((b"X-Batch-Validation", b"strict"), (b"X-Batch-Validation", b"strict")),
            ((b"X-B", b"strict"),),
        )
    ]
    assert len(set(found)) == len(found)
    same = fingerprint(b"{}", ((b"x-BATCH-validation", b" strict "), *JSON), rules=rules)
    assert same == found[2]
    assert fingerprint(b"{}", JSON, rules=FingerprintRules(fields=("X-B", "x-batch-validation"))) == found[0]


@pytest.mark.parametrize("value", [b"application/json; charset=utf-8", b"Application/JSON", b" application/json;v=1"])
def test_parameters_and_case_of_the_media_type_do_not_count(value: bytes) -> None:
    assert fingerprint(b'{"a":1}', ((b"content-type", value),)) == fingerprint(b'{ "a": 1 }', JSON)


# Content


def test_json_is_compared_by_value_and_only_where_it_says_so() -> None:
    one, other = b'{"to":"b@ex.test","subject":"s"}', b'{ "subject":"s", "to":"b@ex.test" }'
    assert fingerprint(one, JSON) == fingerprint(other, JSON)
    merge: Fields = ((b"Content-Type", b"application/merge-patch+json"),)
    assert fingerprint(one, merge) == fingerprint(other, merge)
    for fields in ((), ((b"Content-Type", b"text/plain"),), (*JSON, *JSON)):
        assert fingerprint(one, fields) != fingerprint(other, fields)


@pytest.mark.parametrize("one", [b'{"a":1,"a":1}', b"[1,]", b"\xef\xbb\xbf{}", b'{"a":NaN}', b'"\xff"', b"[1] x", b""])
def test_what_is_no_json_counts_by_its_bytes(one: bytes) -> None:
    assert fingerprint(one, JSON) == fingerprint(one, JSON, size=1)
    assert fingerprint(one, JSON) != fingerprint(one + b" ", JSON)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=6), st.integers(0, 60), st.integers(0, 255))
def test_a_changed_byte_of_irregular_content_changes_the_digest(tail: bytes, at: int, byte: int) -> None:
    content = bytearray(b'{"to":["b@ex.test"],"subject":"s","a":1,"a":2}' + tail)
    at %= len(content)
    before = bytes(content)
    content[at] = byte
    assert (fingerprint(before, JSON) == fingerprint(bytes(content), JSON)) == (before == content)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([JSON, FORM, (), multipart(b"A")[1]]), st.binary(max_size=80), st.integers(1, 30))
def test_pieces_do_not_count(fields: Fields, content: bytes, size: int) -> None:
    assert fingerprint(content, fields) == fingerprint(content, fields, size=size)
    packed = gzip.compress(content)
    assert fingerprint(packed, (*fields, *GZIP)) == fingerprint(packed, (*fields, *GZIP), size=size)


def test_large_content_in_one_piece_and_in_many_written_small_and_wide() -> None:
    value = {"attachments": [{"filename": "a", "content": "QUJD/w==" * 40000}], "to": ["a", "b"]}
    compact = json.dumps(value, separators=(",", ":")).encode()
    wide = json.dumps(value, indent=4, sort_keys=True).replace("/", "\\/").encode()
    assert fingerprint(compact, JSON, size=1 << 20) == fingerprint(wide, JSON, size=4099)
    assert fingerprint(compact, JSON) != fingerprint(compact.replace(b'w=="}', b'w=-"}'), JSON)


def test_forms_are_compared_by_pairs() -> None:
    assert fingerprint(b"to=a%40b&x=1", FORM) == fingerprint(b"x=1&to=a@b", FORM)
    assert fingerprint(b"to=a&to=b", FORM) != fingerprint(b"to=b&to=a", FORM)


def test_multipart_forms_are_compared_whatever_the_boundary() -> None:
    assert fingerprint(*multipart(b"AAA", b"x", b"abc")) == fingerprint(*multipart(b"BBB", b"x", b"abc"))
    assert fingerprint(*multipart(b"AAA", b"x", b"abc")) != fingerprint(*multipart(b"BBB", b"x", b"abd"))


def test_irregular_multipart_counts_by_its_bytes() -> None:
    content, fields = multipart(b"AAA", b"x")
    assert fingerprint(content[:-4], fields) != fingerprint(content[:-5], fields)
    assert fingerprint(content, ((b"Content-Type", b"multipart/form-data"),)) != fingerprint(content, fields)


def test_kinds_of_content_never_meet() -> None:
    empty = [fingerprint(b"", fields) for fields in (JSON, FORM, multipart(b"A")[1], ())]
    assert len(set(empty)) == 4
    assert fingerprint(b"") == fingerprint(b"")
    assert fingerprint(b"") != fingerprint(b"\x00")


# Codings


@pytest.mark.parametrize("fields", [JSON, (), ((b"Content-Type", b"text/plain"),)])
def test_codings_do_not_count(fields: Fields) -> None:
    content = b'{"to":"b@ex.test"}'
    plain = fingerprint(content, fields)
    assert plain == fingerprint(gzip.compress(content, 1, mtime=1), (*fields, *GZIP))
    assert plain == fingerprint(gzip.compress(content, 9, mtime=2), (*fields, (b"content-encoding", b"X-GZIP")))
    assert plain == fingerprint(zlib.compress(content), (*fields, (b"Content-Encoding", b"deflate")), size=1)
    twice = zlib.compress(gzip.compress(content))
    assert plain == fingerprint(twice, (*fields, (b"Content-Encoding", b"gzip"), (b"Content-Encoding", b"deflate")))
    assert plain == fingerprint(content, (*fields, (b"Content-Encoding", b"identity")))
    assert plain != fingerprint(gzip.compress(content + b"1"), (*fields, *GZIP))


def test_irregular_content_in_a_coding_counts_by_its_own_bytes() -> None:
    one, other = gzip.compress(b"[1,]", mtime=1), gzip.compress(b"[1,]", mtime=2)
    assert fingerprint(one, (*JSON, *GZIP)) == fingerprint(other, (*JSON, *GZIP)) == fingerprint(b"[1,]", JSON)
    assert fingerprint(one, (*JSON, *GZIP)) != fingerprint(gzip.compress(b"[1, ]"), (*JSON, *GZIP))


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        (b"gzip", b'{"a":1}'),
        (b"gzip", gzip.compress(b'{"a":1}')[:-1]),
        (b"gzip", b""),
        (b"unheard-of", b'{"a":1}'),
        (b"gzip, unheard-of", gzip.compress(b'{"a":1}')),
        (b"gzip", gzip.compress(b'"' + b"x" * 2000 + b'"')),
    ],
)
def test_a_coding_that_cannot_be_undone_leaves_the_bytes(coding: bytes, content: bytes) -> None:
    fields: Fields = (*JSON, (b"Content-Encoding", coding))
    found = fingerprint(content, fields, limit_bytes=1000)
    assert found == fingerprint(content, fields, limit_bytes=1000, size=1)
    assert found != fingerprint(content + b" ", fields, limit_bytes=1000)
    assert found != fingerprint(content, JSON, limit_bytes=1000)
    assert found != fingerprint(content, (*JSON, (b"Content-Encoding", b"br-x")), limit_bytes=1000)
    assert fed(content, fields, limit_bytes=1000, watch=("/a",))[1] == {}


def test_a_little_that_unfolds_to_much_yields_often() -> None:
    content = gzip.compress(b'"' + b"x" * 4_000_000 + b'"')
    assert len(content) < 16384
    fingerprinter = Fingerprinter(
        RULES, route="r", method=b"POST", path=b"/", query=b"", fields=(*JSON, *GZIP), limit_bytes=1 << 23
    )
    assert len(list(fingerprinter.feed(content))) > 200


def test_a_small_mail_yields_not_at_all_and_a_large_piece_for_each_window() -> None:
    for fields in (JSON, ()):
        fingerprinter = Fingerprinter(
            RULES, route="r", method=b"POST", path=b"/", query=b"", fields=fields, limit_bytes=1 << 20
        )
        assert not list(fingerprinter.feed(b'{"to":["a@example.com"],"text":"hello"}'))
        assert len(list(fingerprinter.feed(b" " * 160 * 1024))) == 9


# Rules


def test_ignored_members_and_fields_do_not_count() -> None:
    rules = FingerprintRules(ignore=("/sent_at", "/tags/0/value", "v:time"))
    one = b'{"to":"a","sent_at":1,"tags":[{"name":"n","value":"x"}]}'
    other = b'{"to":"a","sent_at":"now","tags":[{"name":"n","value":"y"}]}'
    assert fingerprint(one, JSON, rules=rules) == fingerprint(other, JSON, rules=rules)
    assert fingerprint(one, JSON) != fingerprint(other, JSON)
    assert fingerprint(one, JSON, rules=rules) != fingerprint(one.replace(b'"a"', b'"b"'), JSON, rules=rules)
    assert fingerprint(b"a=1&v%3atime=2", FORM, rules=rules) == fingerprint(b"a=1", FORM, rules=rules)
    multi = [multipart(b"A", value, name=b"v:time") for value in (b"1", b"2")]
    assert fingerprint(*multi[0], rules=rules) == fingerprint(*multi[1], rules=rules)


def test_rules_that_match_nothing_change_nothing() -> None:
    rules = FingerprintRules(ignore=("/nothing", "/to/nothing", "nothing"))
    assert fingerprint(b'{"to":"a"}', JSON, rules=rules) == fingerprint(b'{"to":"a"}', JSON)
    assert fingerprint(b"to=a", FORM, rules=rules) == fingerprint(b"to=a", FORM)


def test_off_is_one_fingerprint_for_all() -> None:
    content, fields = multipart(b"A", b"x")
    found = {
        fingerprint(b"{}", JSON, rules=OFF),
        fingerprint(b'{"a":1}', JSON, rules=OFF, watch=("/a",)),
        fingerprint(b"x", rules=OFF, route="other", method=b"PUT", path=b"/x", query=b"q"),
        fingerprint(content, fields, rules=OFF),
        fingerprint(b"x", GZIP, rules=OFF),
    }
    assert len(found) == 1
    assert found != {fingerprint(b"{}", JSON)}


@pytest.mark.parametrize("rules", [RULES, OFF])
def test_watched_values(rules: FingerprintRules) -> None:
    watch = ("/key", "/deep/0/id", "/missing", "v:key", "missing")
    content = b'{"key":"K1","deep":[{"id":17.0}]}'
    for fields, body in ((JSON, content), ((*JSON, *GZIP), gzip.compress(content))):
        assert fed(body, fields, rules=rules, watch=watch)[1] == {"/key": b"K1", "/deep/0/id": b"17.0"}
    assert fed(b"v%3Akey=K%31", FORM, rules=rules, watch=watch)[1] == {"v:key": b"K1"}
    body, fields = multipart(b"A", b"K1", name=b"v:key")
    assert fed(body, fields, rules=rules, watch=watch)[1] == {"v:key": b"K1"}
    for broken in (b'{"key":"K1","key":"K2"}', b'{"key":"K1"', b'{"key":"K1"} x'):
        assert fed(broken, JSON, rules=rules, watch=watch)[1] == {}
    assert fed(content, (), rules=rules, watch=watch)[1] == {}


def test_watching_does_not_change_the_fingerprint() -> None:
    assert fingerprint(b'{"a":"x","b":[1]}', JSON, watch=("/a", "/b/0")) == fingerprint(b'{"a":"x","b":[1]}', JSON)


def test_the_algorithm_is_pinned() -> None:
    # These stand in records of running systems: a change needs another ALGORITHM.
    mail = b'{"to":["b@ex.test"],"subject":"\\u00e9","n":1.0,"x":null,"html":"' + b"y" * 100 + b'"}'
    assert (
        fingerprint(mail, JSON, query=b"").hex() == "a4fb96d377f638ca7974dd00c3a9d682cc3e8e0d774b5548c22e003e0dc19d61"
    )
    assert (
        fingerprint(b"to=a&to=b&subject=%C3%A9", FORM).hex()
        == "d285bdfaed269add27b69abcb26391f37585e11708dd9cd8779852dec90cab43"
    )
    assert (
        fingerprint(*multipart(b"AAA", b"x", b"y")).hex()
        == "a8f54031b87f4b2c7f1cd20f7c1f7a06d499c8566665762b4ec8dd95259f0931"
    )
    assert fingerprint(b"x", GZIP).hex() == "db724fe7c5f70345adee3000ffc70172812bf767d52e84b8d66bac6e519279ae"
