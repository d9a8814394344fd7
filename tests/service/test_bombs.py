"""Contents made to cost: deep, many, huge, folded. Their senders wait; others do not, and memory stays bounded."""

from __future__ import annotations

import json
import time
import zlib

import pytest
from crowd import connected, meanwhile
from harness import duration, request, scaled
from pair import Pair, each_test, gzipped, module_pair, peak_bytes, reset_peak, rss_bytes

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
MIB = 1024 * 1024
shared = module_pair(timeout={"receive": duration(30), "connect": duration(1), "total": duration(30)})
mail = each_test()

JSON = ("Content-Type", "application/json")
FORM = ("Content-Type", "application/x-www-form-urlencoded")
PARTS = ("Content-Type", "multipart/form-data; boundary=b")
PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
SPACES = gzipped(b" " * (200 * MIB), 9)

BOMBS: dict[str, tuple[list[tuple[str, str]], bytes]] = {
    "open arrays": ([JSON], b"[" * (2 * MIB)),
    "nested arrays": ([JSON], b"[" * MIB + b"]" * MIB),
    "nested objects": ([JSON], b'{"a":' * 300_000 + b"1" + b"}" * 300_000),
    "a million members": ([JSON], b"{" + b",".join(b'"m%d":0' % number for number in range(1_000_000)) + b"}"),
    "one member a million times": ([JSON], b"{" + b'"m":0,' * 1_000_000 + b'"m":1}'),
    "a huge number": ([JSON], b"[" + b"9" * (4 * MIB) + b"]"),
    "a huge exponent": ([JSON], b"[1e" + b"9" * (4 * MIB) + b"]"),
    "empty objects": ([JSON], b"[" + b"{}," * 500_000 + b"{}]"),
    "escapes": ([JSON], b'["' + b"\\u0041" * 500_000 + b'"]'),
    "lone surrogates": ([JSON], b'{"' + b"\\ud800" * 500_000 + b'":1}'),
    "backslashes": ([JSON], b'["' + b"\\\\" * 2_000_000 + b'"]'),
    "blanks": ([JSON], b"[" + b" \n" * (2 * MIB) + b"]"),
    "form pairs": ([FORM], b"a=1&" * 500_000),
    "form ampersands": ([FORM], b"&" * (4 * MIB)),
    "form escapes": ([FORM], b"%41" * 1_000_000),
    "parts": ([PARTS], PART * 40_000 + b"--b--\r\n"),
    "almost boundaries": ([PARTS], b"--b\r\n\r\n" + b"\r\n--" * 1_000_000 + b"\r\n--b--\r\n"),
    "a part's head": ([PARTS], b"--b\r\nX: " + b"a" * (4 * MIB)),
    "parameters": ([PARTS], b"--b\r\nContent-Disposition: form-data" + b'; a="\\"' * 500_000 + b"\r\n\r\nx\r\n--b--"),
    "folded blanks": ([JSON, ("Content-Encoding", "gzip")], SPACES),
    "folded twice": ([JSON, ("Content-Encoding", "gzip, gzip")], gzipped(SPACES, 9)),
    "folded fifty times": ([JSON, ("Content-Encoding", ", ".join(["gzip"] * 50))], gzipped(SPACES, 9)),
    "folded members": ([JSON, ("Content-Encoding", "gzip")], gzipped(b"") * 100_000),
    "deflated": ([JSON, ("Content-Encoding", "deflate")], zlib.compress(b"a" * (200 * MIB), 9)),
    "folded depth": ([JSON, ("Content-Encoding", "gzip")], gzipped(b"[" * (40 * MIB), 9)),
}


@pytest.mark.timeout(120)
@pytest.mark.case("C330", "C331")
@pytest.mark.parametrize("name", BOMBS)
async def test_costly_content_is_sent_as_it_is_and_holds_nobody_up(mail: Pair, name: str) -> None:
    fields, content = BOMBS[name]
    reset_peak(mail.sidecar.pid)
    begin = rss_bytes(mail.sidecar.pid)
    async with meanwhile(mail, f"beside {name}") as felt:
        for again in range(2):
            got = await mail.ask(request("POST", "/mail/emails", fields, content, key=name), deadline_s=60)
            assert (got.status, got.replayed) == (200, again == 1), got
    mine = [one for one in mail.upstream.requests if one.first("idempotency-key") == name.encode()]
    assert [one.content for one in mine] == [content]
    felt.quick(median_s=0.25, longest_s=1.0)
    # At most the content once more, and what a scanner may hold.
    assert peak_bytes(mail.sidecar.pid) - begin < len(content) + 24 * MIB


@pytest.mark.timeout(120)
@pytest.mark.case("C330")
async def test_many_costly_contents_at_once_share_the_time_with_ordinary_ones(mail: Pair) -> None:
    content = b"[" + b"{}," * 150_000 + b"{}]"
    begin = rss_bytes(mail.sidecar.pid)
    async with (
        meanwhile(mail, "beside many") as felt,
        connected(mail, 12, lambda at: request("POST", "/mail/emails", [JSON], content, key=f"many {at}")) as clients,
    ):
        for client in clients:
            assert (await client.answer(deadline_s=60)).status == 200
    felt.quick(median_s=0.6, longest_s=3.0)
    assert rss_bytes(mail.sidecar.pid) - begin < 12 * len(content) + 24 * MIB


@pytest.mark.case("C331")
async def test_depth_without_end_in_a_query_or_in_fields_costs_nothing(mail: Pair) -> None:
    deep = "[" * 20_000
    many = [("Accept", "a/b;q=0." + "1" * 2000)] * 20 + [("Cookie", "; ".join(["a=b"] * 2000))]
    begin_s = time.monotonic()
    for number, (target, fields) in enumerate(
        [
            (f"/mail/emails?{deep}", []),
            ("/mail/emails?" + "a&" * 10_000, []),
            ("/mail/emails", many),
            ("/mail" + "/." * 20_000 + "/emails", []),
        ]
    ):
        got = await mail.ask(request("POST", target, fields, json.dumps(number).encode(), key=f"wide {number}"))
        assert got.status == 200
    assert time.monotonic() - begin_s < scaled(2)
    assert mail.count == 4
