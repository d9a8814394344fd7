"""Connections to the store's servers: redis-py makes them, and asks sentinels or cluster nodes where the others are.

Nothing of a record passes here; `link.py` talks over what is made.
"""

from __future__ import annotations

import asyncio
import binascii
import random
import ssl
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import redis.exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError, ResponseError

from sidecar.address import Account, StoreAddress
from sidecar.config import Address
from sidecar.errors import StartError, StoreError

# The tags of all records and lists: one slot of a cluster each.
TAGS = tuple(f"{number:02x}" for number in range(256))
SLOTS = 16384
# Who has not answered in this part of the time is not waited for where others have: a host that is gone takes its
# sentinel along, and must not cost every connection its whole time.
PATIENCE = 1 / 3
# How many nodes of a large cluster are asked for its map.
ASKED_NODES = 7


def slot(tag: str) -> int:
    """The cluster's slot of a hash tag: CRC16 (XMODEM) of what stands between the braces, modulo 16384."""
    return binascii.crc_hqx(tag.encode("ascii"), 0) % SLOTS


TAG_SLOTS = {tag: slot(tag) for tag in TAGS}


def clause(exc: BaseException) -> str:
    """One clause about a fault, for the log and /readyz: the library's text, without line breaks."""
    return " ".join(str(exc).split()) or type(exc).__name__


