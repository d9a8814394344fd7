"""Sockets that are really bound: both families, ports in use, and unix sockets that were left behind."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import free_port, scaled

from sidecar import listeners
from sidecar.config import Address
from sidecar.errors import StartError


class Bound:
    """Binds for one test, keeps what was said, and closes everything."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stack = ExitStack()

    def __call__(self, address: Address) -> list[socket.socket]:
        made = listeners.bind(address, self.said.append)
        for sock in made:
            self.stack.enter_context(sock)
        return made

    def occupy(self, host: str, port: int = 0) -> int:
        """Another process's listener, so to say; its port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self.stack.enter_context(socket.socket(family))
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen()
        return int(sock.getsockname()[1])


@pytest.fixture
def bound() -> Iterator[Bound]:
    made = Bound()
    with made.stack:
        yield made


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a unix socket fits: the paths of pytest are too long for one."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder) / "s"


def reach(host: str, port: int) -> None:
    with socket.create_connection((host, port), scaled(2)):
        pass


def test_localhost_is_both_families_on_one_port(bound: Bound) -> None:
    made = bound(Address("localhost", 0))
    assert [sock.family for sock in made] == [socket.AF_INET, socket.AF_INET6]
    (port,) = {sock.getsockname()[1] for sock in made}
    reach("127.0.0.1", port)
    reach("::1", port)
    assert bound.said == []
    assert not any(sock.getblocking() for sock in made)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_one_address_is_one_socket_of_its_family(bound: Bound, host: str) -> None:
    (sock,) = bound(Address(host, 0))
    assert sock.family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
    assert sock.getsockname()[0] == host
    loopback = "::1" if ":" in host else "127.0.0.1"
    reach(loopback, sock.getsockname()[1])


def test_every_address_of_ipv6_leaves_ipv4_to_others(bound: Bound) -> None:
    (sock,) = bound(Address("::", 0))
    assert bound(Address("0.0.0.0", sock.getsockname()[1]))


@pytest.mark.parametrize(
    ("host", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_busy_port_is_an_error_that_names_the_address(bound: Bound, host: str, written: str) -> None:
    port = bound.occupy("127.0.0.1" if host == "localhost" else host)
    with pytest.raises(StartError, match="in use") as caught:
        bound(Address(host, port))
    assert f"{written}:{port}" in str(caught.value)


def test_port_that_is_busy_on_ipv6_alone_is_an_error_for_localhost(bound: Bound) -> None:
    # A client that tries ::1 first would reach whoever listens there.
    port = bound.occupy("::1", free_port())
    with pytest.raises(StartError, match="in use"):
        bound(Address("localhost", port))


def test_host_without_ipv6_serves_ipv4_and_says_so(bound: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a kernel without IPv6 says: this family is as unknown to any kernel.
    monkeypatch.setattr(socket, "AF_INET6", 99)
    made = bound(Address("localhost", 0))
    assert [sock.family for sock in made] == [socket.AF_INET]
    (sentence,) = bound.said
    assert "localhost" in sentence
    assert "IPv6" in sentence


def test_host_that_cannot_be_resolved_is_an_error_that_names_it(bound: Bound) -> None:
    with pytest.raises(StartError, match=r"nowhere\.invalid:8025"):
        bound(Address("nowhere.invalid", 8025))


def test_address_of_another_host_is_an_error_that_names_it(bound: Bound) -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1:8025"):
        bound(Address("192.0.2.1", 8025))


# Unix sockets.


def test_unix_socket_serves(bound: Bound, path: Path) -> None:
    (sock,) = bound(Address(unix=str(path)))
    assert not sock.getblocking()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_unix_socket_that_an_ended_process_left_behind_is_taken_over(bound: Bound, path: Path) -> None:
    script = "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert stat.S_ISSOCK(path.stat().st_mode)
    bound(Address(unix=str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_unix_socket_in_use_is_an_error_and_stays_whose_it_is(bound: Bound, path: Path) -> None:
    (first,) = bound(Address(unix=str(path)))
    with pytest.raises(StartError, match="in use") as caught:
        bound(Address(unix=str(path)))
    assert f"unix:{path}" in str(caught.value)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        first.setblocking(True)
        first.accept()[0].close()


def test_unix_socket_whose_owner_accepts_nobody_does_not_hold_up_the_start(bound: Bound, path: Path) -> None:
    stuck = bound.stack.enter_context(socket.socket(socket.AF_UNIX))
    stuck.bind(str(path))
    stuck.listen(0)
    for _ in range(2):  # the queue is full: a further connect waits
        client = bound.stack.enter_context(socket.socket(socket.AF_UNIX))
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:
            pass
    ended = threading.Event()

    def start() -> None:
        try:
            bound(Address(unix=str(path)))
        except StartError:
            ended.set()

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    in_time = ended.wait(scaled(3))
    stuck.close()
    thread.join(scaled(3))
    assert in_time


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_never_removed(bound: Bound, path: Path, kind: str) -> None:
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    with pytest.raises(StartError, match="unix:"):
        bound(Address(unix=str(path)))
    assert path.exists()


def test_path_that_is_too_long_or_nowhere_is_an_error_that_names_it(bound: Bound, path: Path) -> None:
    for wrong in (str(path) + "x" * 120, str(path.parent / "none" / "s")):
        with pytest.raises(StartError) as caught:
            bound(Address(unix=wrong))
        assert f"unix:{wrong}" in str(caught.value)
        assert not os.path.exists(wrong)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        (Address("localhost", 1), True),
        (Address("127.0.0.1", 1), True),
        (Address("127.1.2.3", 1), True),
        (Address("::1", 1), True),
        (Address(unix="/s"), True),
        (Address("0.0.0.0", 1), False),
        (Address("::", 1), False),
        (Address("10.0.0.1", 1), False),
        (Address("127.example.test", 1), False),
    ],
    ids=str,
)
def test_loopback_is_what_only_this_host_reaches(address: Address, loopback: bool) -> None:
    assert listeners.is_loopback(address) is loopback
