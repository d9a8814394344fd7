"""How long an answer is replayed, and how long an unknown outcome is held."""

from __future__ import annotations

import time

import pytest
from harness import duration, reset_after_content, scaled
from lab import LEASE_S, Lab, Settings, elapsed, fresh, stored, times, unknown

pytest_plugins = ("lab_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK_S = 0.2
TTL_S = LEASE_S + 2 * QUICK_S + 0.2
DAY_MS = 86_400_000


def routes(lab: Lab) -> dict[str, Settings]:
    quick = {"timeout": times(connect_s=QUICK_S, total_s=QUICK_S)}
    ttl = {"ttl": duration(TTL_S)}
    return {
        "mail": lab.route(**quick),
        "brief": lab.route(**quick, **ttl),
        "forgetful": lab.route(**quick, **ttl, hold_for=duration(TTL_S)),
        "sends": lab.route(**quick, sends=["POST /emails", {"match": "POST /brief", **ttl}]),
    }


@pytest.mark.case("C198")
async def test_answer_is_replayed_for_its_ttl_from_completion_and_a_replay_prolongs_nothing(shared: Lab) -> None:
    keys = {"/brief/emails": fresh(), "/sends/brief": fresh()}
    begin_s = time.monotonic()
    firsts = {target: await shared.one.send(key, target=target) for target, key in keys.items()}
    for share in (0.4, 0.8):
        await elapsed(begin_s, share * TTL_S)
        for target, key in keys.items():
            stored(firsts[target], await shared.one.send(key, target=target))
    await elapsed(begin_s, TTL_S + 0.2)
    for target, key in keys.items():
        assert not (await shared.one.send(key, target=target)).replayed
        assert shared.count(key) == 2


@pytest.mark.case("C198")
async def test_each_route_keeps_to_its_own_ttl(shared: Lab) -> None:
    lasting, brief = fresh(), fresh()
    begin_s = time.monotonic()
    first = await shared.one.send(lasting)
    await shared.one.send(brief, target="/brief/emails")
    name = shared.name(lasting)
    await elapsed(begin_s, TTL_S + 0.2)
    stored(first, await shared.one.send(lasting))
    assert not (await shared.one.send(brief, target="/brief/emails")).replayed
    assert DAY_MS - scaled(30_000) < shared.left_ms(name) < DAY_MS


@pytest.mark.case("C198")
async def test_unknown_outcome_is_held_for_hold_for_and_not_for_the_ttl(shared: Lab) -> None:
    held, forgotten = fresh(), fresh()
    shared.upstream.script(reset_after_content(), reset_after_content())
    begin_s = time.monotonic()
    unknown(await shared.one.send(held, target="/brief/emails"))
    unknown(await shared.one.send(forgotten, target="/forgetful/emails"))
    await elapsed(begin_s, 0.5 * TTL_S)
    unknown(await shared.one.send(held, target="/brief/emails"))
    unknown(await shared.one.send(forgotten, target="/forgetful/emails"))
    await elapsed(begin_s, TTL_S + 0.2)
    unknown(await shared.one.send(held, target="/brief/emails"))
    assert shared.left_ms(shared.name(held)) > 29 * DAY_MS
    # What an operator lets lapse may be sent again: that is what `hold_for` says.
    assert (await shared.one.send(forgotten, target="/forgetful/emails")).status == 200
    assert (shared.count(held), shared.count(forgotten)) == (1, 2)


@pytest.mark.case("C198")
async def test_replay_writes_nothing(shared: Lab) -> None:
    key = fresh()
    await shared.one.send(key)
    name = shared.name(key)

    before, left_ms = shared.store.command("HGETALL", name), shared.left_ms(name)
    for _ in range(5):
        assert (await shared.one.send(key)).replayed
        assert shared.left_ms(name) <= left_ms
    assert shared.store.command("HGETALL", name) == before
