"""Settling where something is broken or open: a killed or frozen owner, a store that is away, no token."""

from __future__ import annotations

import asyncio
import re
import time

from harness import answer, gate, stall
from lab import JSON, LEASE_S, Lab, elapsed, fresh, stored, times
from settling import ask, keys, lose, record_of

pytest_plugins = ("lab_fixtures",)


async def test_owner_killed_in_flight_is_listed_without_another_arrival(lab: Lab) -> None:
    one, two = [await lab.sidecar({"mail": lab.route(timeout=times(total_s=60))}) for _ in range(2)]
    key = fresh()
    lab.upstream.script(stall())
    sending = asyncio.create_task(one.send(key, deadline_s=60))
    await lab.upstream.reached()
    outstanding = await keys(two, "list", "--state", "outstanding")
    assert re.search(rf"lease \ds .* {key}$", outstanding.out, re.MULTILINE), outstanding
    words = (("resolve", "--sent"), ("resolve", "--not-sent", "--force"), ("forget",))
    for sidecar, reason in ((one, "runs in this sidecar"), (two, "its lease ends in")):
        for word in words:
            refused = await keys(sidecar, *word, key)
            assert (refused.code, refused.out) == (1, "")
            assert reason in refused.err
    await one.kill()
    await asyncio.gather(sending, return_exceptions=True)
    await elapsed(time.monotonic(), LEASE_S + 0.1)
    listed = await keys(two, "list")
    assert re.search(rf"owner-lost .* {key}$", listed.out, re.MULTILINE), listed
    assert (await keys(two, "resolve", key, "--not-sent", "--force")).code == 0
    assert (await two.send(key)).status == 200
    assert lab.count(key) == 2


async def test_owner_that_outlives_a_not_sent_adds_its_answer(lab: Lab) -> None:
    sidecars = [await lab.sidecar({"mail": lab.route(timeout=times(total_s=20))}) for _ in range(2)]
    key = fresh()
    begin, behaviour = asyncio.Event(), answer(200, [JSON], b"late")
    lab.upstream.script(gate(begin, behaviour))
    sending = asyncio.create_task(sidecars[0].send(key, deadline_s=20))
    await lab.upstream.reached()
    sidecars[0].pause()
    await elapsed(time.monotonic(), LEASE_S + 0.2)
    assert (await keys(sidecars[1], "resolve", key, "--not-sent", "--force")).code == 0
    begin.set()
    sidecars[0].resume()
    first = await sending
    assert first.content == b"late"
    stored(first, await sidecars[1].send(key))
    assert lab.count(key) == 1


async def test_store_that_is_away_is_told_with_exit_code_1(lab: Lab) -> None:
    one = await lab.sidecar()
    lab.store.stop()
    ran = await keys(one, "list")
    lab.store.start()
    assert (ran.code, ran.out) == (1, "")
    assert "store" in ran.err


async def test_content_needs_a_token_to_be_set_and_the_rest_does_not_on_loopback(lab: Lab) -> None:
    one = await lab.sidecar()
    key = await lose(lab)
    record = record_of(lab, key)
    assert (await ask(one, f"/v1/records/{record}", Authorization="")).status == 200
    refused = await ask(one, f"/v1/records/{record}?content=1", Authorization="")
    assert (refused.status, refused.slug) == (403, "token-unset")
    ran = await keys(one, "show", key, "--content")
    assert (ran.code, "admin.token" in ran.err) == (1, True)
    assert (await keys(one, "resolve", key, "--sent")).code == 0


async def test_beyond_loopback_and_without_a_token_nothing_is_told(lab: Lab) -> None:
    one = await lab.sidecar()
    await one.stop()
    one.file.write_text(one.file.read_text().replace(f"127.0.0.1:{one.admin_port}", f"0.0.0.0:{one.admin_port}"))
    await one.run()
    refused = await ask(one, "/v1/records", Authorization="")
    assert (refused.status, refused.slug) == (403, "token-unset")
