"""SIGHUP: the file is read again; routes and policies change for new requests, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import copy
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import RedisServer, Sidecar, Upstream, answer, default_config, gate, until
from pair import Pair, post


class Reloaded:
    """A sidecar whose file changes."""

    def __init__(self, sidecar: Sidecar, upstream: Upstream, config: dict[str, Any]) -> None:
        self.pair = Pair(sidecar, upstream)
        self.config = copy.deepcopy(config)

    @classmethod
    async def start(cls, directory: Path, upstream: Upstream, store: RedisServer, **parts: Any) -> Reloaded:
        config = {**default_config(upstream, store.url), "limits": {"outstanding": 500}, **parts}
        return cls(await Sidecar.start(directory / "sidecar", config), upstream, config)

    async def hup(self, word: str = "read again") -> list[str]:
        """Write the file and send SIGHUP; what the log says of it, up to the line that holds `word`."""
        sidecar = self.pair.sidecar
        sidecar.write_config(self.config)
        return await self.hup_as_it_is(word)

    async def hup_as_it_is(self, word: str) -> list[str]:
        sidecar = self.pair.sidecar
        begin = len(sidecar.log_lines(event="configuration"))
        sidecar.send_signal(signal.SIGHUP)

        def told() -> list[str]:
            lines = [str(line["message"]) for line in sidecar.log_lines(event="configuration")[begin:]]
            return lines if any(word in line for line in lines) else []

        return await until(told)


@pytest.mark.case("C276")
async def test_policies_and_routes_change_for_new_requests(
    tmp_path: Path, upstream: Upstream, store: RedisServer
) -> None:
    one = await Reloaded.start(tmp_path, upstream, store)
    pair = one.pair
    try:
        assert (await pair.send(None)).status == 200
        assert (await pair.ask(post("x", target="/more/emails"))).status == 404
        one.config["routes"]["mail"]["key"] = {"missing": "reject"}
        one.config["routes"]["more"] = copy.deepcopy(one.config["routes"]["mail"])
        pid = pair.sidecar.pid
        assert await one.hup() == ["read again"]
        assert (await pair.send(None)).slug == "key-missing"
        assert (await pair.ask(post("x", target="/more/emails"))).status == 200
        assert (await pair.sidecar.ask_admin("/readyz")).status == 200
        assert (pair.sidecar.pid, pair.sidecar.exit_code, pair.count) == (pid, None, 2)
        del one.config["routes"]["more"]
        await one.hup()
        assert (await pair.ask(post("x", target="/more/emails"))).status == 404
    finally:
        await pair.sidecar.close()


@pytest.mark.case("C276")
async def test_request_that_runs_keeps_the_policy_it_began_with(
    tmp_path: Path, upstream: Upstream, store: RedisServer
) -> None:
    one = await Reloaded.start(tmp_path, upstream, store)
    release = asyncio.Event()
    upstream.script(gate(release, answer(422, [], b"refused")))
    try:
        running = asyncio.create_task(one.pair.send("running"))
        await upstream.reached(1)
        one.config["routes"]["mail"] |= {"final": ["2xx"], "replay_field": "X-New"}
        one.config["routes"]["mail"]["timeout"]["connect"] = "3s"
        await one.hup()
        release.set()
        first = await running
        assert (first.status, first.content) == (422, b"refused")
        again = await one.pair.send("running")
        assert (again.status, again.content, again.first("x-new"), one.pair.count) == (422, b"refused", b"true", 1)
        upstream.script(answer(422))
        await one.pair.send("new policy")
        assert ((await one.pair.send("new policy")).status, one.pair.count) == (200, 3)
    finally:
        await one.pair.sidecar.close()


@pytest.mark.case("C277")
@pytest.mark.parametrize(
    ("text", "word"),
    [("routes: {mail: {upstream: nonsense}}", "upstream"), ("a: [", ""), ("", ""), (None, "cannot read")],
    ids=["mistake", "no YAML", "empty", "gone"],
)
async def test_bad_file_never_replaces_a_good_one(
    tmp_path: Path, upstream: Upstream, store: RedisServer, text: str | None, word: str
) -> None:
    one = await Reloaded.start(tmp_path, upstream, store)
    try:
        file = one.pair.sidecar.file
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        told = await one.hup_as_it_is("stays as it is")
        assert len(told) >= 2
        assert all(line.startswith(f"{file}:") for line in told[:-1])
        assert any(word in line for line in told[:-1])
        assert (await one.pair.send("unharmed")).status == 200
        assert await one.hup() == ["read again"]
    finally:
        await one.pair.sidecar.close()


@pytest.mark.case("C277")
async def test_certificates_that_are_gone_at_a_reload_change_nothing(
    tmp_path: Path, upstream: Upstream, store: RedisServer
) -> None:
    one = await Reloaded.start(tmp_path, upstream, store)
    (tmp_path / "ca.pem").write_text("no certificate at all")
    try:
        one.config["routes"]["other"] = {
            **copy.deepcopy(one.config["routes"]["mail"]),
            "ca": str(tmp_path / "ca.pem"),
            "upstream": "https://127.0.0.1:1",
        }
        await one.hup("stays as it is")
        assert (await one.pair.send("unharmed")).status == 200
        assert "Traceback" not in one.pair.sidecar.log()
    finally:
        await one.pair.sidecar.close()


@pytest.mark.case("C278")
async def test_what_needs_a_restart_says_so_and_does_not_change(
    tmp_path: Path, upstream: Upstream, store: RedisServer
) -> None:
    one = await Reloaded.start(tmp_path, upstream, store)
    try:
        first = await one.pair.send("before the change")
        one.config["routes"]["mail"] |= {"scope": ["route"], "path": "/moved", "upstream": "http://127.0.0.1:9"}
        one.config["store"]["prefix"] = "other"
        one.config["drain"] = "7s"
        one.config["limits"] = {"request": "1MiB"}
        one.config["listen"] = "127.0.0.1:1"
        told = await one.hup()
        for name in (
            "routes.mail.scope",
            "routes.mail.path",
            "routes.mail.upstream",
            "store",
            "drain",
            "limits",
            "listen",
        ):
            assert any(line.startswith(name + ":") and "restart" in line for line in told), name
        again = await one.pair.send("before the change")
        assert (again.replayed, again.content, one.pair.count) == (True, first.content, 1)
        assert (await one.pair.ask(post("moved", target="/moved/emails"))).status == 404
        told = await one.hup()
        assert any(line.startswith("routes.mail.scope:") for line in told)
    finally:
        await one.pair.sidecar.close()


@pytest.mark.case("C278")
async def test_unchanged_file_changes_nothing_and_keeps_the_connections(
    tmp_path: Path, upstream: Upstream, store: RedisServer
) -> None:
    # Outstanding requests beyond the descriptors there are: lowered at the start, which is no change of the file.
    one = await Reloaded.start(tmp_path, upstream, store, limits={})
    try:
        async with await one.pair.client() as client:
            await client.ask(post("one"))
            for _ in range(3):
                assert await one.hup() == ["read again"]
            assert (await client.ask(post("two"))).status == 200
        assert (upstream.connections, one.pair.count) == (1, 2)
    finally:
        await one.pair.sidecar.close()
