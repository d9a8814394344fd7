"""The key, its scope and the name of its record."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.config import KeyRules, Origin, Route
from sidecar.errors import Outcome, ProblemError
from sidecar.key import Key, find, find_in_content, parse, record_id, scope
from sidecar.message import Fields

ROUTE = Route(name="mail", upstream=Origin("https", "api.example.com", 443), sends=())
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=40)


def key_of(*values: bytes, route: Route = ROUTE) -> bytes | None:
    found = find(route, tuple((b"Idempotency-Key", value) for value in values))
    return None if found is None else found.value


@pytest.mark.parametrize(
    ("field", "key"),
    [
        (b"abc", b"abc"),
        (b'"abc"', b"abc"),
        (b" \tabc ", b"abc"),
        (b"", None),
        (b"   ", None),
        (b'""', None),
        (b'"a\\"b\\\\c"', b'a"b\\c'),
        (b'"a,b;c"', b"a,b;c"),
        (b"a;b", b"a;b"),
        (b"order:1/{2}*%41", b"order:1/{2}*%41"),
        (b"a b", b"a b"),
        (b"K1%0d%0aX-Evil:1", b"K1%0d%0aX-Evil:1"),
        (b"k" * 256, b"k" * 256),
        (b'"' + b"k" * 256 + b'"', b"k" * 256),
    ],
)
def test_key_is_read_from_bare_text_or_a_structured_string(field: bytes, key: bytes | None) -> None:
    assert key_of(field) == key


@pytest.mark.parametrize(
    "field",
    [
        b"k" * 257,
        b'"' + b"k" * 257 + b'"',
        "é".encode() * 200,
        b"a\x00b",
        b"a\x7fb",
        b'"abc',
        b'"abc"x',
        b'"a";v=1',
        b'"a"b"',
        b'"a\\b"',
        b"K1, K1",
        b'a"b',
    ],
)
def test_key_that_cannot_be_told_is_refused(field: bytes) -> None:
    with pytest.raises(ProblemError) as refused:
        key_of(field)
    assert (refused.value.slug, refused.value.status, refused.value.sent) == (Outcome.KEY_MALFORMED, 400, "no")


@pytest.mark.parametrize("second", [b"K1", b"K2", b""])
def test_more_than_one_key_line_is_refused_whatever_the_case_of_the_name(second: bytes) -> None:
    with pytest.raises(ProblemError):
        find(ROUTE, ((b"Idempotency-Key", b"K1"), (b"idempotency-KEY", second)))


@given(PRINTABLE)
def test_any_printable_text_in_quotes_is_that_text(text: str) -> None:
    quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse(quoted.encode(), name="f", max_length=256) == text.encode()


def test_further_sources_are_asked_in_order_and_never_meet_the_first() -> None:
    route = replace(ROUTE, key=KeyRules(also=("amz-sdk-invocation-id", "/metadata/key")))
    fields: Fields = ((b"Amz-Sdk-Invocation-Id", b"abc"),)
    other = find(route, fields)
    assert other is not None
    assert (other.value, other.source) == (b"abc", "field amz-sdk-invocation-id")
    own = find(route, ((b"Idempotency-Key", b"abc"), *fields))
    member = find_in_content(route, {"/metadata/key": b"abc"})
    assert own is not None
    assert member is not None
    names = {record_id(scope(route, ()), one) for one in (own, other, member)}
    assert len(names) == 3


def test_key_in_the_content_is_held_to_the_same_rules() -> None:
    route = replace(ROUTE, key=KeyRules(also=("/k",), max_length=4))
    assert find_in_content(route, {}) is None
    for text in (b"12345", "é".encode(), b"a\nb"):
        with pytest.raises(ProblemError):
            find_in_content(route, {"/k": text})


def test_keys_that_a_pattern_ignores_count_as_absent() -> None:
    route = replace(ROUTE, key=KeyRules(ignore=("[0-9a-f]{64}",)))
    assert key_of(b"0a" * 32, route=route) is None
    assert key_of(b"0a" * 31, route=route) == b"0a" * 31


def named(route: Route = ROUTE, *fields: tuple[bytes, bytes], key: bytes = b"K1") -> str:
    return record_id(scope(route, fields), Key(key, ""))  # type: ignore[arg-type]  # any bytes will do


def test_records_of_different_keys_credentials_and_routes_never_meet() -> None:
    a, b = (b"Authorization", b"Bearer A"), (b"authorization", b"Bearer B")
    names = {
        named(ROUTE, a),
        named(ROUTE, b),
        named(ROUTE),
        named(ROUTE, (b"Authorization", b"")),
        named(ROUTE, a, a),
        named(ROUTE, a, key=b"k1"),
        named(replace(ROUTE, name="other"), a),
    }
    assert len(names) == 7
    assert named(ROUTE, a) == named(ROUTE, (b"AUTHORIZATION", b"Bearer A"), (b"X-Other", b"1"))


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=4), st.lists(st.binary(max_size=6), min_size=1, max_size=4))
def test_no_crafted_credential_poses_as_two(one: list[bytes], other: list[bytes]) -> None:
    names = [named(ROUTE, *((b"Authorization", value) for value in values)) for values in (one, other)]
    assert (names[0] == names[1]) is (one == other)


def test_scope_of_a_route_leaves_the_credential_out_and_a_field_adds_to_it() -> None:
    shared = replace(ROUTE, scope=("route",))
    assert named(shared, (b"Authorization", b"A")) == named(shared, (b"Authorization", b"B"))
    tenants = replace(ROUTE, scope=("credential", "field:X-Tenant"))
    assert named(tenants, (b"X-Tenant", b"1")) != named(tenants, (b"X-Tenant", b"2"))
    assert named(tenants, (b"X-Tenant", b"1"), (b"Authorization", b"A")) != named(tenants, (b"X-Tenant", b"1"))


def test_scope_by_aws_access_key_ignores_what_changes_with_each_signature() -> None:
    route = replace(ROUTE, credential=("aws-access-key",))

    def signed(key_id: bytes, signature: bytes) -> str:
        value = b"AWS4-HMAC-SHA256 Credential=%b/20260101/eu-west-1/ses/aws4_request, SignedHeaders=host, Signature=%b"
        return named(route, (b"Authorization", value % (key_id, signature)))

    assert signed(b"AKIA1", b"aa") == signed(b"AKIA1", b"bb")
    assert signed(b"AKIA1", b"aa") != signed(b"AKIA2", b"aa")


def test_name_of_a_record_tells_neither_key_nor_credential() -> None:
    name = named(ROUTE, (b"Authorization", b"Bearer secret"), key=b"order-1")
    assert len(name) == 40
    assert set(name) <= set("0123456789abcdef")
