"""Requests made to lead somewhere else: past the protection, or to another host."""

from __future__ import annotations

import os
import random
import re

import pytest
from ground import Ground
from harness import request
from harness.wire import Pairs
from pair import gzipped, head
from spellings import pairs, spelling, taken_for
from strict import check_request

pytest_plugins = ("ground_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

SPELLINGS = int(os.environ.get("SIDECAR_SPELLINGS", "1500"))
SEED = int(os.environ.get("SIDECAR_FUZZ_SEED", "1"))
FORM = ("Content-Type", "application/x-www-form-urlencoded")
SENDS = {
    "mail": re.compile(rb"/emails|/v3/[^/]+/messages"),
    "deep": re.compile(rb"/v1/emails|/v1/v3/[^/]+/messages"),
}


# Past the protection.


@pytest.mark.case("C306")
@pytest.mark.parametrize("route", ["mail", "deep"])
@pytest.mark.parametrize("send", ["/emails", "/v3/a.test/messages"])
async def test_no_spelling_of_a_send_passes_unprotected(field: Ground, route: str, send: str) -> None:
    rng = random.Random(SEED)
    written = [spelling(rng, b"/" + route.encode(), send.encode()) for _ in range(SPELLINGS // 4)]
    statuses: list[int] = []
    while written:
        async with await field.pair.client() as client:
            while written:
                got = await client.ask(request("POST", written.pop(), [("Content-Type", "application/json")], b"{}"))
                statuses.append(got.status)
                if got.first("connection") == b"close":
                    break
    passed = [(name, target, taken_for(target, SENDS[name])) for name, target in field.seen() if name in SENDS]
    assert [one for one in passed if one[2]] == []
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(200) > 10, "nothing passed: no test of what passes"
    assert statuses.count(400) > SPELLINGS / 16


@pytest.mark.case("C306")
@pytest.mark.parametrize(
    "target",
    [
        "/deep/..%2fv1/emails",
        "/deep/..%2fv1%2femails",
        "/deep/..\\v1/emails",
        "/deep/x/..%2f..%2fv1/emails",
        "/deep/%2e%2e%5cv1/emails",
        "/deep/emails/..%5c..%5cv1/emails",
        "/mail/..%2f..%2femails",
        "/mail/%2E%2E%2Femails",
        "/mail/x/%2e%2e/emails",
        "/mail/a\\b/..%2femails",
        "/mail/a%5cb%2f../emails",
        "/mail/a%2fb/..\\emails",
        "/deep/x/y\\..///..%2f../emails",
        "/mail/%65mails",
        "/mail//emails",
        "/mail/\\emails",
        "/mail/emails%2f",
        "/mail/emails/.",
        "/mail/emails?",
        "http://api.example.test/mail/emails",
        "HTTP://api.example.test:1//mail/./emails?x",
        "/x/../mail/emails",
    ],
)
async def test_spelling_that_servers_take_for_a_send_is_refused_without_a_key(field: Ground, target: str) -> None:
    got = await field.ask("POST", target, [("Content-Type", "application/json")], b"{}")
    assert (got.status, got.slug, field.seen()) == (400, "key-missing", [])


@pytest.mark.case("C307")
@pytest.mark.parametrize(
    ("method", "query", "fields", "content"),
    [
        ("POST", "", [FORM], b"Action=SendEmail&x=1"),
        ("POST", "", [FORM], b"%41ction=Send%45mail"),
        ("POST", "", [FORM], b"&&Action=SendEmail&&"),
        ("POST", "", [FORM], b"Action=GetQuota&Action=SendEmail"),
        ("POST", "", [FORM], b"Action=SendEmail&Action=GetQuota"),
        ("POST", "", [FORM], b"x=1;Action=SendEmail"),
        ("POST", "", [FORM], b"Action=SendEmail;x=1"),
        ("POST", "", [FORM], b"Action=SendEmail&bad=%zz&worse=\xff"),
        ("POST", "", [FORM], b"x=" + b"1&" * 50_000 + b"Action=SendEmail"),
        ("POST", "", [("Content-Type", "Application/X-WWW-Form-Urlencoded ; charset=utf-8")], b"Action=SendEmail"),
        ("POST", "", [("Content-Type", "application/x-www-form-urlencoded, text/plain")], b"Action=SendEmail"),
        ("POST", "", [("Content-Type", "text/plain")], b"Action=SendEmail"),
        ("POST", "", [("Content-Type", "application/json")], b"Action=SendEmail"),
        ("POST", "", [], b"Action=SendEmail"),
        ("POST", "", [FORM, ("Content-Encoding", "gzip")], gzipped(b"Action=SendEmail")),
        ("POST", "", [FORM, ("Content-Encoding", "gzip")], b"Action=SendEmail"),
        ("POST", "", [FORM, ("Content-Encoding", "br")], b"Action=SendEmail"),
        ("POST", "?Action=SendEmail", [FORM], b"x=1"),
        ("POST", "?Action=SendEmail", [], b""),
        ("POST", "?Action=SendEmail", [FORM], b"Action=GetQuota"),
        ("POST", "?Action=GetQuota", [FORM], b"Action=SendEmail"),
        ("POST", "?Action=GetQuota&Action=SendEmail", [], b""),
        ("POST", "?a=b?&%41%63tion=SendEmail", [], b""),
        ("GET", "?Action=SendEmail", [], b""),
        ("GET", "?x=1;Action=SendEmail", [], b""),
        ("GET", "?Action=Send%45mail&Action=", [], b""),
    ],
)
async def test_discriminator_is_found_wherever_and_however_it_is_written(
    field: Ground, method: str, query: str, fields: Pairs, content: bytes
) -> None:
    for prefix in ("/query/", "/query"):
        got = await field.ask(method, prefix + query, fields, content)
        assert (got.status, got.slug, field.seen()) == (400, "key-missing", [])


@pytest.mark.case("C307")
@pytest.mark.parametrize(
    "query", ["", "?Action=GetSendQuota", "?Action=sendemail", "?X-Action=SendEmail", "?SendEmail"]
)
@pytest.mark.parametrize("content", [b"", b"Action=ListIdentities", b"to=Action%3DSendEmail"])
async def test_what_only_looks_like_a_discriminator_passes(field: Ground, query: str, content: bytes) -> None:
    got = await field.ask("POST", "/query/" + query, [FORM], content)
    assert (got.status, len(field.seen())) == (200, 1)
    assert (b"Action", b"SendEmail") not in pairs(query.encode(), content)


# To another host.


@pytest.mark.case("C308")
async def test_no_request_reaches_a_host_that_only_the_client_named(field: Ground) -> None:
    port = field.canary.port
    there = f"127.0.0.1:{port}"
    targets = [
        f"http://{there}/mail/x",
        f"http://{there}",
        f"http://{there}/",
        f"http://user@{there}/mail/x",
        f"http://user:pass@{there}/mail/x",
        f"http://sidecar.test@{there}/mail/x",
        f"//{there}/mail/x",
        f"/mail//{there}/x",
        f"/mail/http://{there}/x",
        f"/mail/@{there}/x",
        f"/mail@{there}/x",
        f"/mail:{port}/x",
        f"/mail/..//{there}/x",
        f"/mail/x?url=http://{there}/",
        f"/mail/\\\\{there}\\x",
        f"/mail/%0d%0aHost:%20{there}%0d%0a%0d%0a",
        f"/deep//{there}/x",
        f"/deep/..%2f..%2f{there}/x",
        f"/deep@{there}/x",
        f"/deep/@{there}",
        there,
        f"mail@{there}",
        "*",
    ]
    fields = [
        (name, value)
        for name in ("Forwarded", "X-Forwarded-Host", "X-Forwarded-For", "X-Host", "X-Original-URL", "X-Rewrite-URL")
        for value in (f"host={there}" if name == "Forwarded" else there,)
    ]
    for method in ("GET", "POST", "OPTIONS", "CONNECT", "PUT", "TRACE", "PROPFIND"):
        for target in targets:
            for host in (there, "sidecar.test"):
                got = await field.pair.ask(request(method, target, fields, host=host, key="canary"))
                assert got.status in (200, 400, 404, 405, 422, 409), (method, target, got)
    assert (field.canary.connections, field.canary.begun) == (0, [])
    for name, far in field.upstreams.items():
        assert far.malformed == []
        for one in far.begun:
            own = one.first("host") if name == "kept" else b"127.0.0.1:%d" % far.port
            check_request(one.head, own or b"")
    assert len(field.seen()) > 20


@pytest.mark.case("C308")
@pytest.mark.parametrize("host", ["api.test", "API.test:8025", "api.test."])
async def test_absolute_target_chooses_among_the_routes_and_nothing_else(field: Ground, host: str) -> None:
    for target, given in ((f"http://{host}/x?y", "other.test"), ("/x?y", host)):
        assert (await field.pair.ask(request("GET", target, host=given))).status == 200
    assert field.seen() == [("named", b"/x?y")] * 2
    # RFC 9112 section 3.2.2: the Host field is ignored where the target names a host.
    assert (await field.pair.ask(request("GET", "http://other.test/x?y", host=host))).status == 404


@pytest.mark.case("C309")
@pytest.mark.parametrize("route", ["mail", "kept"])
@pytest.mark.parametrize(
    "host", [b"a b", b"a@b", b"\xff\xfe", b"a/b", b"a\\b", b"a?b", b"a:b", b"a:1:2", b"[::1", b'"a"', b"a\tb"]
)
async def test_host_that_is_none_is_refused(field: Ground, route: str, host: bytes) -> None:
    got = await field.pair.ask(head(b"GET /" + route.encode() + b"/x HTTP/1.1", b"Host: " + host))
    assert (got.status, got.slug, field.seen()) == (400, "request-malformed", [])


@pytest.mark.case("C309")
@pytest.mark.parametrize("host", [b"", b"a", b"a:", b"a:1", b"[::1]:8025", b"a_b.test", b"a%2db", b"1.2.3.4"])
async def test_host_that_is_one_is_taken(field: Ground, host: bytes) -> None:
    assert (await field.pair.ask(head(b"GET /kept/x HTTP/1.1", b"Host: " + host))).status == 200
    assert [one.first("host") for one in field.upstreams["kept"].begun] == [host]
