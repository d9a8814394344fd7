"""A replay: the stored answer, but for what belongs to the moment."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from sidecar.config import Origin, Route
from sidecar.message import Answer, Field, Fields
from sidecar.record import Completed
from sidecar.replay import replay as replay_of

ROUTE = Route(name="mail", upstream=Origin("https", "api.example.com", 443), sends=())
NOW = b"Sun, 29 Nov 2026 12:00:00 GMT"
MARK: Field = (b"Idempotent-Replayed", b"true")


def replay(
    *fields: Field, route: Route = ROUTE, content: bytes = b"{}", stored: bytes = b"", now: bytes | None = None
) -> Answer:
    completed = Completed(Answer(202, b"Accepted", fields, content), True, stored)
    return replay_of(completed, route, accept_encoding=now, date=NOW, limit_bytes=1000)


def test_every_field_stays_in_order_and_count_and_the_mark_is_added() -> None:
    fields: Fields = ((b"X-A", b"1"), (b"Set-Cookie", b"a"), (b"x-a", b"caf\xe9"), (b"Set-Cookie", b"b"))
    answer = replay(*fields)
    assert (answer.status, answer.reason, answer.content) == (202, b"Accepted", b"{}")
    assert answer.fields == (*fields, MARK)


def test_date_is_made_anew_in_its_place_and_only_where_there_was_one() -> None:
    assert replay((b"date", b"old"), (b"X", b"1")).fields == ((b"date", NOW), (b"X", b"1"), MARK)
    assert replay((b"X", b"1")).fields == ((b"X", b"1"), MARK)


def test_cookies_are_replayed_under_credential_scope_only() -> None:
    shared = replace(ROUTE, scope=("route",))
    assert replay((b"Set-Cookie", b"a"), (b"X", b"1"), route=shared).fields == ((b"X", b"1"), MARK)


def test_a_mark_of_the_upstream_is_replaced_once() -> None:
    fields = replay((b"idempotent-replayed", b"false"), (b"X", b"1"), (b"Idempotent-Replayed", b"no")).fields
    assert fields == (MARK, (b"X", b"1"))


def test_the_mark_has_the_routes_name_or_is_off() -> None:
    assert replay(route=replace(ROUTE, replay_field="X-Again")).fields == ((b"X-Again", b"true"),)
    assert replay((b"Idempotent-Replayed", b"x"), route=replace(ROUTE, replay_field="")).fields == (
        (b"Idempotent-Replayed", b"x"),
    )


PLAIN = b"0123456789" * 10
ZIPPED = gzip.compress(PLAIN)
CODED: Fields = (
    (b"Content-Encoding", b"gzip"),
    (b"ETag", b'"strong"'),
    (b"Content-MD5", b"x"),
    (b"X", b"1"),
)


@pytest.mark.parametrize(
    ("stored", "now"), [(b"gzip", b"gzip"), (b"gzip", b"br, gzip;q=0.5"), (b"gzip", b"*"), (b"", None), (b"br", b"br")]
)
def test_a_coding_the_retry_takes_or_took_before_stays_byte_for_byte(stored: bytes, now: bytes | None) -> None:
    answer = replay(*CODED, content=ZIPPED, stored=stored, now=now)
    assert (answer.content, answer.fields) == (ZIPPED, (*CODED, MARK))


@pytest.mark.parametrize("now", [None, b"identity", b"gzip;q=0", b"br"])
def test_a_coding_the_retry_excludes_is_undone(now: bytes | None) -> None:
    answer = replay(*CODED, content=ZIPPED, stored=b"gzip", now=now)
    assert answer.content == PLAIN
    assert answer.fields == ((b"ETag", b'W/"strong"'), (b"X", b"1"), MARK)


@pytest.mark.parametrize(
    ("coding", "content"),
    [(b"unknown", b"abc"), (b"gzip", b"broken"), (b"gzip", gzip.compress(b"a" * 5000))],
)
def test_a_coding_that_cannot_be_undone_stays(coding: bytes, content: bytes) -> None:
    fields: Fields = ((b"Content-Encoding", coding),)
    answer = replay(*fields, content=content, stored=coding, now=b"identity")
    assert (answer.content, answer.fields) == (content, (*fields, MARK))
