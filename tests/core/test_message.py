"""The field rules of RFC 9110 section 7.6.1."""

from __future__ import annotations

from sidecar.message import end_to_end, first, media_type, values


def test_hop_by_hop_fields_and_those_named_in_connection_stay_behind() -> None:
    fields = (
        (b"Connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"TE", b"trailers"),
        (b"Proxy-Authorization", b"x"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Tag", b"1"),
        (b"x-tag", b"caf\xe9"),
        (b"connection", b" x-other "),
        (b"X-Other", b"2"),
    )
    assert end_to_end(fields) == ((b"X-Tag", b"1"), (b"x-tag", b"caf\xe9"))


def test_values_are_found_whatever_the_case_of_the_name() -> None:
    fields = ((b"A", b"1"), (b"a", b"2"))
    assert values(fields, b"a") == [b"1", b"2"]
    assert first(fields, b"a") == b"1"
    assert first(fields, b"b") is None


def test_media_type_is_lower_case_without_parameters() -> None:
    assert media_type(((b"content-TYPE", b"Application/JSON ; charset=utf-8"),)) == b"application/json"
    assert media_type(()) == b""
