"""Upstream connections on real sockets: how they are opened, when they are used again, and why they are not."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import free_port, scaled, until
from raw_server import OK, Authority, Peer, RawServer, addresses, answer, both_loops, once, serve

from sidecar import connection as connection_module
from sidecar import dialer as dialer_module
from sidecar.config import Origin, Timeout
from sidecar.errors import LostError, NotSentError
from sidecar.resolve import Resolver
from sidecar.upstream import Outgoing, Upstream

GET = Outgoing(b"GET", b"/", ((b"Host", b"api.example.test"),))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def ca(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("ca") / "ca.pem"
    path.write_bytes(authority.pem())
    return str(path)


def upstream_of(
    origin: Origin,
    *,
    connect_s: float = 5.0,
    total_s: float = 10.0,
    keepalive_s: float = 15.0,
    ca: str = "",
    resolver: Resolver | None = None,
) -> Upstream:
    timeout = Timeout(connect_s=scaled(connect_s), total_s=scaled(total_s))
    return Upstream(origin, timeout=timeout, keepalive_s=keepalive_s, ca=ca, header_bytes=65536, resolver=resolver)


async def get(upstream: Upstream) -> tuple[int, bytes]:
    incoming = await upstream.send(GET)
    return incoming.status, b"".join([piece async for piece in incoming.pieces()])


async def not_sent(upstream: Upstream) -> str:
    with pytest.raises(NotSentError) as caught:
        await upstream.send(GET)
    return caught.value.reason


def sockets() -> int:
    """How many descriptors of this process are sockets."""
    found = 0
    for name in os.listdir("/dev/fd"):
        try:
            found += stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:
            pass  # the listing's own
    return found


# Opening


@both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_plain_upstream_is_reached_by_address_and_by_name(host: str) -> None:
    with RawServer(serve(OK), name=host) as server:
        upstream = upstream_of(server.origin)
        assert await get(upstream) == (200, b"ok")
        await upstream.close()


@both_loops
async def test_tls_upstream_is_verified_and_told_its_name_and_protocol(authority: Authority, ca: str) -> None:
    context = authority.server("api.example.test")
    told: list[tuple[str | None, str | None]] = []
    names: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)

    def script(peer: Peer) -> None:
        assert isinstance(peer._stream, ssl.SSLSocket)
        told.append((peer._stream.selected_alpn_protocol(), peer._stream.version()))
        serve(OK)(peer)

    with RawServer(script, tls=context, name="api.example.test") as server:
        resolver = Resolver(addresses(server.port, "127.0.0.1"))
        upstream = upstream_of(server.origin, ca=ca, resolver=resolver)
        for _ in range(3):
            assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert names == ["api.example.test"]
    assert told == [("http/1.1", "TLSv1.3")]


@both_loops
async def test_tls_1_2_upstream_is_served_too(authority: Authority, ca: str) -> None:
    context = authority.server("localhost")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    content = os.urandom(300_000)
    with RawServer(serve(answer(content)), tls=context, name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        for _ in range(2):
            assert await get(upstream) == (200, content)
        await upstream.close()
    assert len(server.peers) == 1


@both_loops
async def test_tls_upstream_known_by_address_alone_is_verified_by_it(authority: Authority, ca: str) -> None:
    with RawServer(serve(OK), tls=authority.server("127.0.0.1")) as server:
        upstream = upstream_of(server.origin, ca=ca)
        assert await get(upstream) == (200, b"ok")
        await upstream.close()


@both_loops
async def test_closed_port_is_refused_within_a_second_and_nothing_was_sent() -> None:
    upstream = upstream_of(Origin("http", "127.0.0.1", free_port()))
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await not_sent(upstream) == "connection_refused"
    assert loop.time() - began < scaled(1)
    await upstream.close()


@both_loops
async def test_name_without_address_is_a_dns_error() -> None:
    async def lookup(_host: str, _port: int) -> Sequence[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    async def nothing(_host: str, _port: int) -> Sequence[Any]:
        return []

    for finder in (lookup, nothing):
        upstream = upstream_of(Origin("http", "no.example.test", 80), resolver=Resolver(finder))
        assert await not_sent(upstream) == "dns_error"
    assert await not_sent(upstream_of(Origin("http", "x" * 64 + ".test", 80))) == "dns_error"


@both_loops
async def test_resolver_that_hangs_is_a_dns_timeout_and_disturbs_no_later_send() -> None:
    hang = asyncio.Event()
    with RawServer(serve(OK)) as server:

        async def lookup(host: str, port: int) -> Sequence[Any]:
            await hang.wait()
            return await addresses(server.port, "127.0.0.1")(host, port)

        upstream = upstream_of(Origin("http", "slow.example.test", 80), connect_s=0.2, resolver=Resolver(lookup))
        assert await not_sent(upstream) == "dns_timeout"
        hang.set()
        assert await get(upstream) == (200, b"ok")
        await upstream.close()


@both_loops
async def test_address_that_does_not_answer_is_a_connection_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        # With its queue full the kernel drops what comes next: nobody there, as far as a client can see.
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        upstream = upstream_of(Origin("http", "127.0.0.1", port), connect_s=0.3)
        before = sockets()
        assert await not_sent(upstream) == "connection_timeout"
        assert sockets() == before
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(101, "Network is unreachable"), "destination_ip_unroutable"),
        (OSError(113, "No route to host"), "destination_ip_unroutable"),
        (OSError(111, "refused"), "connection_refused"),
        (TimeoutError(110, "timed out"), "connection_timeout"),
        (OSError(24, "Too many open files"), "proxy_internal_error"),
        (OSError("Multiple exceptions: ..."), "destination_unavailable"),
        (RuntimeError("the loop's own"), "destination_unavailable"),
        (ConnectionResetError(), "connection_terminated"),
        (ssl.SSLError(1, "wrong version number"), "tls_protocol_error"),
        (ssl.SSLCertVerificationError(1, "self-signed"), "tls_certificate_error"),
        (socket.gaierror(-2, "unknown"), "dns_error"),
    ],
)
def test_each_failure_has_a_reason_of_its_own(error: Exception, reason: str) -> None:
    assert dialer_module._reason(error) == reason


@both_loops
async def test_every_address_is_tried_before_anything_is_sent() -> None:
    with RawServer(serve(OK)) as server:
        resolver = Resolver(addresses(server.port, "127.0.0.2", "127.0.0.3", "127.0.0.1"))
        upstream = upstream_of(Origin("http", "api.example.test", 80), resolver=resolver)
        assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert server.whole == 1


@both_loops
async def test_certificate_of_an_unknown_authority_is_refused(authority: Authority) -> None:
    with RawServer(serve(OK), tls=authority.server("localhost"), name="localhost") as server:
        upstream = upstream_of(server.origin)
        assert await not_sent(upstream) == "tls_certificate_error"
        await upstream.close()
    assert server.whole == 0


@both_loops
async def test_certificate_for_another_name_is_refused(authority: Authority, ca: str) -> None:
    with RawServer(serve(OK), tls=authority.server("other.example.test"), name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        assert await not_sent(upstream) == "tls_certificate_error"
        await upstream.close()
    assert server.whole == 0


@both_loops
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (once(b""), "connection_timeout"),
        (lambda peer: peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "tls_protocol_error"),
        (lambda peer: peer.bare_fin(), "connection_terminated"),
        (lambda peer: peer.reset(), "connection_terminated"),
    ],
    ids=["silent", "plain", "closes", "resets"],
)
async def test_upstream_that_does_not_speak_tls_is_not_sent_to(script: Any, reason: str) -> None:
    with RawServer(script) as server:
        upstream = upstream_of(Origin("https", "localhost", server.port), connect_s=0.4)
        assert await not_sent(upstream) == reason
        before = sockets()
        for _ in range(3):
            assert await not_sent(upstream) == reason
        await until(lambda: sockets() <= before)
        await upstream.close()
    assert server.whole == 0


@both_loops
@pytest.mark.parametrize("bad", [once(b""), lambda peer: peer.bare_fin()], ids=["silent", "closes"])
async def test_handshake_that_fails_on_one_address_goes_on_with_the_others(
    authority: Authority, ca: str, bad: Any
) -> None:
    with (
        RawServer(serve(OK), tls=authority.server("api.example.test"), name="api.example.test") as good,
        RawServer(bad, host="127.0.0.2", port=good.port) as other,
    ):
        resolver = Resolver(addresses(good.port, "127.0.0.2", "127.0.0.1"))
        upstream = upstream_of(good.origin, ca=ca, connect_s=2, resolver=resolver)
        assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert (good.whole, len(other.peers)) == (1, 1)


@both_loops
async def test_failed_certificate_is_told_though_another_address_refuses(authority: Authority, ca: str) -> None:
    with RawServer(serve(OK), tls=authority.server("other.example.test"), name="api.example.test") as server:
        resolver = Resolver(addresses(server.port, "127.0.0.1", "127.0.0.2"))
        upstream = upstream_of(server.origin, ca=ca, resolver=resolver)
        assert await not_sent(upstream) == "tls_certificate_error"
        await upstream.close()


@both_loops
async def test_upstream_that_accepts_and_hangs_up_before_a_byte_was_sent_is_not_sent_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(peer: Peer) -> None:
        peer.bare_fin()
        peer.server.at.set()

    ready = connection_module.Connection.ready

    async def ready_when_the_end_is_there(connection: connection_module.Connection) -> None:
        await ready(connection)
        assert at.wait(10)  # the loop stands still meanwhile: only the look can tell

    monkeypatch.setattr(connection_module.Connection, "ready", ready_when_the_end_is_there)
    with RawServer(script) as server:
        at = server.at
        upstream = upstream_of(server.origin)
        assert await not_sent(upstream) == "connection_terminated"
        await upstream.close()


@both_loops
async def test_address_that_accepts_and_hangs_up_is_not_the_last_one_tried() -> None:
    def script(peer: Peer) -> None:
        peer.reset()

    with RawServer(serve(OK)) as good, RawServer(script, host="127.0.0.2", port=good.port) as other:
        resolver = Resolver(addresses(good.port, "127.0.0.2", "127.0.0.1"))
        sent = 0
        for _ in range(20):  # whether the end is seen before the write is the network's affair
            upstream = upstream_of(Origin("http", "api.example.test", 80), resolver=resolver)
            try:
                sent += (await get(upstream))[0] == 200
            except LostError:
                pass
            await upstream.close()
        assert (good.whole, len(other.peers)) == (sent, 20)


@both_loops
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_reset_at_once_leaves_no_socket_object_behind_that_would_close_a_foreign_descriptor(scheme: str) -> None:
    def script(peer: Peer) -> None:
        peer.reset()

    with RawServer(script) as server:
        for _ in range(50):
            upstream = upstream_of(Origin(scheme, "127.0.0.1", server.port))
            with pytest.raises((NotSentError, LostError)):
                await upstream.send(GET)
            await upstream.close()
        gc.collect()  # an unclosed socket is a ResourceWarning, and with it an error


@both_loops
async def test_cancelled_opening_leaves_no_socket_behind(authority: Authority, ca: str) -> None:
    with RawServer(once(b"")) as server:
        upstream = upstream_of(Origin("https", "localhost", server.port), ca=ca)
        before = sockets()
        sending = asyncio.create_task(upstream.send(GET))
        await until(lambda: server.peers and server.peers[0].received)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await until(lambda: server.peers[0].ended.is_set() and sockets() <= before + 1)
        await upstream.close()


def test_unreadable_authority_file_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nonsense")
    for name in (str(path), str(tmp_path / "missing.pem")):
        with pytest.raises(OSError, match=r"."):
            upstream_of(Origin("https", "localhost", 443), ca=name)


# Used again


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_connection_is_used_again_after_a_complete_answer(authority: Authority, ca: str, tls: bool) -> None:
    answers = (
        OK,
        answer(b"x" * 100_000),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        answer(status=b"500 Oops"),
    )
    context = authority.server("localhost") if tls else None
    with RawServer(serve(*answers), tls=context, name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        statuses = [(await get(upstream))[0] for _ in range(6)]
        await upstream.close()
    assert statuses == [200, 200, 200, 204, 500, 500]
    assert (len(server.peers), server.whole) == (1, 6)


@both_loops
@pytest.mark.parametrize(
    "first",
    [
        answer(b"ok", b"Connection: close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        answer(b"ok", b"Keep-Alive: timeout=1"),
    ],
    ids=["close", "1.0", "1.0 keep-alive", "keep-alive too short"],
)
async def test_connection_is_closed_where_the_answer_asks_for_it(first: bytes) -> None:
    with RawServer(once(first)) as server:
        upstream = upstream_of(server.origin)
        for _ in range(2):
            assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 2


def gone(how: str) -> Any:
    """Answer once; after `go`, on the first connection only, end or speak unasked, and say so by `at`."""

    def script(peer: Peer) -> None:
        if peer.number:
            serve(OK)(peer)
            return
        peer.request()
        peer.send(OK)
        peer.server.wait_go()
        if how == "closed":
            peer.good_bye()
        elif how == "bare":
            peer.bare_fin()
        elif how == "reset":
            peer.reset()
        else:
            peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        peer.server.at.set()
        if how == "unasked":
            peer.read_to_end()

    return script


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("how", ["closed", "bare", "reset", "unasked"])
async def test_idle_connection_that_ended_unnoticed_is_not_written_to(
    authority: Authority, ca: str, tls: bool, how: str
) -> None:
    context = authority.server("localhost") if tls else None
    with RawServer(gone(how), tls=context, name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        assert await get(upstream) == (200, b"ok")
        server.go.set()
        assert server.at.wait(10)  # the loop stands still: only the look before the write can tell
        assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert (len(server.peers), server.whole) == (2, 2)


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("how", ["closed", "bare", "reset", "unasked"])
async def test_idle_connection_that_ends_is_dropped_at_once(authority: Authority, ca: str, tls: bool, how: str) -> None:
    context = authority.server("localhost") if tls else None
    with RawServer(gone(how), tls=context, name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        assert await get(upstream) == (200, b"ok")
        assert len(upstream._pool._open) == 1
        server.go.set()
        await until(lambda: not upstream._pool._open and not upstream._pool._idle)
        assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert (len(server.peers), server.whole) == (2, 2)


@both_loops
async def test_bytes_that_come_after_the_answer_cost_the_connection_only() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(OK)
        if not peer.number:
            peer.server.wait_go()
            peer.send(OK)
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server.origin)
        assert await get(upstream) == (200, b"ok")
        server.go.set()
        await until(server.peers[0].ended.is_set)
        assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 2


@both_loops
async def test_idle_connection_is_closed_when_its_time_is_over() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server.origin, keepalive_s=scaled(0.2))
        await asyncio.gather(get(upstream), get(upstream))
        await until(lambda: all(peer.ended.is_set() for peer in server.peers))
        assert not upstream._pool._open
        await upstream.close()


@both_loops
async def test_no_connection_is_kept_where_none_may_be_idle() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server.origin, keepalive_s=0)
        for _ in range(2):
            assert await get(upstream) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 2


@both_loops
async def test_old_connection_is_not_used_again_though_it_was_never_idle_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "MAX_AGE_S", scaled(0.3))
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server.origin)

        async def another() -> bool:
            assert await get(upstream) == (200, b"ok")
            return len(server.peers) == 2

        assert not await another()
        await until(another)
        await upstream.close()
    assert server.peers[0].requests


def test_names_are_resolved_anew_within_a_minute() -> None:
    from sidecar import resolve

    assert resolve.KEEP_S + connection_module.MAX_AGE_S <= 60


@both_loops
async def test_one_timer_serves_many_requests_and_still_ends_the_last_one() -> None:
    def script(peer: Peer) -> None:
        for _ in range(5):
            peer.request()
            peer.send(OK)
            threading.Event().wait(scaled(0.1))
        peer.request()
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server.origin, total_s=0.3)
        for _ in range(5):
            assert await get(upstream) == (200, b"ok")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(LostError):
            await get(upstream)
        assert loop.time() - began > scaled(0.28)
        await upstream.close()


# The end


@both_loops
async def test_close_ends_idle_connections_and_waits_for_those_in_use() -> None:
    def script(peer: Peer) -> None:
        while peer.request():
            if not peer.number:
                peer.server.wait_go()
            peer.send(OK)

    with RawServer(script) as server:
        upstream = upstream_of(server.origin)
        slow = asyncio.create_task(get(upstream))
        await until(lambda: server.whole == 1)
        assert await get(upstream) == (200, b"ok")
        closing = asyncio.create_task(upstream.close())
        await until(server.peers[1].ended.is_set)
        assert not closing.done()
        server.go.set()
        assert await slow == (200, b"ok")
        await closing
        assert await get(upstream) == (200, b"ok")  # of a request that began before a new configuration did
        await until(lambda: all(peer.ended.is_set() for peer in server.peers))


@both_loops
async def test_cancelled_close_ends_what_is_in_use() -> None:
    with RawServer(once(b"")) as server:
        upstream = upstream_of(server.origin)
        sending = asyncio.create_task(get(upstream))
        await until(lambda: server.whole == 1)
        closing = asyncio.create_task(upstream.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(LostError):
            await sending
        await until(server.peers[0].ended.is_set)


# Names


@both_loops
async def test_name_is_asked_for_once_at_a_time_and_again_when_its_addresses_are_old() -> None:
    asked = 0
    release = asyncio.Event()

    async def lookup(host: str, port: int) -> Sequence[Any]:
        nonlocal asked
        asked += 1
        await release.wait()
        return await addresses(port, f"127.0.0.{asked}")(host, port)

    resolver = Resolver(lookup, keep_s=scaled(0.2))
    waiting = [asyncio.create_task(resolver.resolve("a.test", 80)) for _ in range(5)]
    await until(lambda: asked)
    waiting[0].cancel()  # who leaves disturbs nobody
    release.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert {str(each) for each in found[1:]} == {str(await resolver.resolve("a.test", 80))}
    assert asked == 1
    await until(lambda: resolver._known["a.test", 80][0] < asyncio.get_running_loop().time())
    assert (await resolver.resolve("a.test", 80))[0][4][0] == "127.0.0.2"
    assert asked == 2


@both_loops
async def test_failed_look_up_is_not_remembered() -> None:
    asked = 0

    async def lookup(host: str, port: int) -> Sequence[Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "later")
        return await addresses(port, "127.0.0.1")(host, port)

    resolver = Resolver(lookup)
    with pytest.raises(socket.gaierror):
        await resolver.resolve("a.test", 80)
    assert len(await resolver.resolve("a.test", 80)) == 1


@both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_address_needs_no_look_up(host: str) -> None:
    async def lookup(_host: str, _port: int) -> Sequence[Any]:
        raise AssertionError("asked")

    assert (await Resolver(lookup).resolve(host, 80))[0][4][:2] == (host, 80)


@both_loops
async def test_answer_before_a_garbled_tls_record_is_still_an_answer(authority: Authority, ca: str) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        # Both within one write of the network: the record with the answer, and bytes that are none.
        peer.send(OK)
        peer.send_below_tls(b"\x17\x03\x03\x00\x20" + bytes(32))
        peer.server.wait_go()

    with RawServer(script, tls=authority.server("localhost"), name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        assert await get(upstream) == (200, b"ok")
        await until(lambda: not upstream._pool._open)
        server.go.set()
        await upstream.close()


@both_loops
async def test_garbled_tls_record_within_an_answer_is_lost(authority: Authority, ca: str) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        peer.send_below_tls(b"\x17\x03\x03\x00\x20" + bytes(32))
        peer.server.wait_go()

    with RawServer(script, tls=authority.server("localhost"), name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca)
        with pytest.raises(LostError) as caught:
            await get(upstream)
        assert (caught.value.reason, caught.value.status) == ("tls_protocol_error", 200)
        server.go.set()
        await upstream.close()


@both_loops
async def test_hundreds_of_handshakes_lose_no_byte_that_comes_right_behind_them(authority: Authority, ca: str) -> None:
    with RawServer(serve(OK), tls=authority.server("localhost"), name="localhost") as server:
        upstream = upstream_of(server.origin, ca=ca, keepalive_s=0)
        for _ in range(10):
            assert await asyncio.gather(*[get(upstream) for _ in range(20)]) == [(200, b"ok")] * 20
        await upstream.close()
    assert server.whole == 200
