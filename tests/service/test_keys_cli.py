"""`sidecar keys` against the real program: find what nobody knows, and settle it."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path

import pytest
from harness import answer, close_after_content
from harness.program import Sidecar
from lab import JSON, Lab, elapsed, fresh, problem, stored, unknown
from settling import TOP, keys, lose, record_of, routes, said

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = ("Authorization", "Bearer two")

__all__ = ["TOP", "routes"]


# A lost answer, from its list to its end.


async def test_lost_answer_is_listed_and_once_resolved_as_sent_a_retry_is_told_so(shared: Lab) -> None:
    key = await lose(shared)
    listed = await keys(shared.one, "list")
    assert listed.code == 0, listed
    assert re.search(rf"^[0-9a-f]{{40}}  answer-lost +\d+[smh]  mail +{key}$", listed.out, re.MULTILINE), listed.out
    ran = await keys(shared.one, "resolve", key, "--sent", "--id", "re_4711")
    assert (ran.code, ran.err) == (0, ""), ran
    assert "Settled as sent" in ran.out
    retry = await shared.one.send(key)
    members = problem(retry, "response-not-kept", 200, sent="unknown", retryable=False)
    assert "operator" in members["detail"]
    assert "re_4711" in members["detail"]
    assert shared.count(key) == 1
    assert key not in (await keys(shared.one, "list")).out
    shown = (await keys(shared.one, "show", key, "--json")).json()
    assert (shown["state"], shown["resolved"], shown["provider_id"]) == ("completed", True, "re_4711")


async def test_resolved_as_not_sent_a_retry_is_forwarded_once(shared: Lab) -> None:
    key = await lose(shared, "patient")
    early = await keys(shared.one, "resolve", key, "--not-sent")
    assert early.code == 1
    assert "log may lag" in early.err
    unknown(await shared.one.send(key, target="/patient/emails"))
    ran = await keys(shared.one, "resolve", key, "--not-sent", "--force")
    assert ran.code == 0, ran
    first = await shared.one.send(key, target="/patient/emails")
    assert (first.status, first.replayed) == (200, False)
    stored(first, await shared.one.send(key, target="/patient/emails"))
    assert shared.count(key) == 2


async def test_not_sent_needs_no_force_once_the_provider_had_its_time(shared: Lab) -> None:
    key = await lose(shared, "quick")
    await elapsed(time.monotonic(), 0.1)
    ran = await keys(shared.one, "resolve", "--not-sent", key)
    assert ran.code == 0, ran
    assert (await shared.one.send(key, target="/quick/emails")).status == 200
    assert shared.count(key) == 2


@pytest.mark.parametrize("state", ["unknown", "completed"])
async def test_forgotten_key_is_forwarded_again(shared: Lab, state: str) -> None:
    key = await lose(shared) if state == "unknown" else fresh()
    if state == "completed":
        assert (await shared.one.send(key)).status == 200
    ran = await keys(shared.one, "forget", key)
    assert ran.code == 0, ran
    assert "free" in ran.out
    again = await shared.one.send(key)
    assert (again.status, again.replayed) == (200, False)
    assert shared.count(key) == 2


async def test_resolved_with_the_answer_a_retry_gets_it(shared: Lab) -> None:
    key = await lose(shared, "accepting")
    content = b'{"id": "re_4711"}'
    ran = await keys(shared.one, "resolve", key, "--sent", "--answer", "-", given=content)
    assert ran.code == 0, ran
    retry = await shared.one.send(key, target="/accepting/emails")
    assert (retry.status, retry.content, retry.replayed) == (202, content, True)
    assert retry.first("content-type") == b"application/json"
    assert shared.count(key) == 1


async def test_retry_of_a_key_resolved_as_sent_gets_the_routes_accepted_status(shared: Lab) -> None:
    key = await lose(shared, "accepting")
    assert (await keys(shared.one, "resolve", key, "--sent")).code == 0
    retry = await shared.one.send(key, target="/accepting/emails")
    problem(retry, "response-not-kept", 202, sent="unknown", retryable=False)
    again = await keys(shared.one, "resolve", key, "--sent")
    assert (again.code, "before" in again.out) == (0, True)
    refused = await keys(shared.one, "resolve", key, "--not-sent", "--force")
    assert (refused.code, "forget" in refused.err) == (1, True)


# Finding.


async def test_key_of_two_credentials_is_listed_and_asks_for_the_id(shared: Lab) -> None:
    key = await lose(shared)
    await lose(shared, key=key, fields=(OTHER, JSON))
    ran = await keys(shared.one, "resolve", key, "--sent")
    assert (ran.code, ran.out) == (1, "")
    assert "name one by its id" in ran.err
    found = re.findall(r"^[0-9a-f]{40}", ran.err, re.MULTILINE)
    assert len(found) == 2
    assert (await keys(shared.one, "resolve", found[0], "--sent")).code == 0
    states = sorted(shared.field(name, "state") for name in shared.names() if name.rpartition(":")[2] in found)
    assert states == ["completed", "unknown"]


async def test_key_that_looks_like_an_id_is_found_by_its_text(shared: Lab) -> None:
    key = "ab" * 20
    await lose(shared, key=key)
    shown = (await keys(shared.one, "show", key, "--json")).json()
    assert (shown["key"], shown["state"]) == (key, "unknown")
    assert shown["id"] != key


async def test_record_without_text_is_found_by_its_id_alone(shared: Lab) -> None:
    key = await lose(shared, "digest")
    missed = await keys(shared.one, "show", key)
    assert (missed.code, "record_key" in missed.err) == (1, True)
    line = [line for line in shared.one.log_lines(event="request", route="digest") if "record" in line][-1]
    assert (await keys(shared.one, "show", line["record"], "--json")).json()["key"] is None
    assert (await keys(shared.one, "forget", line["record"])).code == 0


async def test_list_is_by_route_and_state_limited_and_fits_a_terminal(shared: Lab) -> None:
    long = "k" * 200
    lost = [await lose(shared, "digest"), await lose(shared, key=long), await lose(shared)]
    assert (await shared.one.send(fresh())).status == 200
    limited = await keys(shared.one, "list", "--limit", "1")
    assert lost[2] in limited.out
    assert "more" in limited.err
    by_route = (await keys(shared.one, "list", "--route", "digest", "--json")).json()
    assert {one["route"] for one in by_route["records"]} == {"digest"}
    assert by_route["more"] is False
    completed = (await keys(shared.one, "list", "--state", "completed", "--json")).json()["records"]
    assert {one["state"] for one in completed} == {"completed"}
    everything = await keys(shared.one, "list")
    shown = await keys(shared.one, "show", long)
    assert max(map(len, (everything.out + shown.out).splitlines())) <= 100
    assert long in shown.out.replace("\n          ", "")
    nothing = await keys(shared.one, "list", "--route", "none-such")
    assert (nothing.code, nothing.out) == (0, "no unknown records on route none-such\n")


async def test_show_tells_what_is_known_and_what_to_do(shared: Lab) -> None:
    key = await lose(shared)
    told = (await keys(shared.one, "show", key)).out
    for part in (
        "no complete answer",
        "attempt",
        "owner",
        "expires",
        "--not-sent",
        "mail",
        record_of(shared, key),
    ):
        assert part in told, told
    shown = (await keys(shared.one, "show", key, "--json")).json()
    assert (shown["state"], shown["why"], shown["attempt"], shown["route"]) == ("unknown", "answer-lost", 1, "mail")
    assert shown["first_attempt"].endswith("Z")
    assert 0 <= shown["age_s"] < 60
    assert shown["expires_s"] > 2_500_000
    assert shown["fingerprint_algorithm"]
    assert shown["owner"]


async def test_content_is_shown_only_where_asked(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(answer(200, [JSON], b'{"secret":"of the answer"}'))
    await shared.one.send(key)
    plain = await keys(shared.one, "show", key)
    assert "secret" not in plain.out
    assert "secret" not in (await keys(shared.one, "show", key, "--json")).out
    assert '{"secret":"of the answer"}' in (await keys(shared.one, "show", key, "--content")).out
    whole = (await keys(shared.one, "show", key, "--content", "--json")).json()["answer"]
    assert base64.b64decode(whole["content_base64"]) == b'{"secret":"of the answer"}'
    assert whole["status"] == 200


# Usage and failure.


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("resolve", "K"), "either --sent or --not-sent"),
        (("resolve", "K", "--sent", "--not-sent"), "either --sent or --not-sent"),
        (("resolve", "K", "--not-sent", "--id", "x"), "go with --sent"),
        (("show",), "KEY|ID"),
        (("list", "--state", "gone"), "gone"),
        (("list", "--limit", "0"), "limit"),
    ],
)
async def test_usage_is_told_with_exit_code_2(
    shared: Lab, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
) -> None:
    ran = await said(shared.one, capfd, *words)
    assert (ran.code, ran.out) == (2, "")
    assert part in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("words", [("show",), ("forget",), ("resolve", "--sent")])
@pytest.mark.parametrize("key", ["never-used", "ab" * 19 + "cd"])
async def test_what_is_not_there_is_told_with_exit_code_1(
    shared: Lab, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], key: str
) -> None:
    ran = await said(shared.one, capfd, *words, key)
    assert (ran.code, ran.out) == (1, "")
    assert "there is no record" in ran.err


async def test_sidecar_that_does_not_run_is_told_with_exit_code_1(shared: Lab, tmp_path: Path) -> None:
    stopped = Sidecar(tmp_path, shared.config(routes(shared)))
    ran = await keys(stopped, "list")
    assert (ran.code, ran.out) == (1, "")
    assert "refused" in ran.err


async def test_wrong_token_is_told_with_exit_code_1(shared: Lab, tmp_path: Path) -> None:
    other = Sidecar(tmp_path, shared.config(routes(shared), admin={"token": "another"}))
    other.file.write_text(other.file.read_text().replace(str(other.admin_port), str(shared.one.admin_port)))
    ran = await keys(other, "list")
    assert (ran.code, "admin.token" in ran.err) == (1, True)


async def test_hold_tells_how_to_settle(shared: Lab) -> None:
    key = fresh()
    shared.upstream.script(close_after_content())
    for _ in range(2):
        assert "sidecar keys resolve" in unknown(await shared.one.send(key))["detail"]
