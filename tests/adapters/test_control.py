"""The line between supervisor and worker, over a real pair of sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from harness import scaled, until

from sidecar.config import Address, Config, Origin, Policy, Route, Send
from sidecar.control import Channel, ControlError, Message, Orders, pack, unpack


class Pair:
    """Both ends, and what each heard."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)

    async def open(self) -> tuple[Channel, Channel]:
        def answer(message: Message) -> Any:
            return {"echo": message["value"]}

        one = await Channel.open(self.ours, self.heard.append, answer)
        return one, await Channel.open(self.theirs, self.heard.append, answer)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.ours.close()
    made.theirs.close()


async def test_what_is_told_arrives_in_order_whatever_its_size(pair: Pair) -> None:
    one, other = await pair.open()
    for number in range(50):
        one.tell("word", number=number, text="x" * (number * 2000))
    await until(lambda: len(pair.heard) == 50)
    assert [message["number"] for message in pair.heard] == list(range(50))
    one.close()
    await other.gone


async def test_questions_of_both_sides_get_their_own_answers(pair: Pair) -> None:
    one, other = await pair.open()
    asked = [channel.ask("say", 5, value=number) for number in range(20) for channel in (one, other)]
    answers = await asyncio.gather(*asked)
    assert [answer["echo"] for answer in answers] == [number for number in range(20) for _ in range(2)]
    one.close()
    await other.gone


async def test_silent_process_does_not_hold_up_who_asks(pair: Pair) -> None:
    one = await Channel.open(pair.ours, pair.heard.append, lambda _: None)
    begin_s = time.monotonic()
    with pytest.raises(ControlError, match="in time"):
        await one.ask("state", 0.05)
    assert time.monotonic() - begin_s < scaled(1)
    # Its answer comes late, and is nobody's any more; the next one finds its question.
    question = asyncio.create_task(one.ask("state", 5))
    asked = b""
    while asked.count(b"\n") < 2:
        asked += await asyncio.get_running_loop().sock_recv(pair.theirs, 1000)
    for line in (json.dumps({"answer": n, "number": n}) for n in (1, 2)):
        pair.theirs.send(line.encode() + b"\n")
    assert await question == 2
    one.close()
    await one.gone


async def test_end_of_a_process_ends_its_line_and_every_question(pair: Pair) -> None:
    one = await Channel.open(pair.ours, pair.heard.append, lambda _: None)
    asked = asyncio.create_task(one.ask("state", None))
    await asyncio.sleep(0)
    pair.theirs.close()
    with pytest.raises(ControlError, match="gone"):
        await asked
    await one.gone
    one.tell("word")
    with pytest.raises(ControlError, match="gone"):
        await one.ask("state", 5)


def test_orders_arrive_as_they_were_given() -> None:
    send = Send("POST /x", b"POST", (b"x", None), None, Policy())
    route = Route(name="mail", upstream=Origin("https", "api.example.com", 443), sends=(send,))
    orders = Orders(2, Config(routes=(route,)), "/run/s", ((Address("localhost", 8025), False, ((3, 4), (5, 6))),))
    assert unpack(pack(orders)) == orders
