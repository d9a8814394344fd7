"""One address for several processes: a socket each, dealt out by the kernel, and nobody else's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sidecar.config import Address, Config
from sidecar.errors import StartError
from sidecar.listeners import Listening


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def places(stack: ExitStack, workers: int, *addresses: Address) -> list[list[list[socket.socket]]]:
    """Places, families, sockets."""
    listening = Listening(lambda _: None)
    stack.callback(listening.remove)
    found = [
        [list(family) for family in place.sockets]
        for place in listening.places(Config(routes=(), listen=addresses), workers)
    ]
    for one in (one for place in found for family in place for one in family):
        stack.enter_context(one)
    return found


def accepted(listener: socket.socket) -> list[socket.socket]:
    found = []
    while True:
        try:
            found.append(listener.accept()[0])
        except BlockingIOError:
            return found


def test_clients_are_dealt_out_to_all_sockets(stack: ExitStack) -> None:
    ((group,),) = places(stack, 4, Address("127.0.0.1", 0))
    assert len({one.getsockname() for one in group}) == 1
    for _ in range(400):
        stack.enter_context(socket.create_connection(group[0].getsockname()))
    counts = []
    for one in group:
        found = accepted(one)
        counts.append(len(found))
        for connection in found:
            connection.close()
    assert sum(counts) == 400
    assert min(counts) > 50, counts


def test_both_families_of_localhost_have_a_socket_for_each(stack: ExitStack) -> None:
    (families,) = places(stack, 3, Address("localhost", 0))
    assert [len(group) for group in families] == [3, 3]
    assert {one.getsockname()[1] for group in families for one in group} == {families[0][0].getsockname()[1]}


@pytest.mark.parametrize("workers", [1, 2])
def test_address_of_workers_is_in_use_for_everybody_else(stack: ExitStack, workers: int) -> None:
    ((group,),) = places(stack, 2, Address("127.0.0.1", 0))
    with pytest.raises(StartError, match="in use"):
        places(stack, workers, Address("127.0.0.1", group[0].getsockname()[1]))


def test_unix_socket_is_one_for_all_and_is_removed(stack: ExitStack, tmp_path: Path) -> None:
    path = tmp_path / "s"
    if len(str(path)) > 100:
        path = Path(f"/tmp/s-{tmp_path.name[-20:]}")
    listening = Listening(lambda _: None)
    (place,) = listening.places(Config(routes=(), listen=(Address(unix=str(path)),)), 4)
    with place.sockets[0][0]:
        assert [len(group) for group in place.sockets] == [1]
        assert path.exists()
        listening.remove()
    assert not path.exists()
