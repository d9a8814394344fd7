"""Model and scripts do the same, in every order of everybody's commands that hypothesis finds."""

from __future__ import annotations

import os

import pytest
from harness import RedisServer
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from model.machine import RecordMachine
from model.world import World

# How many stories; a few seconds each way by default. SIDECAR_MODEL_EXAMPLES=5000 looks for an hour.
EXAMPLES = int(os.environ.get("SIDECAR_MODEL_EXAMPLES", "150"))
STEPS = 30


@pytest.mark.timeout(0)
@pytest.mark.parametrize("knows_time", [True, False])
def test_scripts_do_what_the_model_says(store: RedisServer, knows_time: bool) -> None:
    with World(store, knows_time=knows_time) as world:
        run_state_machine_as_test(
            lambda: RecordMachine(world),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
