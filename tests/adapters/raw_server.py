"""A server whose every byte, end and reset a test decides, on real sockets and in threads of its own.

A script is a function of one `Peer`, called for each connection in order of acceptance. It runs in its own
thread, so that it behaves the same whatever the loop under test does, or does not do, meanwhile. `both_loops`
runs a test on asyncio's loop and on uvloop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, cast

import pytest
import trustme
import uvloop

from sidecar.config import Origin

PATIENCE_S = 20.0
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """One accepted connection."""

    def __init__(self, server: RawServer, sock: socket.socket, number: int) -> None:
        self.server = server
        self.number = number  # of the connection, from 0
        self.received = b""
        self.sent_bytes = 0
        self.requests: list[bytes] = []
        self.ended = threading.Event()  # the client ended the connection, or it was reset
        self._raw = sock
        self._stream: socket.socket = sock
        self._at = 0

    def secure(self, context: ssl.SSLContext) -> None:
        self._stream = context.wrap_socket(self._raw, server_side=True, suppress_ragged_eofs=False)

    # Reading

    def _more(self, size: int = 65536) -> bool:
        try:
            data = self._stream.recv(size)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        self.received += data
        if not data:
            self.ended.set()
        return bool(data)

    def head(self) -> bytes:
        """Read a head, and as little behind it as possible; empty when the client has left."""
        while (end := self.received.find(b"\r\n\r\n", self._at)) < 0:
            if not self._more(1):
                return b""
        head = self.received[self._at : end + 4]
        self._at = end + 4
        return head

    def request(self) -> bytes:
        """Read a whole request and count it; empty when the client left before its end."""
        start = self._at
        while (end := self.received.find(b"\r\n\r\n", start)) < 0:
            if not self._more():
                return b""
        head = self.received[start : end + 4]
        if CHUNKED.search(head):
            while (last := self.received.find(b"0\r\n\r\n", end + 4)) < 0:
                if not self._more():
                    return b""
            until = last + 5
        else:
            found = LENGTH.search(head)
            until = end + 4 + (int(found[1]) if found else 0)
            pieces = []
            size = len(self.received)
            while size < until:  # joined once: contents of many MiB
                data = self._stream.recv(1 << 20)
                if not data:
                    self.ended.set()
                    return b""
                pieces.append(data)
                size += len(data)
            self.received += b"".join(pieces)
        self._at = until
        whole = self.received[start:until]
        self.requests.append(whole)
        with self.server.lock:
            self.server.whole += 1
        return whole

    def read(self, size: int) -> bytes:
        """Read `size` bytes behind what was read, each noted in `received` as it comes; fewer when the client left."""
        while len(self.received) < self._at + size and self._more(1):
            pass
        read = self.received[self._at : self._at + size]
        self._at += len(read)
        return read

    def read_to_end(self) -> None:
        """Read until the client ends the connection."""
        while self._more():
            pass

    # Writing and ending

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            sent = self._stream.send(view[:65536])
            self.sent_bytes += sent
            view = view[sent:]

    def send_below_tls(self, data: bytes) -> None:
        """Write below TLS, as if the network had changed the stream."""
        os.write(self._stream.fileno(), data)

    def bare_fin(self) -> None:
        """End without TLS's good-bye; on a plain connection just the end."""
        socket.socket(fileno=self._stream.detach()).close()

    def good_bye(self) -> None:
        """End in good order: close_notify where there is TLS, then FIN."""
        if isinstance(self._stream, ssl.SSLSocket):
            self._stream.settimeout(1)
            try:
                self._raw = self._stream.unwrap()
            except OSError:
                pass
        self.bare_fin()

    def reset(self) -> None:
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.bare_fin()

    def finish(self) -> None:
        self._stream.close()
        self._raw.close()
        self.ended.set()


Script = Callable[[Peer], None]


class RawServer:
    """Listens on a loopback port of the system's choice and runs `script` for each connection."""

    def __init__(
        self,
        script: Script,
        *,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "",
    ) -> None:
        self.peers: list[Peer] = []
        self.whole = 0  # requests read whole: the mails that would have left
        self.lock = threading.Lock()
        self.go = threading.Event()  # for scripts that wait for the test
        self.at = threading.Event()  # for tests that wait for the script
        self.faults: list[BaseException] = []
        self._script = script
        self._tls = tls
        self._listener = socket.create_server((host, port), backlog=512)
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self.origin = Origin("https" if tls else "http", name or host, self.port)
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.go.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self._acceptor.join(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a script did not end"
        if exc[0] is None:
            assert self.faults == []

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(PATIENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(self, sock, len(self.peers))
            self.peers.append(peer)
            thread = threading.Thread(target=self._run, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, peer: Peer) -> None:
        try:
            if self._tls is not None:
                peer.secure(self._tls)
            self._script(peer)
        except OSError:
            pass  # the client left, or refused our certificate: the test looks at its own side
        except BaseException as exc:  # noqa: BLE001 - told by the test's own thread
            self.faults.append(exc)
        finally:
            peer.finish()

    def wait_go(self) -> None:
        assert self.go.wait(PATIENCE_S)


# Scripts


def serve(*answers: bytes) -> Script:
    """Answer the requests of a connection one by one; the last answer for all that follow."""

    def script(peer: Peer) -> None:
        number = 0
        while peer.request():
            peer.send(answers[min(number, len(answers) - 1)])
            number += 1

    return script


def once(answer: bytes, end: Callable[[Peer], None] | None = None) -> Script:
    """Read a request, send `answer`, then `end`; without it keep the connection until the client ends it."""

    def script(peer: Peer) -> None:
        if peer.request():
            peer.send(answer)
            (end or Peer.read_to_end)(peer)

    return script


def answer(content: bytes = b"ok", *fields: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, *fields, b"Content-Length: %d" % len(content)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


# TLS


class Authority:
    """A certificate authority of this test run."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def pem(self) -> bytes:
        return self._ca.cert_pem.bytes()

    def server(self, *names: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        self._ca.issue_cert(*names).configure_cert(context)
        return context


def addresses(port: int, *hosts: str) -> Callable[[str, int], Coroutine[Any, Any, Sequence[Any]]]:
    """A look-up that finds `hosts`, in this order, for every name."""

    async def lookup(_name: str, _port: int) -> Sequence[Any]:
        return [
            (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
            for host in hosts
        ]

    return lookup


# Loops


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on asyncio's own loop and on uvloop."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    @functools.wraps(test)
    def run(*args: Any, new_loop: Callable[[], asyncio.AbstractEventLoop], **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(*args, **kwargs))

    signature = inspect.signature(test)
    loop = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)
    vars(run)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), loop])
    del vars(run)["__wrapped__"]
    return cast(Callable[..., None], run)
