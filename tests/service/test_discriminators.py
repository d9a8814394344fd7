"""Sends that a form field tells apart: what is read for it is freed, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from harness import Client, request, until
from pair import Pair, each_test, module_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

shared = module_pair(sends=["POST /q Action=SendEmail"])
mail = each_test()


@pytest.mark.case("C293")
async def test_clients_that_leave_while_the_content_is_looked_through_leave_no_memory_behind(mail: Pair) -> None:
    data = request(
        "POST", "/mail/q", [("Content-Type", "text/plain")], b"a=" + b"x" * 250_000, key="left while it is read"
    )
    for number in range(60):
        client = await Client.open(mail.sidecar.base)
        await client.send(data)
        await asyncio.sleep((number % 20) * 0.0002)
        client.abort()

    async def freed() -> bool:
        return await mail.sidecar.metric("sidecar_content_bytes") == 0

    await until(freed, 5)
