"""What happens how often: the upstream's fates, the clients' manners, the faults. All drawn from one seed.

The seed decides every choice; what the operating system does in between it cannot decide. Two runs with one seed
have the same keys, fates and faults, and interleave differently.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from harness import scaled

# Short enough for many rounds in a minute. The lease is at least three store time-outs, the rest follows from it.
STORE_TIMEOUT_S = 0.3
LEASE_S = 1.2
TOTAL_S = 0.8
CONNECT_S = 0.4
WAIT_LIMIT_S = 1.5
DRAIN_S = 0.2
# The provider forgets its keys after this: most keys of a run are tried again beyond it.
WINDOW_S = 10.0
STORED_BYTES = 8 * 1024

HOLD, NATIVE = "hold", "native"

FATES = {
    "accept": 50,  # at once or after a while, answered 200 or 202
    "accept-late": 6,  # accepted and answered after timeout.total
    "accept-reset": 5,  # accepted, then RST instead of an answer
    "accept-close": 3,
    "accept-cut": 5,  # half an answer
    "accept-stall": 4,
    "accept-gateway": 4,  # 502 or 504 of somebody on the way
    "accept-large": 3,  # an answer that is too large to keep
    "refuse": 6,  # 400 or 422
    "refuse-late": 3,
    "refuse-slow": 0,
    "refuse-unseen": 2,  # 422 before the provider looks at its own key
    "free": 12,  # 401, 429, 500, 503, not accepted
    "lose-gateway": 3,  # 502 or 504, not accepted
    "lose-reset": 4,
    "lose-stall": 2,
    "reset-at-head": 4,  # before the content was read
}

MANNERS = {
    "patient": 60,
    "hasty": 14,  # gives up after a while and comes back
    "hang-up": 10,  # leaves once the request is written
    "half": 6,  # RST in the middle of the upload
    "other": 3,  # the same key with other content
}

FAULTS = {
    "kill": 6,
    "stop": 8,
    "doze": 6,  # stopped with commands under way, for about a store time-out: their replies are there when it wakes
    "term": 4,
    "now": 1,  # SIGTERM twice
    "store-kill": 3,
    "store-pause": 4,
    "front-cut": 6,
    "front-freeze": 6,
    "front-delay": 4,
    "front-deaf": 5,  # commands are applied, replies vanish
    "front-loses": 6,  # the reply to the next script is a reset
    "upstream-refuses": 3,
    "upstream-resets": 3,
    "upstream-drops": 2,
}


@dataclass(frozen=True)
class Mix:
    """Weights by name, and how fast things follow each other.

    `workers`: keys under way at once; `twins`: how many clients begin with the same key at once, at most;
    `tries`: how often a client comes back at most, `returns` of them after it was told the outcome;
    `pause_s`: the longest time between two faults; `fault_s`: the longest time a lasting fault lasts; `short`: the
    share of those that are over before a lease would be.
    """

    fates: Mapping[str, float] = field(default_factory=lambda: dict(FATES))
    manners: Mapping[str, float] = field(default_factory=lambda: dict(MANNERS))
    faults: Mapping[str, float] = field(default_factory=lambda: dict(FAULTS))
    workers: int = 40
    twins: int = 3
    tries: int = 7
    returns: int = 2
    native_share: float = 0.5
    pause_s: float = 1.2
    fault_s: float = 2.5
    short: float = 0.5
    # How long an upstream that answers takes for it, at most.
    answer_s: float = 0.5

    def biased(self, **changes: Any) -> Self:
        """This mix with other weights: those named in `fates`, `manners`, `faults` replace ours, 0 leaves one out."""
        for name in ("fates", "manners", "faults"):
            if name in changes:
                changes[name] = {**getattr(self, name), **changes[name]}
        return replace(self, **changes)

    def only(self, **chosen: Mapping[str, float]) -> Self:
        """This mix with nothing but the named weights in each of the given tables."""
        return replace(self, **chosen)  # type: ignore[arg-type]


def draw(rng: random.Random, weights: Mapping[str, float]) -> str:
    """One name, by weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def source(*words: object) -> random.Random:
    """Chance that depends on nothing but these words."""
    return random.Random("/".join(map(str, words)))


def some_s(rng: random.Random, low_s: float, high_s: float) -> float:
    """A duration between the two, scaled."""
    return scaled(rng.uniform(low_s, high_s))
