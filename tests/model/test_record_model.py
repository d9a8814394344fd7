"""Model and scripts do the same, in every order of everybody's commands that hypothesis finds."""

from __future__ import annotations

import os

import pytest
from harness import RedisServer
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from model.machine import RecordMachine
from model.world import Mistake, World

# How many stories; a few seconds each way by default. SIDECAR_MODEL_EXAMPLES=5000 looks for an hour.
EXAMPLES = int(os.environ.get("SIDECAR_MODEL_EXAMPLES", "250"))
STEPS = 30


# As many as a mistake may take to be found.
MISTAKEN_EXAMPLES = 2000

MISTAKES = {
    "reserve takes what is over": Mistake(
        "reserve",
        "local record = read()\n",
        "local record = read()\n"
        "if record and record.state == 'outstanding' and since_change(record) > record.lease then record = nil end\n",
    ),
    "reserve forgets that an attempt is unknown": Mistake(
        "reserve", "'attempt', attempt, 'earlier', 1", "'attempt', attempt, 'earlier', 0"
    ),
    "reserve resends under hold": Mistake("reserve", "if ARGV[16] ~= 'resend' or left == 0", "if left == 0"),
    "reserve resends beyond the window": Mistake("reserve", "or left == 0 or", "or"),
    "reserve resends under another account": Mistake("reserve", " or record.cred ~= ARGV[7]", ""),
    "reserve resends too early": Mistake("reserve", "if over < tonumber(ARGV[19])", "if false"),
    "reserve does not recognise itself": Mistake(
        "reserve", "if record.owner == ARGV[1] and record.state == 'outstanding'", "if false"
    ),
    "replay prolongs": Mistake(
        "reserve",
        "  local kept = redis.call",
        "  redis.call('PEXPIRE', KEYS[1], record.hold)\n  local kept = redis.call",
    ),
    "renew by anybody": Mistake("renew", " and record.owner == ARGV[1]", ""),
    "renew does not restore": Mistake(
        "renew", "if not record then", "if not record then return {'stale'} end\nif not record then"
    ),
    "complete overwrites": Mistake("complete", "if record.state == 'completed' then", "if false then"),
    "complete by the owner alone": Mistake(
        "complete", "if refusal then return {'stale'} end\nreturn complete()", "return {'stale'}"
    ),
    "refusal by anybody": Mistake(
        "complete", "if refusal then return {'stale'} end\nreturn complete()", "return complete()"
    ),
    "refusal settles an unknown": Mistake("complete", "if refusal and record.earlier then", "if false then"),
    "complete of what is gone, at any age": Mistake(
        "complete", "if tonumber(ARGV[17]) >= tonumber(ARGV[16])", "if false"
    ),
    "complete for ever": Mistake(
        "complete", "  redis.call('PEXPIRE', KEYS[1], ARGV[16])", "  redis.call('PERSIST', KEYS[1])"
    ),
    "release by anybody": Mistake("release", " or record.owner ~= ARGV[1]", ""),
    "release frees an unknown": Mistake("release", "if record.earlier then", "if false then"),
    "release leaves the list": Mistake("release", "redis.call('DEL', KEYS[1])\nunlist()", "redis.call('DEL', KEYS[1])"),
    "lose by anybody": Mistake("lose", "if record.owner ~= ARGV[1] then", "if false then"),
    "lose by a former owner is forgotten": Mistake(
        "lose", "if not record.earlier then redis.call('HSET', KEYS[1], 'earlier', 1) end", ""
    ),
    "lose by a former owner prolongs": Mistake(
        "lose",
        "  return {'stale'}\nend\n\nif record.state == 'outstanding'",
        "  redis.call('PEXPIRE', KEYS[1], record.hold)\n  return {'stale'}\nend\n\nif record.state == 'outstanding'",
    ),
    "lose of what is gone is dropped": Mistake(
        "lose", "  put('unknown', ARGV[12], ARGV[13])", "  if true then return {'stale'} end"
    ),
    "forget while it is sent": Mistake("forget", "if since <= record.lease then", "if false then"),
    "not sent is believed at once": Mistake("resolve", "if over < quiet and not forced then", "if false then"),
}


def run(world: World, chosen: settings) -> None:
    """As many stories as `chosen` says, each on an empty store."""
    run_state_machine_as_test(
        type("Machine", (RecordMachine,), {"world": world}),
        settings=settings(chosen, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.timeout(60 + EXAMPLES)
@pytest.mark.parametrize("knows_time", [True, False])
def test_scripts_do_what_the_model_says(store: RedisServer, knows_time: bool) -> None:
    with World(store, knows_time=knows_time) as world:
        run(world, settings(max_examples=EXAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_machine_finds_a_mistake_in_a_script(store: RedisServer, mistake: str) -> None:
    found = settings(
        max_examples=MISTAKEN_EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with World(store, knows_time=True, mistake=MISTAKES[mistake]) as world, pytest.raises(AssertionError):
        run(world, found)
