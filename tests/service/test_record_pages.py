"""The pages at `/v1/records`: token, Host, Origin, and what they are given."""

from __future__ import annotations

import base64
import json

import pytest
from lab import Lab
from settling import TOKEN, TOP, ask, lose, record_of, routes

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

__all__ = ["TOP", "routes"]


async def test_every_page_below_v1_needs_the_token(shared: Lab) -> None:
    key = await lose(shared)
    record = record_of(shared, key)
    for target, content in (
        ("/v1/records", None),
        (f"/v1/records/{record}", None),
        (f"/v1/records/{record}/forget", b"{}"),
        (f"/v1/records/{record}/resolve", b'{"outcome":"sent"}'),
        ("/v1/stats", None),
    ):
        for wrong in ("", "Bearer", "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
            refused = await ask(shared.one, target, content, Authorization=wrong)
            assert (refused.status, refused.slug) == (401, "token-missing"), (target, wrong)
            assert refused.first("www-authenticate") == b"Bearer"
            assert refused.first("content-type") == b"application/problem+json; charset=utf-8"
    assert shared.state(key) == "unknown"
    assert (await ask(shared.one, f"/v1/records/{record}")).status == 200


async def test_page_of_another_site_may_not_change_anything(shared: Lab) -> None:
    key = await lose(shared)
    target = f"/v1/records/{record_of(shared, key)}/forget"
    port = shared.one.admin_port
    for fields in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{port + 1}"},
        {"Origin": f"https://127.0.0.1:{port}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Origin": f"http://127.0.0.1:{port}"},
    ):
        refused = await ask(shared.one, target, b"{}", **fields)
        assert (refused.status, refused.slug) == (403, "origin-foreign"), fields
    for host in (
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        "10.0.0.1",
        "localhost.example",
    ):
        refused = await ask(shared.one, target, b"{}", host=host)
        assert (refused.status, refused.slug) == (403, "host-foreign"), host
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        refused = await ask(shared.one, target, b"{}", Content_Type=kind)
        assert (refused.status, refused.slug) == (415, "content-not-json"), kind
    assert shared.state(key) == "unknown"
    own = {"Origin": f"http://localhost:{port}", "Sec_Fetch_Site": "same-origin"}
    done = await ask(shared.one, target, b"{}", host=f"localhost:{port}", **own)
    assert (done.status, done.json()["state"]) == (200, "absent")


async def test_page_of_a_name_that_leads_here_may_not_read(shared: Lab) -> None:
    for host in ("evil.example", "evil.example:80"):
        assert (await ask(shared.one, "/v1/records", host=host)).slug == "host-foreign"
    for host in ("localhost", "LOCALHOST:1", "[::1]:80", "127.0.0.9"):
        assert (await ask(shared.one, "/v1/records", host=host)).status == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 10_000, 400),
        (b"{}", 400),
        (b'{"outcome":"perhaps"}', 400),
        (b'{"outcome":"sent","force":"yes"}', 400),
        (b'{"outcome":"sent","provider_id":"a b"}', 400),
        (b'{"outcome":"sent","provider_id":7}', 400),
        (b'{"outcome":"sent","other":1}', 400),
        (b'{"outcome":"not-sent","provider_id":"x"}', 400),
        (b'{"outcome":"sent","answer":[]}', 400),
        (b'{"outcome":"sent","answer":{"status":422}}', 400),
        (b'{"outcome":"sent","answer":{"status":true}}', 400),
        (b'{"outcome":"sent","answer":{"status":200,"content_base64":"%"}}', 400),
        (b'{"outcome":"sent","answer":{"status":200,"fields":[["a b","c"]]}}', 400),
        (b'{"outcome":"sent","answer":{"status":200,"fields":[["a","c\\r\\nX: y"]]}}', 400),
        (b'{"outcome":"sent","answer":{"status":200,"fields":{"a":"b"}}}', 400),
        (b'{"outcome":"sent","answer":{"status":200,"content_base64":"' + b"QUFB" * 400_000 + b'"}}', 413),
        (b'{"outcome":"sent","x":"' + b"x" * 3_000_000 + b'"}', 413),
    ],
    ids=lambda value: value[:60].decode() if isinstance(value, bytes) else None,
)
async def test_content_that_means_nothing_is_refused_and_changes_nothing(
    shared: Lab, content: bytes, status: int
) -> None:
    key = "refused" if shared.name("refused") else await lose(shared, key="refused")
    refused = await ask(shared.one, f"/v1/records/{record_of(shared, key)}/resolve", content)
    assert (refused.status, refused.json()["status"]) == (status, status), refused.content
    assert shared.state(key) == "unknown"


async def test_answer_of_the_api_is_kept_as_given_without_framing_and_cookies(shared: Lab) -> None:
    key = await lose(shared)
    fields = [
        ["X-Id", "caf\xe9"],
        ["Content-Length", "999"],
        ["Connection", "x-gone"],
        ["X-Gone", "1"],
        ["Set-Cookie", "a=b"],
    ]
    given = {"status": 201, "fields": fields, "content_base64": base64.b64encode(b"\0\xff").decode()}
    body = json.dumps({"outcome": "sent", "answer": given, "provider_id": "re_1", "by": "alice"}).encode()
    done = await ask(shared.one, f"/v1/records/{record_of(shared, key)}/resolve", body)
    assert done.status == 200, done
    retry = await shared.one.send(key)
    assert (retry.status, retry.content, retry.replayed) == (201, b"\0\xff", True)
    assert retry.first("x-id") == b"caf\xe9"
    assert (retry.every("x-gone"), retry.every("set-cookie")) == ([], [])
    line = shared.one.log_lines(event="record-settled", by="alice")[-1]
    assert (line["outcome"], line["result"], line["peer"]) == ("sent", "completed", "127.0.0.1")
    assert line["record"] == record_of(shared, key)
    assert TOKEN not in shared.one.log()
    assert key not in shared.one.log()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/records?state=gone", 400),
        ("/v1/records?limit=0", 400),
        ("/v1/records?limit=201", 400),
        ("/v1/records?limit=%C2%B2", 400),
        ("/v1/records?cursor=x", 400),
        ("/v1/records?route=..", 400),
        ("/v1/records?other=1", 400),
        ("/v1/records?key=a&key=b", 400),
        ("/v1/records/short", 400),
        ("/v1/records/" + "a" * 40 + "/other", 404),
        ("/v1/records/" + "a" * 40, 404),
        ("/v1/records/" + "a" * 40 + "/forget", 405),
        ("/v1/recordsandmore", 404),
        ("/v1/records/", 200),
        ("/v1/records?key=", 200),
        ("/v1/records?key=%00%ff", 200),
    ],
)
async def test_questions(shared: Lab, target: str, status: int) -> None:
    given = await ask(shared.one, target)
    assert given.status == status, given
    if status != 200:
        assert given.json()["status"] == status
        assert given.json()["detail"]
