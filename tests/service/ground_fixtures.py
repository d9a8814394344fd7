"""The fixtures of `ground.py`: a module that wants `field` says `pytest_plugins = ("ground_fixtures",)`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from ground import Ground
from harness import RedisServer, Upstream
from pair import running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(tmp_path_factory: pytest.TempPathFactory, session_store: RedisServer) -> AsyncIterator[Ground]:
    session_store.flush()
    canary = await Upstream.start()
    fars = {name: await Upstream.start() for name in ("mail", "deep", "query", "named", "kept")}
    two = ["POST /emails", "POST /v3/{domain}/messages"]
    common: dict[str, Any] = {"provider": "generic", "key": {"missing": "reject"}, "sends": two}
    routes = {
        "mail": {**common, "upstream": fars["mail"].url},
        "deep": {**common, "upstream": fars["deep"].url + "/v1"},
        "query": {
            **common,
            "upstream": fars["query"].url,
            "sends": ["POST / Action=SendEmail", "GET / Action=SendEmail"],
        },
        "named": {**common, "upstream": fars["named"].url, "host": "api.test"},
        "kept": {**common, "upstream": fars["kept"].url, "upstream_host": "preserve"},
    }
    directory = tmp_path_factory.mktemp("ground")
    # A copy of each part: parts that two routes share would be written as YAML aliases.
    parts = {"routes": json.loads(json.dumps(routes))}
    async with running(directory, session_store.url, parts, at=fars["mail"]) as pair:
        yield Ground(pair, fars, canary)
    for far in (*fars.values(), canary):
        await far.stop()


@pytest.fixture
def field(ground: Ground) -> Iterator[Ground]:
    for far in (*ground.upstreams.values(), ground.canary):
        far.requests.clear()
        far.begun.clear()
        far.malformed.clear()
        far.connections = 0
    begin = len(ground.pair.sidecar.log())
    yield ground
    print("\n".join(ground.pair.sidecar.log()[begin:].splitlines()[-40:]))
