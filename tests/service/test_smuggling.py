"""Requests made to open another protocol, or to carry another request within them."""

from __future__ import annotations

import pytest
from ground import Ground
from harness import request
from harness.wire import Pairs, first
from pair import post

pytest_plugins = ("ground_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.case("C310")
@pytest.mark.parametrize(
    "fields",
    [
        [
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Key", "dGhl"),
            ("Sec-WebSocket-Version", "13"),
        ],
        [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQ")],
        [("Connection", "upgrade"), ("Upgrade", "TLS/1.2, HTTP/1.1")],
        [("Upgrade", "h2c")],
    ],
    ids=["websocket", "h2c", "tls", "unnamed"],
)
async def test_upgrade_is_not_offered_on_and_the_connection_goes_on(field: Ground, fields: Pairs) -> None:
    key = f"upgrade {len(fields)}"
    async with await field.pair.client() as client:
        got = [await client.ask(request("GET", "/mail/x", fields))]
        got += [await client.ask(request("POST", "/mail/emails", fields, b"{}", key=key)) for _ in range(2)]
        got.append(await client.ask(request("GET", "/mail/last")))
    assert [(one.status, one.replayed) for one in got] == [(200, False), (200, False), (200, True), (200, False)]
    seen = field.upstreams["mail"].requests
    assert [one.target for one in seen] == [b"/x", b"/emails", b"/last"]
    assert seen[1].content == b"{}"
    assert {first(one.fields, name) for one in seen for name in ("upgrade", "connection", "http2-settings")} == {None}


@pytest.mark.case("C310")
@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n",
        b"CONNECT /mail/emails HTTP/1.1\r\nHost: %b\r\n\r\n",
    ],
    ids=["h2", "connect", "connect-path"],
)
async def test_tunnel_is_not_opened(field: Ground, data: bytes) -> None:
    there = b"127.0.0.1:%d" % field.canary.port
    async with await field.pair.client() as client:
        await client.send(data.replace(b"%b", there) + request("GET", "/hello"))
        got = await client.answer()
    assert (got.status, got.slug) == (400, "request-malformed")
    assert (field.canary.connections, field.seen()) == (0, [])


@pytest.mark.case("C311")
@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ([("Content-Length", "4"), ("Transfer-Encoding", "chunked")], b"0\r\n\r\n"),
        ([("Transfer-Encoding", "chunked"), ("Content-Length", "5")], b"0\r\n\r\n"),
        ([("Transfer-Encoding", "x"), ("Content-Length", "5")], b"0\r\n\r\n"),
        ([("Transfer-Encoding", "chunked"), ("Transfer-encoding", "x")], b"0\r\n\r\n"),
        ([("Transfer-Encoding", "\x0bchunked")], b"0\r\n\r\n"),
        ([("Transfer-Encoding ", "chunked")], b"0\r\n\r\n"),
        ([("X", "1\nTransfer-Encoding: chunked")], b"0\r\n\r\n"),
        ([("Content-Length", "0"), ("Content-Length", "40")], b""),
        ([("Content-Length", "0, 40")], b""),
        ([("Content-Length", "00000000000000000000000000000000000000x0")], b""),
        ([("Connection", "Content-Length"), ("Content-Length", "5")], b"12345"),
        ([("Connection", "Transfer-Encoding, Content-Length"), ("Content-Length", "5")], b"12345"),
    ],
)
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_request_hidden_behind_another_never_reaches_the_upstream(
    field: Ground, fields: Pairs, content: bytes, target: str
) -> None:
    hidden = request("GET", "/mail/hidden", [("X-Hidden", "1")])
    async with await field.pair.client() as client:
        await client.send(request("POST", target, fields, content, key="front") + hidden)
        await client.rest()
    assert field.seen() == []


@pytest.mark.case("C311")
@pytest.mark.parametrize("target", ["/mail/emails", "/mail/other"])
async def test_content_that_reads_like_a_request_stays_content(field: Ground, target: str) -> None:
    inner = request("GET", "/mail/hidden") + b"0\r\n\r\n" + post("hidden")
    fields = [("Transfer-Encoding", "chunked")]
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    whole = [
        request("POST", target, [], inner, key=f"inner {target}"),
        request("POST", target, fields, key="i") + chunks,
    ]
    async with await field.pair.client() as client:
        for data in whole:
            assert (await client.ask(data)).status == 200
    seen = field.upstreams["mail"].begun
    assert [(one.target, one.content) for one in seen] == [(target.removeprefix("/mail").encode(), inner)] * 2
