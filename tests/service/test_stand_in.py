"""The stand-in provider: what it accepts, how it misbehaves, and what it tells about it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import Client, NoAnswerError, Parsed, free_port, raw, request, together, until

from sidecar.stand_in import Mode, StandIn, duration_s

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def provider() -> AsyncIterator[StandIn]:
    async with StandIn() as started:
        yield started


async def post(provider: StandIn, content: bytes = b"{}", key: str | None = None, target: str = "/emails") -> Parsed:
    return await raw(provider.url, request("POST", target, [("Authorization", "Bearer secret")], content, key=key))


async def put_mode(provider: StandIn, **wanted: object) -> Parsed:
    return await raw(provider.url, request("PUT", "/_mode", content=json.dumps(wanted).encode()))


async def accepted(provider: StandIn) -> Any:
    return (await raw(provider.url, request("GET", "/_accepted"))).json()


async def test_any_post_is_an_accepted_mail_with_an_id_of_its_own(provider: StandIn) -> None:
    answers = [await post(provider, target=target) for target in ("/emails", "/v3/a.example/messages?x=%41", "/")]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert all(answer.json()["object"] == "email" for answer in answers)
    shown = await accepted(provider)
    assert shown["count"] == 3
    assert [mail["id"] for mail in shown["accepted"]] == [answer.json()["id"] for answer in answers]
    assert [mail["path"] for mail in shown["accepted"]] == ["/emails", "/v3/a.example/messages?x=%41", "/"]


async def test_accepted_shows_key_and_digest_and_no_credential(provider: StandIn) -> None:
    await post(provider, b"hello", key="K1")
    answer = await raw(provider.url, request("GET", "/_accepted"))
    mail = answer.json()["accepted"][0]
    assert (mail["method"], mail["key"]) == ("POST", "K1")
    assert mail["digest"] == hashlib.sha256(b"hello").hexdigest()
    assert b"secret" not in answer.content
    assert b"hello" not in answer.content


async def test_delete_counts_from_zero_and_get_of_anything_else_is_404(provider: StandIn) -> None:
    await post(provider)
    assert (await raw(provider.url, request("DELETE", "/_accepted"))).status == 204
    assert await accepted(provider) == {"count": 0, "accepted": []}
    assert (await raw(provider.url, request("GET", "/emails"))).status == 404


@pytest.mark.parametrize(
    ("mode", "status", "name"),
    [("fail", 500, "internal_server_error"), ("refuse", 422, "validation_error"), ("busy", 429, "rate_limit_exceeded")],
)
async def test_refusing_modes_answer_and_accept_nothing(provider: StandIn, mode: str, status: int, name: str) -> None:
    await put_mode(provider, mode=mode)
    answer = await post(provider)
    assert (answer.status, answer.json()["name"]) == (status, name)
    assert (answer.first("retry-after") is not None) == (mode == "busy")
    assert provider.count == 0


@pytest.mark.parametrize(("mode", "count"), [("lost", 1), ("cut", 1), ("reset", 0)])
async def test_answer_that_does_not_arrive_whole(provider: StandIn, mode: str, count: int) -> None:
    await put_mode(provider, mode=mode, times=1)
    with pytest.raises((NoAnswerError, ConnectionError)) as caught:
        await post(provider)
    assert provider.count == count
    if mode == "cut":
        assert isinstance(caught.value, NoAnswerError)
        assert caught.value.head.startswith(b"HTTP/1.1 200 ")
    assert (await post(provider)).status == 200


async def test_times_counts_down_and_the_lasting_mode_returns(provider: StandIn) -> None:
    await put_mode(provider, mode="refuse")
    shown = (await put_mode(provider, mode="fail", times=2)).json()
    assert shown == {"mode": "fail", "delay": "0s", "times": 2}
    assert [(await post(provider)).status for _ in range(3)] == [500, 500, 422]


async def test_slow_mail_is_accepted_before_its_answer_and_though_the_client_leaves(provider: StandIn) -> None:
    await put_mode(provider, mode="slow", delay="200ms")
    client = await Client.open(provider.url)
    await client.send(request(content=b"{}"))
    await until(lambda: provider.count == 1)
    client.abort()
    assert (await post(provider)).status == 200
    assert provider.count == 2


@pytest.mark.parametrize(
    "wanted",
    [{"mode": "odd"}, {"mode": "ok", "times": 0}, {"mode": "ok", "times": "1"}, {"delay": "fast"}, {"mod": "ok"}, []],
    ids=["mode", "times", "text", "delay", "member", "list"],
)
async def test_unusable_mode_is_400_and_changes_nothing(provider: StandIn, wanted: object) -> None:
    answer = await raw(provider.url, request("PUT", "/_mode", content=json.dumps(wanted).encode()))
    assert answer.status == 400
    assert (await post(provider)).status == 200


async def test_native_replays_refuses_twins_and_other_content() -> None:
    async with StandIn(native=True) as provider:
        first, again = await post(provider, key="K1"), await post(provider, key="K1")
        assert again.content == first.content
        assert (await post(provider, b"other", key="K1")).json()["name"] == "invalid_idempotent_request"
        provider.set_mode(Mode.SLOW, 0.1, times=1)
        twins = await together(provider.url, [request(content=b"{}", key="K2")] * 5)
        assert sorted(twin.status for twin in twins) == [200, 409, 409, 409, 409]
        assert provider.count == 2


async def test_native_remembers_a_mail_whose_answer_was_lost() -> None:
    async with StandIn(native=True, mode="lost") as provider:
        with pytest.raises(NoAnswerError):
            await post(provider, key="K1")
        assert (await post(provider, key="K1")).json()["id"] == provider.accepted[0].id
        assert provider.count == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("2s", 2.0), ("500ms", 0.5), ("1m", 60.0), (3, 3.0), ("1.5s", 1.5), (0, 0.0)]
)
def test_durations(text: object, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "2h30", True, None, "1 s"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="delay"):
        duration_s(text)


def command(port: int, mode: str = "ok") -> list[str]:
    code = f"import sys; from sidecar import stand_in; sys.exit(stand_in.run('127.0.0.1', {port}, {mode!r}, 0.0))"
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_command_says_its_address_and_each_mail_and_ends_with_0(number: signal.Signals) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(*command(port), cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert f"http://127.0.0.1:{port}" in (await process.stdout.readline()).decode()
    assert b"lost" in await process.stdout.readline()
    await raw(f"http://127.0.0.1:{port}", request(target="/emails", content=b"{}", key="K1"))
    line = await process.stdout.readline()
    process.send_signal(number)
    assert await process.wait() == 0
    assert b"accepted no. 1: POST /emails, key 'K1'" in line


def test_command_on_a_taken_port_says_so_and_ends_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(command(port), cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
