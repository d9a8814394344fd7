"""One connection in full duplex on real sockets: whose reply is whose, what a failure tells, how it comes back."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from harness import RedisServer, StoreProxy, free_port, scaled, until
from redis.exceptions import RedisError, ResponseError

from sidecar.address import parse
from sidecar.errors import StoreError
from sidecar.link import FIRST_PAUSE_S, Link
from sidecar.reach import Reach

TIMEOUT_S = scaled(0.3)
# What a loop that also runs the server's front may be late by.
SLACK_S = scaled(0.4)
Ready = Callable[[Link], Awaitable[None]]


async def answers_ping(link: Link) -> None:
    """As the store has it: a server that does not serve is not ready."""
    reply = await link.call("PING", now=True)
    if isinstance(reply, RedisError):
        raise StoreError(str(reply), applied=False)


@asynccontextmanager
async def started(
    url: str, *, timeout_s: float = TIMEOUT_S, ready: Ready = answers_ping, wait: bool = True
) -> AsyncIterator[Link]:
    """A link over connections as the store makes them; with `wait`, one that stands."""
    address = parse(url)
    reach = Reach(address, ca="", timeout_s=1.0)
    link = Link(lambda: reach.server(address.hosts[0]), timeout_s=timeout_s, ready=ready)
    link.start()
    try:
        if wait:
            await until(lambda: not link.trouble, 5)
        yield link
    finally:
        await link.close()


async def fails(reply: asyncio.Future[object]) -> StoreError:
    """The error a call ends with."""
    with pytest.raises(StoreError) as caught:
        await reply
    return caught.value


class Counter(asyncio.Protocol):
    """A server that answers each command with `reply` and keeps the pieces it read, one for each write."""

    def __init__(self, pieces: list[bytes], reply: bytes) -> None:
        self.pieces = pieces
        self.reply = reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.transport.write(self.reply * len(re.findall(rb"\*\d+\r\n", data)))


@asynccontextmanager
async def counting(pieces: list[bytes], reply: bytes = b"+OK\r\n") -> AsyncIterator[str]:
    """The URL of a `Counter`."""
    port = free_port()
    server = await asyncio.get_running_loop().create_server(lambda: Counter(pieces, reply), "127.0.0.1", port)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.close()


@asynccontextmanager
async def hanging_up(at_s: list[float]) -> AsyncIterator[str]:
    """The URL of a server that closes each connection; `at_s` gets the times."""
    port = free_port()

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_s.append(time.monotonic())
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", port)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.close()


# Whose reply is whose.


async def test_thousands_of_calls_at_once_get_their_own_replies(store: RedisServer) -> None:
    async with started(store.url, timeout_s=scaled(5)) as link:
        got = {}

        async def caller(number: int) -> None:
            for turn in range(4):
                word = b"%d-%d" % (number, turn)
                got[word] = await link.call("ECHO", word)

        await asyncio.gather(*(caller(number) for number in range(1000)))
    assert len(got) == 4000
    assert [word for word, reply in got.items() if reply != word] == []


async def test_reply_of_a_cancelled_caller_reaches_nobody_else(front: StoreProxy) -> None:
    front.delay_s = 0.002
    chance = random.Random(5)  # the same cancellations in each run
    async with started(front.url, timeout_s=scaled(5)) as link:
        tasks: list[asyncio.Task[tuple[int, bytes]]] = []

        async def caller(number: int) -> tuple[int, bytes]:
            return number, await link.call("ECHO", str(number))

        for number in range(2000):
            tasks.append(asyncio.get_running_loop().create_task(caller(number)))
            if number % 20 == 0:
                await asyncio.sleep(0.001)
            for task in chance.sample(tasks[-60:], k=min(10, len(tasks))):
                if chance.random() < 0.05:
                    task.cancel()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        assert link.trouble == ""
    cancelled = sum(isinstance(reply, asyncio.CancelledError) for reply in replies)
    answered = [reply for reply in replies if isinstance(reply, tuple)]
    assert cancelled > 300
    assert cancelled + len(answered) == len(replies)
    assert [reply for reply in answered if reply[1] != b"%d" % reply[0]] == []
    assert front.connections == 1


async def test_commands_of_one_loop_turn_leave_in_one_write() -> None:
    pieces: list[bytes] = []
    async with counting(pieces) as url, started(url) as link:
        for _ in range(3):
            pieces.clear()
            assert set(await asyncio.gather(*(link.call("ECHO", str(n)) for n in range(500)))) == {b"OK"}
            assert [piece.count(b"ECHO") for piece in pieces] == [500]


async def test_error_reply_is_a_value_and_the_connection_stays(front: StoreProxy) -> None:
    async with started(front.url) as link:
        replies = await asyncio.gather(link.call("GET"), link.call("ECHO", "a"), link.call("NONSENSE"))
        assert isinstance(replies[0], ResponseError)
        assert replies[1] == b"a"
        assert isinstance(replies[2], ResponseError)
    assert front.connections == 1


async def test_reply_that_nobody_asked_for_ends_the_connection() -> None:
    pieces: list[bytes] = []
    async with counting(pieces, b"+OK\r\n+OK\r\n") as url, started(url, wait=False) as link:
        error = await fails(link.call("ECHO", "a"))
    assert "nobody asked" in error.reason
    assert b"".join(pieces).count(b"ECHO") <= 1


# Time.


async def test_silent_server_fails_all_in_time_and_the_link_recovers_when_it_wakes(private_store: RedisServer) -> None:
    async with started(private_store.url) as link:
        private_store.pause()
        begin = time.monotonic()
        calls = [link.call("INCR", "n") for _ in range(50)]
        errors = [await fails(call) for call in calls]
        assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
        assert {error.applied for error in errors} == {None}
        assert link.trouble
        # What is asked now cannot even be written.
        assert (await fails(link.call("INCR", "m"))).applied is False
        private_store.resume()
        await until(lambda: not link.trouble, 5)
        # All of it was applied in the end, which is why nobody may say that it was not.
        await until(lambda: private_store.command("GET", "n") == b"50")
        assert await link.call("GET", "m") is None


async def test_reply_after_the_time_out_answers_no_other_command(front: StoreProxy) -> None:
    async with started(front.url) as link:
        front.freeze()
        assert (await fails(link.call("ECHO", "late"))).applied is None
        later = [link.call("ECHO", str(n), timeout_s=scaled(5)) for n in range(20)]
        front.thaw()
        assert await asyncio.gather(*later) == [b"%d" % n for n in range(20)]
    assert front.connections >= 2


@pytest.mark.parametrize("reachable", [True, False], ids=["silent", "refused"])
async def test_shorter_time_of_one_call_is_kept_beside_longer_ones(front: StoreProxy, reachable: bool) -> None:
    async with started(front.url) as link:
        if reachable:
            front.freeze()
        else:
            await front.refuse()
            await until(lambda: link.trouble)
        await until(lambda: link._timer is None)  # that of earlier commands would be early enough by chance
        begin = time.monotonic()
        long = link.call("ECHO", "long", timeout_s=scaled(5))
        short = link.call("ECHO", "short", timeout_s=scaled(0.05))
        assert (await fails(short)).applied is (None if reachable else False)
        assert time.monotonic() - begin < scaled(0.05) + SLACK_S
        long.cancel()


async def test_refused_connection_fails_within_the_time_and_surely_did_nothing() -> None:
    async with started(f"redis://127.0.0.1:{free_port()}/0", wait=False) as link:
        begin = time.monotonic()
        error = await fails(link.call("SET", "a", "1"))
        assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
        assert error.applied is False
        assert "refused" in link.trouble.lower() or "111" in link.trouble
        assert "\n" not in link.trouble


def test_times_of_calls_hold_on_uvloop_too(private_store: RedisServer) -> None:
    # Its timers have no `when()` where the time is near, or over: a process that was frozen asks like that.
    async def course() -> None:
        async with started(private_store.url) as link:
            assert await asyncio.gather(*(link.call("ECHO", str(n)) for n in range(500)))
            private_store.pause()
            begin = time.monotonic()
            calls = [link.call("ECHO", "a", timeout_s=left_s) for left_s in (TIMEOUT_S, 0.0002, 0, -1, TIMEOUT_S)]
            for call in reversed(calls):
                await fails(call)
            assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
            private_store.resume()
            await until(lambda: not link.trouble, 5)
            assert await link.call("ECHO", "b") == b"b"

    uvloop.run(course())


# Coming back.


async def test_command_given_while_away_is_sent_after_the_return_if_still_in_time(front: StoreProxy) -> None:
    async with started(front.url) as link:
        await front.refuse()
        await until(lambda: link.trouble)
        front.commands.clear()
        early = link.call("ECHO", "early", timeout_s=scaled(0.05))
        patient = link.call("ECHO", "patient", timeout_s=scaled(5))
        assert (await fails(early)).applied is False
        await front.accept()
        assert await patient == b"patient"
    assert b"early" not in front.commands
    # `ready` goes before all that waited.
    assert front.commands.index(b"PING") < front.commands.index(b"patient")


async def test_link_comes_back_after_kill_and_start(private_store: RedisServer) -> None:
    async with started(private_store.url) as link:
        await link.call("SET", "a", "1")
        private_store.pause()
        under_way = link.call("SET", "a", "2", timeout_s=scaled(5))
        await asyncio.sleep(0)  # the turn in which it is written
        await until(lambda: link._written)
        private_store.kill()
        assert (await fails(under_way)).applied is None
        await until(lambda: link.trouble)
        await asyncio.to_thread(private_store.start)
        await until(lambda: not link.trouble, 5)
        assert await link.call("GET", "a") == b"1"


async def test_link_backs_off_from_a_server_that_hangs_up() -> None:
    at_s: list[float] = []
    async with hanging_up(at_s) as url, started(url, timeout_s=scaled(0.02), wait=False):
        await until(lambda: len(at_s) >= 5, 10)
    gaps = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    # Doubled each time, less up to half of it, so that no two sidecars come back in step.
    assert all(gap >= 0.5 * FIRST_PAUSE_S * 2**n for n, gap in enumerate(gaps[:4]))


async def test_connection_that_ends_before_it_is_ready_is_given_up_at_once() -> None:
    at_s: list[float] = []
    async with hanging_up(at_s) as url, started(url, timeout_s=scaled(5), wait=False) as link:
        await until(lambda: len(at_s) >= 3, 3, what="a third connection long before the first one's time-out")
        assert "time" not in link.trouble


async def test_ready_that_fails_is_the_trouble_and_nothing_else_is_sent(front: StoreProxy) -> None:
    usable = asyncio.Event()

    async def ready(link: Link) -> None:
        await answers_ping(link)
        if not usable.is_set():
            raise StoreError("script reserve: no", applied=False)

    async with started(front.url, ready=ready, wait=False) as link:
        error = await fails(link.call("ECHO", "a"))
        assert (error.reason, error.applied) == ("script reserve: no", False)
        assert b"ECHO" not in front.commands
        usable.set()
        await until(lambda: not link.trouble, 5)
        assert await link.call("ECHO", "a") == b"a"


async def test_reconnect_takes_a_new_connection_and_says_nobody_knows(front: StoreProxy) -> None:
    async with started(front.url) as link:
        front.freeze()
        under_way = link.call("ECHO", "a")
        await until(lambda: link._written)
        link.reconnect("the server is read-only")
        error = await fails(under_way)
        assert (error.reason, error.applied) == ("the server is read-only", None)
        front.thaw()
        await until(lambda: not link.trouble, 5)
        assert await link.call("ECHO", "b") == b"b"
    assert front.connections == 2


async def test_close_fails_what_is_under_way(front: StoreProxy) -> None:
    async with started(front.url) as link:
        front.freeze()
        written = link.call("ECHO", "a", timeout_s=scaled(5))
        await until(lambda: link._written)
        await link.close()
        assert (await fails(written)).applied is None
    async with started(f"redis://127.0.0.1:{free_port()}/0", wait=False) as link:
        waiting = link.call("ECHO", "a", timeout_s=scaled(5))
        await link.close()
        assert (await fails(waiting)).applied is False


# Addresses, accounts, and a server that is not ready.


async def test_unix_socket_and_password_serve(private_store: RedisServer) -> None:
    private_store.command("CONFIG", "SET", "requirepass", "hush-hush")
    for url in (f"unix://:hush-hush@{private_store.path}?db=2", private_store.url.replace("//", "//:hush-hush@")):
        async with started(url) as link:
            assert await link.call("ECHO", "a") == b"a"


@pytest.mark.parametrize("user", ["", "ada"])
async def test_wrong_password_is_the_trouble_without_its_text(private_store: RedisServer, user: str) -> None:
    private_store.command("CONFIG", "SET", "requirepass", "right")
    async with started(private_store.url.replace("//", f"//{user}:hush-hush@"), wait=False) as link:
        error = await fails(link.call("ECHO", "a"))
    assert error.applied is False
    assert "password" in error.reason
    for text in (error.reason, str(error), link.trouble, str(error.__cause__)):
        assert "hush-hush" not in text


@pytest.mark.parametrize("url", ["redis://:hush-hush@127.0.0.1:1/0", "unix://:hush-hush@/nowhere/s"])
async def test_store_that_is_not_there_is_named_without_the_password(url: str) -> None:
    async with started(url, wait=False) as link:
        error = await fails(link.call("ECHO", "a"))
        assert "127.0.0.1:1" in error.reason or "/nowhere/s" in error.reason
        assert "hush-hush" not in error.reason + link.trouble


async def test_server_that_loads_its_data_says_so(private_store: RedisServer) -> None:
    for number in range(150):
        private_store.command("SET", f"k{number}", "v")
    private_store.command("BGREWRITEAOF")
    await until(lambda: "aof_rewrite_in_progress:0" in str(private_store.command("INFO", "persistence")))
    async with started(private_store.url, timeout_s=scaled(1)) as link:
        private_store.stop()
        # Loading is slowed down to 10 ms a key: longer than the longest pause between two looks.
        private_store.options |= {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"}
        loaded = asyncio.get_running_loop().create_task(asyncio.to_thread(private_store.start))
        await until(lambda: "loading" in link.trouble.lower(), 5, what="the trouble of a server that loads")
        await loaded
        await until(lambda: not link.trouble, 5)
        assert await link.call("GET", "k7") == b"v"


async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers `first` just before its time is over, everything else at once."""
    try:
        while data := await reader.read(65536):
            if b"first" in data:
                await asyncio.sleep(0.195)
                writer.write(b"$5\r\nfirst\r\n")
            elif b"second" in data:
                writer.write(b"$6\r\nsecond\r\n")
            else:
                writer.write(b"+PONG\r\n" * data.count(b"PING"))
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_reply_that_comes_in_a_stall_over_its_deadline_reaches_no_other_command(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
) -> None:
    # The timer, the reply and the next command fall into one turn of the loop: the reply is of the failed command.
    port = free_port()
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(late, "127.0.0.1", port)
        ready.set()
        await asyncio.to_thread(over.wait)
        server.close()
        await asyncio.sleep(0.05)  # the ends of the connections

    serving = threading.Thread(target=lambda: asyncio.run(serve()))
    serving.start()
    ready.wait(5)

    async def stalled(link: Link) -> object:
        await asyncio.sleep(0.185)
        end = time.monotonic() + 0.03
        while time.monotonic() < end:
            pass  # a stall
        return await link.call("ECHO", "second")

    async def ask() -> list[object]:
        seen: list[object] = []
        async with started(f"redis://127.0.0.1:{port}/0", timeout_s=0.2) as link:
            for _ in range(6):
                await until(lambda: not link.trouble, 5)
                first = link.call("ECHO", "first")
                seen.append((await asyncio.gather(stalled(link), first, return_exceptions=True))[0])
        return seen

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            seen = runner.run(ask())
    finally:
        over.set()
        serving.join(10)
    assert [reply for reply in seen if reply == b"first"] == []
