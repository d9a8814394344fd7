"""Resend's official Python SDK, unmodified, through the real program: what it sends and what it raises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import resend
from harness import (
    RedisServer,
    Sidecar,
    StartSidecar,
    Upstream,
    answer,
    close_after_content,
    duration,
    free_port,
    gate,
    slow,
    until,
)
from resend.exceptions import ApplicationError, RateLimitError, ResendError, ValidationError

MAIL: resend.Emails.SendParams = {
    "from": "Acme <onboarding@resend.dev>",
    "to": ["delivered@resend.dev"],
    "subject": "hello wörld",
    "html": "<strong>it works!</strong>",
}
BATCH: list[resend.Emails.SendParams] = [MAIL, {**MAIL, "subject": "second"}]


class Account:
    """The SDK pointed at a sidecar whose upstream is ours."""

    def __init__(self, sidecar: Sidecar, upstream: Upstream, own_port: int) -> None:
        self.sidecar = sidecar
        self.upstream = upstream
        self.bases = {
            "prefix": f"{sidecar.base}/resend",
            "prefix and slash": f"{sidecar.base}/resend/",
            "own listener": f"http://127.0.0.1:{own_port}",
            "own listener and slash": f"http://127.0.0.1:{own_port}/",
        }

    async def send(self, key: str | None = None, mail: resend.Emails.SendParams = MAIL) -> Any:
        options: resend.Emails.SendOptions = {} if key is None else {"idempotency_key": key}
        return await asyncio.to_thread(resend.Emails.send, mail, options)

    async def batch(self, key: str, mails: list[resend.Emails.SendParams] = BATCH, **more: Any) -> Any:
        options: Any = {"idempotency_key": key, **more}
        return await asyncio.to_thread(resend.Batch.send, mails, options)

    async def raised(self, key: str, mail: resend.Emails.SendParams = MAIL) -> ResendError:
        with pytest.raises(ResendError) as caught:
            await self.send(key, mail)
        return caught.value


@pytest.fixture
async def account(
    sidecar: StartSidecar, upstream: Upstream, store: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Account:
    own = free_port()
    route = {
        "provider": "resend",
        "upstream": upstream.url,
        "path": "/resend",
        "listen": f"127.0.0.1:{own}",
        "lease": duration(3),
        "timeout": {"receive": duration(5), "connect": duration(1), "total": duration(2)},
    }
    config = {
        "store": {"url": store.url},
        "drain": duration(0.1),
        "log": {"format": "json"},
        "routes": {"resend": route},
    }
    started = Account(await sidecar(config), upstream, own)
    monkeypatch.setattr(resend, "api_key", "re_test")
    monkeypatch.setattr(resend, "api_url", started.bases["prefix"])
    # A test that hangs is a failure; the SDK's own limit is half a minute.
    monkeypatch.setattr(resend, "default_http_client", resend.RequestsClient(timeout=10))
    return started


@pytest.mark.case("C286")
async def test_every_base_url_leads_to_the_same_protected_sends(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for base in account.bases.values():
        monkeypatch.setattr(resend, "api_url", base)
        ids.append((await account.send("one key for all"))["id"])
    assert (ids, account.upstream.count) == ([ids[0]] * 4, 1)
    seen = account.upstream.requests[0]
    assert (seen.method, seen.target, seen.first("host")) == (
        b"POST",
        b"/emails",
        f"127.0.0.1:{account.upstream.port}".encode(),
    )
    assert seen.first("authorization") == b"Bearer re_test"
    assert seen.first("idempotency-key") == b"one key for all"
    assert json.loads(seen.content) == MAIL


@pytest.mark.case("C286")
@pytest.mark.parametrize("base", ["prefix", "prefix and slash", "own listener", "own listener and slash"])
async def test_sdk_sends_with_and_without_a_key_by_each_base_url(
    account: Account, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resend, "api_url", account.bases[base])
    first, again = [await account.send("K1") for _ in range(2)]
    assert (first["id"], again["id"]) == ("upstream-1", "upstream-1")
    assert "Idempotent-Replayed" not in first["http_headers"]
    assert again["http_headers"]["Idempotent-Replayed"] == "true"
    assert [(await account.send())["id"] for _ in range(2)] == ["upstream-2", "upstream-3"]
    got = await asyncio.to_thread(resend.Emails.get, "upstream-1")
    assert (got["id"], account.upstream.count) == ("upstream-4", 4)
    assert [one.target.lstrip(b"/") for one in account.upstream.requests][-1] == b"emails/upstream-1"


@pytest.mark.case("C287")
async def test_batch_is_one_send_and_its_list_comes_back_unchanged(account: Account) -> None:
    content = b'{"data":[{"id":"a"},{"id":"b"}]}'
    account.upstream.default = answer(200, [("Content-Type", "application/json")], content)
    first, again = [await account.batch("K1") for _ in range(2)]
    assert [one["id"] for one in first["data"]] == [one["id"] for one in again["data"]] == ["a", "b"]
    assert account.upstream.count == 1
    with pytest.raises(ResendError) as caught:
        await account.batch("K1", BATCH[:1])
    assert (caught.value.code, caught.value.error_type) == (409, "invalid_idempotent_request")
    with pytest.raises(ResendError):
        await account.batch("K1", batch_validation="permissive")
    assert account.upstream.count == 1


@pytest.mark.case("C288")
async def test_other_content_under_the_key_raises_resends_own_error_with_our_text(account: Account) -> None:
    await account.send("K1")
    error = await account.raised("K1", {**MAIL, "subject": "zebra"})
    assert (error.code, error.error_type) == (409, "invalid_idempotent_request")
    assert "key" in error.message
    assert "zebra" not in error.message
    assert error.headers["Content-Type"].startswith("application/json")
    assert ((await account.send("K1"))["id"], account.upstream.count) == ("upstream-1", 1)


@pytest.mark.case("C288")
async def test_concurrent_sends_raise_resends_own_error_and_one_mail_leaves(account: Account) -> None:
    release = asyncio.Event()
    account.upstream.default = gate(release)
    first = asyncio.create_task(account.send("K1"))
    await account.upstream.reached(1)
    errors = await asyncio.gather(*(account.raised("K1") for _ in range(5)))
    assert {(one.code, one.error_type) for one in errors} == {(409, "concurrent_idempotent_requests")}
    assert all(int(one.headers["Retry-After"]) >= 1 for one in errors)
    release.set()
    assert (await first)["id"] == (await account.send("K1"))["id"] == "upstream-1"
    assert account.upstream.count == 1


@pytest.mark.case("C288")
async def test_crowd_of_equal_sends_is_one_mail(account: Account) -> None:
    account.upstream.default = slow(0.3)
    outcomes = await asyncio.gather(*(account.send("K1") for _ in range(12)), return_exceptions=True)
    sent = [one["id"] for one in outcomes if isinstance(one, dict)]
    refused = [one.error_type for one in outcomes if isinstance(one, ResendError)]
    assert (set(sent), set(refused)) == ({"upstream-1"}, {"concurrent_idempotent_requests"})
    assert (len(sent) + len(refused), account.upstream.count) == (12, 1)


@pytest.mark.case("C289")
async def test_lost_answer_is_told_and_the_retry_carries_the_same_key(account: Account) -> None:
    """Resend guards twins of its key, so an unknown outcome is tried again: two requests, to Resend one mail."""
    account.upstream.script(close_after_content())
    error = await account.raised("K1")
    assert (error.code, account.upstream.count) == (504, 1)
    assert "may have left" in error.message
    retried = await account.send("K1")
    assert ((await account.send("K1"))["id"], account.upstream.count) == (retried["id"], 2)
    assert [one.first("idempotency-key") for one in account.upstream.requests] == [b"K1", b"K1"]


@pytest.mark.case("C289")
async def test_sdk_that_gives_up_too_early_gets_the_first_answer_on_its_retry(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.upstream.script(slow(1.2))
    monkeypatch.setattr(resend, "default_http_client", resend.RequestsClient(timeout=0.5))  # type: ignore[arg-type]
    error = await account.raised("K1")
    assert error.error_type == "HttpClientError"
    monkeypatch.setattr(resend, "default_http_client", resend.RequestsClient(timeout=10))
    await until(lambda: account.sidecar.log_lines(event="request", outcome="forwarded"))
    assert ((await account.send("K1"))["id"], account.upstream.count) == ("upstream-1", 1)


def _error(status: int, name: str, **fields: str) -> Any:
    content = json.dumps({"statusCode": status, "name": name, "message": f"upstream says {name}"}).encode()
    return answer(status, [("Content-Type", "application/json"), *fields.items()], content)


@pytest.mark.case("C290")
@pytest.mark.parametrize(
    ("status", "name", "kind"),
    [
        (422, "validation_error", ValidationError),
        (429, "rate_limit_exceeded", RateLimitError),
        (500, "application_error", ApplicationError),
        (403, "validation_error", ResendError),
    ],
)
async def test_resends_own_errors_arrive_typed_and_free_the_key(
    account: Account, status: int, name: str, kind: type[ResendError]
) -> None:
    account.upstream.script(_error(status, name, **{"Retry-After": "7"}))
    error = await account.raised("K1")
    assert (type(error), error.code, error.message) == (kind, status, f"upstream says {name}")
    assert error.headers["Retry-After"] == "7"
    if status == 500:
        # Any 5xx may have been an acceptance; since Resend knows the key, the retry goes out again.
        assert account.upstream.count == 1
    assert ((await account.send("K1"))["id"], account.upstream.count) == ("upstream-2", 2)


@pytest.mark.case("C290")
async def test_problems_of_ours_are_errors_the_sdk_can_read(account: Account) -> None:
    malformed = await account.raised("a,b")
    assert (malformed.code, malformed.error_type) == (400, "invalid_idempotency_key")
    await account.upstream.refuse()
    unreachable = await account.raised("K1")
    assert (unreachable.code, unreachable.message != "") == (502, True)
    assert "Expected JSON" not in unreachable.message
    await account.upstream.accept()
    assert ((await account.send("K1"))["id"], account.upstream.count) == ("upstream-1", 1)


@pytest.mark.case("C290")
async def test_async_calls_of_two_accounts_do_not_share_a_key(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await account.send("K1")
    monkeypatch.setattr(resend, "api_key", "re_other")
    second = await account.send("K1")
    assert (first["id"], second["id"], account.upstream.count) == ("upstream-1", "upstream-2", 2)
