"""The fixtures of `lab.py`: a module that wants them says `pytest_plugins = ("lab_fixtures",)`.

`shared`: sidecars that all tests of the module use, with keys of their own; the module says `routes(lab)`, and perhaps
`SIDECARS`, `FRONT` (they reach the store through one) and `TOP`. `lab`: one of the test's own, for faults.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from harness import StoreProxy, until
from lab import Lab, restore


@pytest_asyncio.fixture
async def lab() -> AsyncIterator[Lab]:
    """An upstream and a store of this test alone; sidecars by `await lab.sidecar(...)`."""
    made = await Lab.start()
    yield made
    made.show()
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """What `shared` shares, as the module says."""
    module = request.module
    made = await Lab.start()
    routes = module.routes(made)
    try:
        front = await made.front() if getattr(module, "FRONT", False) else None
        for _ in range(getattr(module, "SIDECARS", 1)):
            await made.sidecar(routes, front=front, **getattr(module, "TOP", {}))
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def shared(running: Lab) -> AsyncIterator[Lab]:
    """The module's sidecars, with an upstream that has seen nothing and answers 200."""
    running.reset()
    yield running
    running.show()


@pytest_asyncio.fixture(loop_scope="module")
async def store_front(shared: Lab) -> AsyncIterator[StoreProxy]:
    """The front before the store, whole again afterwards."""
    (proxy,) = shared.fronts
    yield proxy
    restore(proxy)
    proxy._patterns.clear()
    if proxy._server is None:
        await proxy.accept()
    await shared.one.ready()

    async def settled() -> bool:
        return await shared.one.metric("sidecar_unsettled") == 0

    await until(settled)
