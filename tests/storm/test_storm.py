"""A short storm: the whole program, real processes and sockets, and no finding of the judge."""

from __future__ import annotations

import pytest

from storm.builds import build
from storm.report import text
from storm.run import Storm

SECONDS = 12.0
# Any would do: a run that fails says its own, and the long runs choose theirs.
SEED = 20


@pytest.mark.timeout(150)
async def test_short_storm_breaks_no_promise() -> None:
    with build() as env:
        result = await Storm(SEED, env=env).run(SECONDS)
    print(text(result))
    assert result.findings == [], text(result)
    history = result.history
    assert sum(one.accepted_s is not None for one in history.requests) > 10, "it was no storm"
    assert any(one.replayed for one in history.arrivals)
    assert history.faults
