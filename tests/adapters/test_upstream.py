"""One send on real sockets: the bytes that arrive, the answers that are read, and what is known when it fails."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from harness import scaled, until
from raw_server import OK, Authority, Peer, RawServer, answer, both_loops, once, serve

from sidecar import connection as connection_module
from sidecar.config import Timeout
from sidecar.errors import LostError, NotSentError
from sidecar.message import Fields
from sidecar.upstream import Incoming, Outgoing, Upstream, outgoing_fields

FIELDS: Fields = ((b"Host", b"api.example.test"),)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def ca(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("ca") / "ca.pem"
    path.write_bytes(authority.pem())
    return str(path)


def upstream_of(
    server: RawServer, *, total_s: float = 10.0, keepalive_s: float = 15.0, ca: str = "", header_bytes: int = 65536
) -> Upstream:
    timeout = Timeout(connect_s=scaled(5.0), total_s=scaled(total_s))
    return Upstream(server.origin, timeout=timeout, keepalive_s=keepalive_s, ca=ca, header_bytes=header_bytes)


def post(content: bytes = b"{}", *fields: tuple[bytes, bytes]) -> Outgoing:
    length = (b"Content-Length", b"%d" % len(content))
    return Outgoing(b"POST", b"/v1/send", (*FIELDS, length, *fields), (content,))


async def content_of(incoming: Incoming) -> bytes:
    return b"".join([piece async for piece in incoming.pieces()])


async def exchange(upstream: Upstream, outgoing: Outgoing, *, whole: bool = True) -> tuple[int, bytes]:
    incoming = await upstream.send(outgoing, whole=whole)
    return incoming.status, await content_of(incoming)


async def lost(upstream: Upstream, outgoing: Outgoing, *, whole: bool = True) -> LostError:
    with pytest.raises(LostError) as caught:
        await exchange(upstream, outgoing, whole=whole)
    return caught.value


# What is written


@both_loops
async def test_request_arrives_byte_for_byte_in_one_piece() -> None:
    seen: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.request()
        seen.append(peer.received)  # all of it by the one read that found the head's end
        peer.send(OK)
        peer.read_to_end()

    fields = (
        (b"X-Tag", b"1"),
        (b"host", b"api.example.test"),
        (b"x-tag", b"2"),
        (b"X-TAG", b""),
        (b"X-Name", b"caf\xe9 \xc3\xa9"),
        (b"content-LENGTH", b"8"),
        (b"X-Tag", b"1"),
    )
    with RawServer(script) as server:
        upstream = upstream_of(server)
        outgoing = Outgoing(b"DELETE", b"//x/../ada%40example.test?&&a=%2f#?", fields, (b"\0\r\n", b"", b"\xff{} \n"))
        assert await exchange(upstream, outgoing) == (200, b"ok")
        await upstream.close()
    expected = (
        b"DELETE //x/../ada%40example.test?&&a=%2f#? HTTP/1.1\r\nX-Tag: 1\r\nhost: api.example.test\r\nx-tag: 2\r\n"
        b"X-TAG: \r\nX-Name: caf\xe9 \xc3\xa9\r\ncontent-LENGTH: 8\r\nX-Tag: 1\r\n\r\n\0\r\n\xff{} \n"
    )
    assert seen == [expected]


@both_loops
async def test_nothing_is_added_and_the_environment_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with RawServer(serve(answer(b"", b"Set-Cookie: sid=A"))) as server:
        upstream = upstream_of(server)
        for _ in range(2):
            await exchange(upstream, Outgoing(b"GET", b"/a?", FIELDS))
        await upstream.close()
    assert server.peers[0].requests == [b"GET /a? HTTP/1.1\r\nHost: api.example.test\r\n\r\n"] * 2


@pytest.mark.parametrize(
    ("target", "field"),
    [
        (b"/", (b"X", b"a\r\nY: b")),
        (b"/", (b"X", b"a\nY: b")),
        (b"/", (b"X\r\n", b"")),
        (b"/", (b"X", b"\0")),
        (b"/ HTTP/1.1\r\nX: y", (b"X", b"")),
    ],
)
async def test_line_break_in_the_head_is_refused_before_anything_is_opened(
    target: bytes, field: tuple[bytes, bytes]
) -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        with pytest.raises(ValueError, match="line break"):
            await upstream.send(Outgoing(b"GET", target, (*FIELDS, field)))
        await upstream.close()
        assert server.peers == []


@both_loops
@pytest.mark.parametrize("content", [b"12", b"1234", b""])
async def test_content_that_is_not_as_long_as_declared_is_never_mistaken_for_a_request(content: bytes) -> None:
    async def later() -> AsyncIterator[bytes]:
        yield content

    fields = (*FIELDS, (b"Content-Length", b"3"))
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        with pytest.raises(ValueError, match="content than declared"):
            await upstream.send(Outgoing(b"POST", b"/", fields, (content,)))
        assert server.peers == []
        with pytest.raises(ValueError, match="content than declared"):
            await upstream.send(Outgoing(b"POST", b"/", fields, later()))
        with pytest.raises(ValueError, match="content than declared"):
            await upstream.send(Outgoing(b"POST", b"/", FIELDS, (b"undeclared",)))
        await until(lambda: all(peer.ended.is_set() for peer in server.peers))
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()
    assert server.whole == 1


@both_loops
async def test_chunked_content_is_framed_and_empty_pieces_do_not_end_it() -> None:
    fields = (*FIELDS, (b"Transfer-Encoding", b"chunked"))

    async def later() -> AsyncIterator[bytes]:
        for piece in (b"", b"ab", b"", b"c" * 17):
            yield piece

    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        for content in ([b"", b"ab", b"", b"c" * 17], later()):
            assert await exchange(upstream, Outgoing(b"PUT", b"/", fields, content, chunked=True)) == (200, b"ok")
        await upstream.close()
    chunks = b"2\r\nab\r\n11\r\n" + b"c" * 17 + b"\r\n0\r\n\r\n"
    head = b"PUT / HTTP/1.1\r\nHost: api.example.test\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server.peers[0].requests == [head + chunks] * 2


@both_loops
async def test_streamed_content_goes_ahead_of_its_next_piece() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        assert peer.read(6) == b"onetwo"
        peer.send(OK)
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server)

        async def content() -> AsyncIterator[bytes]:
            await until(lambda: server.peers and server.peers[0].received.endswith(b"\r\n\r\n"))
            yield b"one"
            await until(lambda: server.peers[0].received.endswith(b"one"))
            yield b"two"

        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"6")), content())
        assert await exchange(upstream, outgoing, whole=False) == (200, b"ok")
        await upstream.close()


def large(size: int, piece: int = 65536) -> Iterator[bytes]:
    for at in range(0, size, piece):
        yield bytes([at // piece % 251]) * min(piece, size - at)


@both_loops
async def test_large_content_arrives_whole_with_few_pieces_ahead_of_the_upstream() -> None:
    size = 24 * MIB
    taken = 0

    def counted() -> Iterator[bytes]:
        nonlocal taken
        for piece in large(size):
            taken += len(piece)
            yield piece

    def script(peer: Peer) -> None:
        peer.server.wait_go()
        peer.request()
        peer.send(OK)
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server, total_s=30)
        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"%d" % size)), counted())
        sending = asyncio.create_task(exchange(upstream, outgoing))
        previous = -1
        while previous != taken or not taken:  # until nothing more is taken: every buffer on the way is full
            previous = taken
            await asyncio.sleep(scaled(0.1))
        assert taken < 20 * MIB  # the kernel's buffers, and little of ours
        server.go.set()
        assert await sending == (200, b"ok")
        await upstream.close()
    content = server.peers[0].requests[0].partition(b"\r\n\r\n")[2]
    assert hashlib.sha256(content).digest() == hashlib.sha256(b"".join(large(size))).digest()


# What is read


@both_loops
async def test_answer_is_told_exactly_as_it_came() -> None:
    head = (
        b"HTTP/1.1 202 All  Right \xe9\r\nset-cookie: a=1\r\nSet-Cookie: b=2\r\nConnection: X-Up\r\nX-Up: 2\r\n"
        b"x-empty:\r\nLatin: \xe9\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"
    )
    with RawServer(serve(head + b"\x1f\x8b\0")) as server:
        upstream = upstream_of(server)
        incoming = await upstream.send(post())
        assert (incoming.status, incoming.reason, incoming.length) == (202, b"All  Right \xe9", 3)
        assert incoming.fields == (
            (b"set-cookie", b"a=1"),
            (b"Set-Cookie", b"b=2"),
            (b"Connection", b"X-Up"),
            (b"X-Up", b"2"),
            (b"x-empty", b""),
            (b"Latin", b"\xe9"),
            (b"Content-Encoding", b"gzip"),
            (b"Content-Length", b"3"),
        )
        assert await content_of(incoming) == b"\x1f\x8b\0"
        assert incoming.written_all
        await upstream.close()


@both_loops
@pytest.mark.parametrize("status", [b"307 Temporary Redirect", b"302 Found", b"308 Permanent Redirect", b"503 No"])
async def test_redirects_and_errors_are_answers_and_nothing_is_repeated(status: bytes) -> None:
    with RawServer(serve(answer(b"", b"Location: /elsewhere", status=status))) as server:
        upstream = upstream_of(server)
        assert await exchange(upstream, post()) == (int(status[:3]), b"")
        await upstream.close()
    assert server.whole == 1


@both_loops
async def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 5
    with RawServer(serve(interim + OK)) as server:
        upstream = upstream_of(server)
        incoming = await upstream.send(post())
        assert (incoming.status, incoming.fields) == (200, ((b"Content-Length", b"2"),))
        assert await content_of(incoming) == b"ok"
        await upstream.close()


@both_loops
@pytest.mark.parametrize(
    ("method", "head"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 512\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 512\r\n\r\n"),
        (b"POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
    ],
)
async def test_answers_without_content_are_complete_and_keep_the_connection(method: bytes, head: bytes) -> None:
    with RawServer(serve(head, OK)) as server:
        upstream = upstream_of(server)
        incoming = await upstream.send(Outgoing(method, b"/", FIELDS))
        assert incoming.content_free
        assert await content_of(incoming) == b""
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 1


@both_loops
async def test_chunked_answer_in_many_pieces_is_joined_without_its_framing() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        for at in range(len(data)):
            peer.send(data[at : at + 1])
        peer.read_to_end()

    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x\r\nhello\r\n1\r\n!\r\n0\r\nT: 1\r\n\r\n"
    with RawServer(script) as server:
        upstream = upstream_of(server)
        incoming = await upstream.send(post())
        assert incoming.length is None
        assert await content_of(incoming) == b"hello!"
        assert incoming.fields == ((b"Transfer-Encoding", b"chunked"),)
        await upstream.close()


CLOSED = b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nhello"


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_answer_without_length_is_complete_when_the_connection_ends_in_order(
    authority: Authority, ca: str, tls: bool
) -> None:
    context = authority.server("localhost") if tls else None
    with RawServer(once(CLOSED, Peer.good_bye), tls=context, name="localhost") as server:
        upstream = upstream_of(server, ca=ca)
        assert await exchange(upstream, post()) == (200, b"hello")
        assert await exchange(upstream, post()) == (200, b"hello")
        await upstream.close()
    assert len(server.peers) == 2


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_answer_without_length_is_cut_when_the_connection_is_reset(
    authority: Authority, ca: str, tls: bool
) -> None:
    context = authority.server("localhost") if tls else None

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(CLOSED)
        peer.server.wait_go()
        peer.reset()

    with RawServer(script, tls=context, name="localhost") as server:
        upstream = upstream_of(server, ca=ca)
        incoming = await upstream.send(post())
        server.go.set()
        with pytest.raises(LostError) as caught:
            await content_of(incoming)
        await upstream.close()
    assert (caught.value.reason, caught.value.status) == ("http_response_incomplete", 200)


@both_loops
async def test_answer_without_length_is_cut_when_tls_ends_without_good_bye(authority: Authority, ca: str) -> None:
    context = authority.server("localhost")
    with RawServer(once(CLOSED, Peer.bare_fin), tls=context, name="localhost") as server:
        upstream = upstream_of(server, ca=ca)
        error = await lost(upstream, post())
        await upstream.close()
    assert (error.reason, error.status) == ("http_response_incomplete", 200)


@both_loops
async def test_answer_with_length_is_complete_though_tls_ends_without_good_bye(authority: Authority, ca: str) -> None:
    context = authority.server("localhost")
    with RawServer(once(OK, Peer.bare_fin), tls=context, name="localhost") as server:
        upstream = upstream_of(server, ca=ca)
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_large_answer_waits_for_a_slow_consumer_and_arrives_whole(
    authority: Authority, ca: str, tls: bool
) -> None:
    size = 32 * MIB
    whole = b"".join(large(size))

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + whole)
        peer.good_bye()

    context = authority.server("localhost") if tls else None
    with RawServer(script, tls=context, name="localhost") as server:
        upstream = upstream_of(server, ca=ca, total_s=30)
        incoming = await upstream.send(post())
        previous = -1
        while previous != server.peers[0].sent_bytes:  # until the upstream can send no more
            previous = server.peers[0].sent_bytes
            await asyncio.sleep(scaled(0.1))
        assert previous < 20 * MIB
        assert incoming._held_bytes < MIB
        assert hashlib.sha256(await content_of(incoming)).digest() == hashlib.sha256(whole).digest()
        await upstream.close()


# What is lost


@both_loops
@pytest.mark.parametrize(
    ("sent", "reason", "status"),
    [
        (b"", "connection_terminated", None),
        (b"HTTP/1.1 200 OK\r\nContent-", "connection_terminated", None),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "connection_terminated", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 40, "http_response_incomplete", 200),
        (b"HTTP/1.1 202 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "http_response_incomplete", 202),
    ],
    ids=["nothing", "half a head", "interim only", "half the content", "no last chunk"],
)
@pytest.mark.parametrize("end", [Peer.good_bye, Peer.reset], ids=["closed", "reset"])
async def test_answer_that_breaks_off_is_lost_and_not_asked_for_again(
    sent: bytes, reason: str, status: int | None, end: object
) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        if sent:
            peer.send(sent)
        Peer.good_bye(peer) if end is Peer.good_bye else Peer.reset(peer)

    with RawServer(script) as server:
        upstream = upstream_of(server)
        error = await lost(upstream, post())
        await upstream.close()
    assert (error.reason, error.status) == (reason, status)
    assert server.whole == 1


@both_loops
@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 5000,
        OK + b"X",
        OK + OK,
        b"HTTP/1.1 204 No\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\r\n",
    ],
    ids=range(11),
)
async def test_unreadable_answer_is_lost_at_once_and_its_connection_closed(sent: bytes) -> None:
    with RawServer(once(sent)) as server:
        upstream = upstream_of(server, header_bytes=4096)
        error = await lost(upstream, post())
        await until(server.peers[0].ended.is_set)
        await upstream.close()
    assert error.reason == "http_protocol_error"
    assert server.whole == 1


@both_loops
async def test_garbled_chunk_in_the_middle_is_lost_with_the_status() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        peer.server.wait_go()
        peer.send(b"zz\r\n")
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server)
        incoming = await upstream.send(post())
        pieces = incoming.pieces()
        assert await anext(pieces) == b"hello"
        server.go.set()
        with pytest.raises(LostError) as caught:
            await anext(pieces)
        await upstream.close()
    assert (caught.value.reason, caught.value.status) == ("http_protocol_error", 200)


# Time


@both_loops
async def test_silent_upstream_is_lost_when_the_time_is_over() -> None:
    with RawServer(once(b"")) as server:
        upstream = upstream_of(server, total_s=0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        error = await lost(upstream, post())
        took_s = loop.time() - began
        await until(server.peers[0].ended.is_set)
        await upstream.close()
    assert error.reason == "http_response_timeout"
    assert scaled(0.28) < took_s < scaled(0.3) + 0.5


@both_loops
@pytest.mark.parametrize("whole", [True, False])
async def test_answer_that_came_in_time_is_read_though_this_process_was_away_until_later(whole: bool) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.server.wait_go()
        peer.send(OK)
        peer.server.at.set()
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server, total_s=0.5)
        sending = asyncio.create_task(exchange(upstream, post(), whole=whole))
        await until(lambda: server.whole == 1)
        server.go.set()
        assert server.at.wait(10)  # from here the loop stands still, until after the total
        threading.Event().wait(scaled(0.7))
        assert await sending == (200, b"ok")
        await upstream.close()


def trickle(peer: Peer) -> None:
    peer.request()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
    for _ in range(10):
        threading.Event().wait(scaled(0.1))
        peer.send(b"x")
    peer.read_to_end()


@both_loops
async def test_answer_that_trickles_beyond_the_total_is_lost() -> None:
    with RawServer(trickle) as server:
        upstream = upstream_of(server, total_s=0.4)
        error = await lost(upstream, post())
        await upstream.close()
    assert (error.reason, error.status) == ("http_response_timeout", 200)


@both_loops
async def test_passed_through_answer_may_trickle_longer_than_the_total() -> None:
    with RawServer(trickle) as server:
        upstream = upstream_of(server, total_s=0.4)
        assert await exchange(upstream, post(), whole=False) == (200, b"x" * 10)
        await upstream.close()


@both_loops
async def test_passed_through_answer_that_falls_silent_is_lost() -> None:
    with RawServer(once(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx")) as server:
        upstream = upstream_of(server, total_s=0.3)
        error = await lost(upstream, post(), whole=False)
        await upstream.close()
    assert (error.reason, error.status) == ("connection_read_timeout", 200)


@both_loops
async def test_slow_client_of_a_passed_through_upload_is_no_silence_of_the_upstream() -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(3):
            await asyncio.sleep(scaled(0.3))
            yield b"x"

    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server, total_s=0.2)
        outgoing = Outgoing(b"PUT", b"/", (*FIELDS, (b"Content-Length", b"3")), content())
        assert await exchange(upstream, outgoing, whole=False) == (200, b"ok")
        await upstream.close()


@both_loops
async def test_slow_consumer_of_a_passed_through_answer_is_no_silence_of_the_upstream() -> None:
    size = 8 * MIB
    with RawServer(serve(answer(bytes(size)))) as server:
        upstream = upstream_of(server, total_s=0.5)
        incoming = await upstream.send(post(), whole=False)
        await asyncio.sleep(scaled(1.2))
        assert len(await content_of(incoming)) == size
        await upstream.close()


@both_loops
@pytest.mark.parametrize("whole", [True, False])
async def test_upstream_that_reads_nothing_of_a_large_upload_is_lost_as_write_timeout(whole: bool) -> None:
    def script(peer: Peer) -> None:
        peer.server.wait_go()

    with RawServer(script) as server:
        upstream = upstream_of(server, total_s=0.4)
        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"%d" % (64 * MIB))), large(64 * MIB))
        error = await lost(upstream, outgoing, whole=whole)
        server.go.set()
        await upstream.close()
    assert error.reason == "connection_write_timeout"


@both_loops
async def test_late_answer_never_reaches_the_next_request() -> None:
    def script(peer: Peer) -> None:
        if peer.number:
            serve(answer(b"own"))(peer)
        else:
            peer.request()
            peer.server.wait_go()
            peer.send(answer(b"late"))
            peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server, total_s=0.3)
        await lost(upstream, post())
        server.go.set()
        for _ in range(3):
            assert await exchange(upstream, post()) == (200, b"own")
        await upstream.close()


# Early answers


@both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("status", [b"413 Content Too Large", b"401 Unauthorized"])
async def test_early_refusal_of_a_large_upload_is_the_answer(
    authority: Authority, ca: str, tls: bool, status: bytes
) -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.send(answer(b"no " + status, status=status))
        peer.bare_fin()  # with content unread: the kernel resets

    context = authority.server("localhost") if tls else None
    size = 20 * MIB
    with RawServer(script, tls=context, name="localhost") as server:
        upstream = upstream_of(server, ca=ca)
        for _ in range(5):
            outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"%d" % size)), large(size))
            incoming = await upstream.send(outgoing)
            assert (incoming.status, await content_of(incoming)) == (int(status[:3]), b"no " + status)
            assert not incoming.written_all
        await upstream.close()
    assert len(server.peers) == 5


@both_loops
async def test_early_answer_survives_a_write_that_fails_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the look before each piece the write meets the reset while the answer is still unread.
    monkeypatch.setattr(connection_module, "LOOKS", 0)

    def script(peer: Peer) -> None:
        peer.head()
        peer.send(answer(b"no", status=b"413 Too Large"))
        peer.bare_fin()
        peer.server.at.set()

    def content(server: RawServer) -> Iterator[bytes]:
        yield b"x" * 65536
        assert server.at.wait(10)
        for _ in range(100):
            yield b"x" * 65536

    with RawServer(script) as server:
        upstream = upstream_of(server)
        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"%d" % (101 * 65536))), content(server))
        assert await exchange(upstream, outgoing) == (413, b"no")
        await upstream.close()


@both_loops
async def test_answer_to_half_an_upload_is_an_answer_and_its_connection_is_not_used_again() -> None:
    def script(peer: Peer) -> None:
        if peer.number == 0:
            peer.head()
            peer.send(OK)
            peer.read_to_end()
        else:
            serve(OK)(peer)

    async def content() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.Event().wait()

    with RawServer(script) as server:
        upstream = upstream_of(server)
        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"8")), content())
        incoming = await upstream.send(outgoing, whole=False)
        assert (incoming.status, await content_of(incoming), incoming.written_all) == (200, b"ok", False)
        await until(server.peers[0].ended.is_set)
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 2


@both_loops
async def test_upload_goes_on_while_the_answer_streams() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n")
        for _ in range(3):
            peer.send(peer.read(1))
        peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server)
        echoed = asyncio.Event()

        async def content() -> AsyncIterator[bytes]:
            yield b"a"
            await echoed.wait()
            yield b"b"
            yield b"c"

        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"3")), content())
        incoming = await upstream.send(outgoing, whole=False)
        pieces = incoming.pieces()
        assert await anext(pieces) == b"a"
        echoed.set()
        assert b"".join([piece async for piece in pieces]) == b"bc"
        await upstream.close()


# Who gives up


class ClientLeftError(Exception):
    """What reading a client that left raises."""


@both_loops
async def test_content_that_fails_ends_the_connection_and_is_told_to_who_waits() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        assert peer.read(8) == b"half"

    async def content() -> AsyncIterator[bytes]:
        yield b"half"
        await until(lambda: server.peers and server.peers[0].received.endswith(b"half"))
        raise ClientLeftError

    with RawServer(script) as server:
        upstream = upstream_of(server)
        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"8")), content())
        with pytest.raises(ClientLeftError):
            await upstream.send(outgoing, whole=False)
        await until(server.peers[0].ended.is_set)
        await upstream.close()
    assert len(server.peers) == 1


@both_loops
async def test_content_that_fails_after_the_head_is_told_to_who_reads() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nx")
        peer.read_to_end()

    left = asyncio.Event()

    async def content() -> AsyncIterator[bytes]:
        yield b"half"
        await left.wait()
        raise ClientLeftError

    with RawServer(script) as server:
        upstream = upstream_of(server)
        outgoing = Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"8")), content())
        incoming = await upstream.send(outgoing, whole=False)
        left.set()
        with pytest.raises(ClientLeftError):
            await content_of(incoming)
        await until(server.peers[0].ended.is_set)
        await upstream.close()


@both_loops
async def test_content_that_fails_before_the_first_write_sends_nothing() -> None:
    def content() -> Iterator[bytes]:
        yield b"half"
        raise ClientLeftError

    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        with pytest.raises(ClientLeftError):
            await upstream.send(Outgoing(b"POST", b"/", (*FIELDS, (b"Content-Length", b"8")), content()))
        await upstream.close()
        assert server.peers == []


@both_loops
async def test_cancelled_send_ends_its_connection() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        if peer.number == 0:
            peer.read_to_end()
        else:
            peer.send(OK)
            peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server)
        sending = asyncio.create_task(upstream.send(post()))
        await until(lambda: server.whole == 1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await until(server.peers[0].ended.is_set)
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 2


@both_loops
@pytest.mark.parametrize("how", ["cancelled", "stopped", "abandoned"])
async def test_consumer_that_gives_up_ends_the_connection(how: str) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        if peer.number == 0:
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            peer.read_to_end()
        else:
            peer.send(OK)
            peer.read_to_end()

    with RawServer(script) as server:
        upstream = upstream_of(server)
        incoming = await upstream.send(post())
        if how == "cancelled":
            reading = asyncio.create_task(content_of(incoming))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        elif how == "stopped":
            pieces = incoming.pieces()
            assert await anext(pieces) == b"half"
            await pieces.aclose()  # type: ignore[attr-defined]
        else:
            incoming.abandon()
            incoming.abandon()
            with pytest.raises(LostError):
                await content_of(incoming)
        await until(server.peers[0].ended.is_set)
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()
    assert len(server.peers) == 2


@both_loops
async def test_abandoning_a_complete_answer_leaves_the_next_request_alone() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        first = await upstream.send(post())
        second = asyncio.create_task(exchange(upstream, post()))
        await asyncio.sleep(0)
        first.abandon()
        assert await second == (200, b"ok")
        assert await content_of(first) == b"ok"
        await upstream.close()
    assert len(server.peers) == 1


# The fence


class Fence:
    """Alive or not, as the test says, and remembers what it was asked."""

    def __init__(self, *alive: bool, renewal: NotSentError | None = None) -> None:
        self._alive = list(alive)
        self._renewal = renewal
        self.asked = 0
        self.renewed = 0

    def alive(self) -> bool:
        self.asked += 1
        return self._alive.pop(0) if len(self._alive) > 1 else self._alive[0]

    async def renew(self) -> None:
        self.renewed += 1
        await asyncio.sleep(0)
        if self._renewal is not None:
            raise self._renewal


@both_loops
async def test_living_fence_is_asked_once_when_the_connection_stands() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        asked_with: list[int] = []

        class Watched(Fence):
            def alive(self) -> bool:
                asked_with.append(len(upstream._pool._open))
                return super().alive()

        fence = Watched(True)
        incoming = await upstream.send(post(), fence=fence)
        assert await content_of(incoming) == b"ok"
        await upstream.close()
    assert (fence.asked, fence.renewed, asked_with) == (1, 0, [1])


@both_loops
async def test_dead_fence_is_renewed_and_the_request_sent_once() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        fence = Fence(False, True)
        incoming = await upstream.send(post(), fence=fence)
        assert await content_of(incoming) == b"ok"
        await upstream.close()
    assert (fence.asked, fence.renewed, server.whole, len(server.peers)) == (2, 1, 1, 1)


@both_loops
async def test_dead_fence_that_cannot_be_renewed_sends_nothing_and_keeps_the_connection() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        refusal = NotSentError("proxy_internal_error")
        with pytest.raises(NotSentError) as caught:
            await upstream.send(post(), fence=Fence(False, renewal=refusal))
        assert caught.value is refusal
        assert await exchange(upstream, post()) == (200, b"ok")
        await upstream.close()
    assert (server.whole, len(server.peers)) == (1, 1)


@both_loops
async def test_fence_that_dies_every_time_sends_nothing() -> None:
    with RawServer(serve(OK)) as server:
        upstream = upstream_of(server)
        fence = Fence(False)
        with pytest.raises(NotSentError):
            await upstream.send(post(), fence=fence)
        await upstream.close()
    assert (server.whole, fence.renewed) == (0, 4)


@both_loops
async def test_connection_that_closes_while_the_fence_is_renewed_is_not_written_to() -> None:
    def script(peer: Peer) -> None:
        if peer.number == 0:
            peer.server.wait_go()
            peer.bare_fin()
            peer.server.at.set()
        else:
            serve(OK)(peer)

    with RawServer(script) as server:
        upstream = upstream_of(server)

        class Slow(Fence):
            async def renew(self) -> None:
                server.go.set()
                assert server.at.wait(10)  # the loop stands still: only the look can tell

        incoming = await upstream.send(post(), fence=Slow(False, True))
        assert await content_of(incoming) == b"ok"
        await upstream.close()
    assert (server.whole, len(server.peers)) == (1, 2)


# The fields that are written


@pytest.mark.parametrize(
    ("fields", "length", "expected"),
    [
        (
            ((b"A", b"1"), (b"host", b"localhost:8025"), (b"content-length", b"9"), (b"a", b"2")),
            12,
            ((b"A", b"1"), (b"host", b"up.test"), (b"content-length", b"12"), (b"a", b"2")),
        ),
        (((b"A", b"1"),), 0, ((b"Host", b"up.test"), (b"A", b"1"))),
        (((b"Host", b"x"), (b"Content-Length", b"0")), 0, ((b"Host", b"up.test"), (b"Content-Length", b"0"))),
        (((b"Host", b"x"), (b"A", b"1")), 3, ((b"Host", b"up.test"), (b"A", b"1"), (b"Content-Length", b"3"))),
        (
            ((b"Host", b"x"), (b"Transfer-Encoding", b"chunked"), (b"A", b"1")),
            3,
            ((b"Host", b"up.test"), (b"A", b"1"), (b"Content-Length", b"3")),
        ),
        (
            ((b"Host", b"x"), (b"Transfer-Encoding", b"chunked"), (b"A", b"1")),
            0,
            ((b"Host", b"up.test"), (b"A", b"1"), (b"Content-Length", b"0")),
        ),
        (
            ((b"Host", b"x"), (b"transfer-encoding", b"Chunked"), (b"A", b"1")),
            None,
            ((b"Host", b"up.test"), (b"transfer-encoding", b"chunked"), (b"A", b"1")),
        ),
        (
            ((b"Host", b"x"), (b"Content-Length", b"5")),
            None,
            ((b"Host", b"up.test"), (b"Transfer-Encoding", b"chunked")),
        ),
        (
            (
                (b"Host", b"x"),
                (b"Connection", b"close, X-Hop, Content-Length"),
                (b"X-Hop", b"1"),
                (b"Keep-Alive", b"timeout=5"),
                (b"TE", b"trailers"),
                (b"Proxy-Authorization", b"x"),
                (b"Expect", b"100-continue"),
                (b"Upgrade", b"h2c"),
                (b"Host", b"y"),
                (b"Content-Length", b"2"),
                (b"Content-Length", b"3"),
                (b"Cookie", b"a"),
            ),
            2,
            ((b"Host", b"up.test"), (b"Content-Length", b"2"), (b"Cookie", b"a")),
        ),
    ],
    ids=range(9),
)
def test_outgoing_fields(fields: Fields, length: int | None, expected: Fields) -> None:
    assert outgoing_fields(fields, host=b"up.test", content_length=length) == expected


@both_loops
async def test_two_hundred_and_fifty_sends_at_once_are_all_answered() -> None:
    def script(peer: Peer) -> None:
        while peer.request():
            peer.server.wait_go()
            peer.send(answer(peer.requests[-1][-4:]))

    with RawServer(script) as server:
        upstream = upstream_of(server, total_s=20)
        contents = [b"%04d" % number for number in range(250)]
        sending = [asyncio.create_task(exchange(upstream, post(content))) for content in contents]
        await until(lambda: server.whole == 250, 20)
        server.go.set()
        assert await asyncio.gather(*sending) == [(200, content) for content in contents]
        await upstream.close()
    assert server.whole == 250