class Reach:
    """How the servers of one store are connected to."""

    def __init__(self, address: StoreAddress, *, ca: str, timeout_s: float) -> None:
        """`ca`: a file of certificates to trust instead of the system's.

        Raises: StartError where it cannot be read.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._tls = _context(ca) if address.tls else None

    async def server(self, where: Address) -> AbstractConnection:
        """A connection that stands, with account and database. Raises: StoreError."""
        return await self._connect(where, self.address.account, self.address.database)

    async def guide(self, where: Address, account: Account) -> AbstractConnection:
        """A connection to a server that knows where others are. Raises: StoreError."""
        return await self._connect(where, account, 0)

    async def _connect(self, where: Address, account: Account, database: int) -> AbstractConnection:
        connection = self._make(where, account, database)
        try:
            async with asyncio.timeout(max(self.timeout_s, 1.0)):
                await connection.connect()  # type: ignore[no-untyped-call]  # redis-py types it not
        except (TimeoutError, redis.exceptions.TimeoutError) as exc:
            await drop(connection)
            raise StoreError(f"{where} does not answer", applied=False) from exc
        except (RedisError, OSError) as exc:
            await drop(connection)
            raise StoreError(clause(exc), applied=False) from exc
        except asyncio.CancelledError:
            await drop(connection)
            raise
        return connection

    def _make(self, where: Address, account: Account, database: int) -> AbstractConnection:
        common: dict[str, Any] = {
            "db": database,
            "username": account.user or None,
            "password": account.password or None,
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": self.timeout_s,
            "decode_responses": False,
            "driver_info": None,
            "health_check_interval": 0,
        }
        if where.unix:
            return UnixDomainSocketConnection(path=where.unix, **common)
        if self._tls is None:
            return Connection(host=where.host, port=where.port, **common)
        made = SSLConnection(host=where.host, port=where.port, **common)
        # One context for all connections: reading the authorities takes tens of milliseconds, and redis-py's own
        # would trust the system's beside those of `ca`.
        made.ssl_context.context = self._tls
        return made


def _context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as exc:
        raise StartError(f"store.ca: {ca} cannot be read as certificates (PEM)") from exc


async def drop(connection: AbstractConnection) -> None:
    """Close a connection whatever its state, without waiting for the other side."""
    try:
        async with asyncio.timeout(1.0):
            await connection.disconnect(nowait=True)
    except (RedisError, OSError, TimeoutError):
        pass  # it is gone, which is what was asked for


class _Guides:
    """Servers that are asked where others are, over a kept connection each; one question at a time, shared."""

    def __init__(self, reach: Reach, account: Account, command: tuple[str, ...]) -> None:
        self._reach = reach
        self._account = account
        self._command = command
        self._kept: dict[Address, AbstractConnection] = {}
        self._asking: asyncio.Task[list[tuple[Address, Any]]] | None = None

    async def ask(self, wheres: Sequence[Address]) -> list[tuple[Address, Any]]:
        """What those say that answer soon: all of them, or those of the first third of the time, or the first one.

        Raises: StoreError with the trouble of one, where none answers.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask_all(wheres))
            self._asking.add_done_callback(_seen)
        # Whoever joins may leave again: the question is everybody's.
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        """Drop all connections."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        while self._kept:
            await drop(self._kept.popitem()[1])

    async def _ask_all(self, wheres: Sequence[Address]) -> list[tuple[Address, Any]]:
        loop = asyncio.get_running_loop()
        asked = {loop.create_task(self._ask(where)): where for where in wheres}
        patience_s = PATIENCE * max(self._reach.timeout_s, 1.0)
        end = loop.time() + 2 * patience_s
        try:
            done, left = await asyncio.wait(asked, timeout=patience_s)
            while left and loop.time() < end and all(task.exception() for task in done):
                more, left = await asyncio.wait(left, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED)
                done |= more
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        told = [(where, task.result()) for task, where in asked.items() if task in done and not task.exception()]
        if not told:
            faults = [exc.reason for task in done if isinstance(exc := task.exception(), StoreError)]
            raise StoreError(faults[0] if faults else "no answer in time", applied=False)
        return told

    async def _ask(self, where: Address) -> Any:
        # Taken out while in use: after a fault, or when the asker is cancelled, a late reply must reach nobody.
        connection = self._kept.pop(where, None)
        if connection is not None:
            try:
                return await self._exchange(where, connection)
            except StoreError as exc:
                if where in self._kept:  # an error reply
                    raise
                del exc  # it had ended while it lay idle
        return await self._exchange(where, await self._reach.guide(where, self._account))

    async def _exchange(self, where: Address, connection: AbstractConnection) -> Any:
        try:
            await connection.send_command(*self._command, check_health=False)
            reply = await connection.read_response(disable_decoding=True)
        except ResponseError as exc:
            self._kept[where] = connection
            raise StoreError(clause(exc), applied=False) from exc
        except (RedisError, OSError) as exc:
            await drop(connection)
            raise StoreError(clause(exc), applied=False) from exc
        except asyncio.CancelledError:
            await drop(connection)
            raise
        self._kept[where] = connection
        return reply


def _seen(task: asyncio.Task[Any]) -> None:
    """Take note of how a shared task ended, also where everybody has left by now."""
    if not task.cancelled():
        task.exception()


class Sentinels:
    """Those that watch over one primary and say where it is."""

    def __init__(self, reach: Reach) -> None:
        """Connects when first asked."""
        self._hosts = reach.address.hosts
        name = reach.address.name
        self._guides = _Guides(reach, reach.address.asked, ("SENTINEL", "MASTER", name))

    async def primary(self) -> Address:
        """The primary, by the latest epoch that is told: one cut off from the others still names the old one.

        Raises: StoreError where no sentinel answers, or none knows the name.
        """
        try:
            told = await self._guides.ask(self._hosts)
        except StoreError as exc:
            raise StoreError(f"no sentinel names the primary: {exc.reason}", applied=False) from exc
        states = [dict(zip(reply[::2], reply[1::2], strict=False)) for _, reply in told]
        latest = max(states, key=lambda state: int(state.get(b"config-epoch", 0)))
        return Address(latest[b"ip"].decode("ascii"), int(latest[b"port"]))

    async def close(self) -> None:
        """Drop the connections to them."""
        await self._guides.close()


class Cluster:
    """The nodes of a cluster, which say who serves which slot."""

    def __init__(self, reach: Reach) -> None:
        """Connects when first asked."""
        self._hosts = reach.address.hosts
        self._guides = _Guides(reach, reach.address.account, ("CLUSTER", "SLOTS"))

    async def owners(self, known: Iterable[Address]) -> dict[str, Address]:
        """Who serves each tag, as most say of those that answer; a tag that nobody serves is left out.

        `known`: nodes beside those of the URL. Raises: StoreError.
        """
        hosts = list(dict.fromkeys((*self._hosts, *known)))
        if len(hosts) > ASKED_NODES:
            hosts = random.sample(hosts, ASKED_NODES)  # any will do: no secret
        told = await self._guides.ask(hosts)
        votes: dict[str, Counter[Address]] = {tag: Counter() for tag in TAGS}
        for asked, ranges in told:
            for first, last, primary, *_replicas in ranges:
                where = named(primary[0], primary[1], asked)
                for tag, number in TAG_SLOTS.items():
                    if first <= number <= last:
                        votes[tag][where] += 1
        return {tag: count.most_common(1)[0][0] for tag, count in votes.items() if count}

    async def close(self) -> None:
        """Drop the connections to them."""
        await self._guides.close()


def named(host: bytes | str | None, port: int, asked: Address) -> Address:
    """The node of a map or a redirection; one without a host is at the address that was asked."""
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    return Address(text if text and text != "?" else asked.host, port)
