"""The proof of the storm: builds that break the promise, each found within seconds of bad weather."""

from __future__ import annotations

import pytest

from storm.broken import BROKEN
from storm.builds import build
from storm.report import text
from storm.run import Storm

LONGEST_S = 45.0


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", BROKEN)
async def test_storm_finds_a_broken_build(name: str) -> None:
    broken = BROKEN[name]
    with build(name, broken.patches) as env:
        result = await Storm(broken.seed, broken.mix, env).run(LONGEST_S, until_finding=True)
    assert {version.partition("+")[0] for version in result.versions} == {name}
    assert {finding.rule for finding in result.findings} & broken.rules, text(result)
