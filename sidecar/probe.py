"""Asks a running sidecar, an upstream or a store one question over a plain socket. Standard library only.

`healthcheck` runs every few seconds for as long as the sidecar lives, so nothing here may import a server, a
client or a store library.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from sidecar.address import Account, Kind, parse
from sidecar.config import Address, Config, Route
from sidecar.errors import SidecarError

# Docker's and Kubernetes' own limits are above this; a sidecar that needs longer is not well.
TIMEOUT_S = 2.0
# Whoever settles a record looks at the screen, and a list asks the store many times.
LONG_S = 30.0
ANSWER_LIMIT_BYTES = 4 * 1024 * 1024

# Where something that listens everywhere is reached from this machine.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


class ProbeError(SidecarError):
    """No useful answer; one clause that says what happened."""


class _Clock:
    """One time limit over several steps."""

    def __init__(self, limit_s: float) -> None:
        self.end = time.monotonic() + limit_s

    def left_s(self) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _reason(exc: OSError) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, socket.gaierror):
        return "the name cannot be resolved"
    return getattr(exc, "verify_message", "") or (exc.strerror or type(exc).__name__).lower()


def _connect(address: Address, clock: _Clock) -> socket.socket:
    if not address.unix:
        host = EVERYWHERE.get(address.host, address.host)
        return socket.create_connection((host, address.port), clock.left_s())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(clock.left_s())
        connection.connect(address.unix)
    except OSError:
        connection.close()
        raise
    return connection


def get(
    address: Address, path: str, *, token: str = "", limit_s: float = TIMEOUT_S, content: bytes | None = None
) -> tuple[int, bytes]:
    """Status and content of a GET at an admin listener; with `content`, of a POST of that JSON.

    Raises: ProbeError.
    """
    host = "localhost" if address.unix else str(address)
    lines = [f"{'GET' if content is None else 'POST'} {path} HTTP/1.0", f"Host: {host}", "Accept: application/json"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if content is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    request = "\r\n".join([*lines, "", ""]).encode("ascii") + (content or b"")
    clock = _Clock(limit_s)
    try:
        with _connect(address, clock) as connection:
            connection.settimeout(clock.left_s())
            connection.sendall(request)
            return _parse(_read(connection, clock))
    except OSError as exc:
        raise ProbeError(f"{address}: {_reason(exc)}") from exc


def _read(connection: socket.socket, clock: _Clock) -> bytes:
    """Everything until the other side closes: HTTP/1.0 without a kept connection."""
    answer = bytearray()
    while len(answer) <= ANSWER_LIMIT_BYTES:
        connection.settimeout(clock.left_s())
        piece = connection.recv(65536)
        if not piece:
            return bytes(answer)
        answer += piece
    raise ProbeError("the answer is too large")


def _parse(answer: bytes) -> tuple[int, bytes]:
    head, _, content = answer.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] (\d{3})(?: |\r|\Z)", head)
    if not status:
        raise ProbeError("the answer is not HTTP")
    return int(status[1]), content


def _admin(config: Config) -> Address:
    if not config.admin.listen:
        raise ProbeError("`admin.listen` is off: there is nothing to ask")
    return config.admin.listen[0]


def health(config: Config, *, ready: bool = False) -> None:
    """Come back when the sidecar lives, or is ready.

    Raises: ProbeError with the reason.
    """
    path = "/readyz" if ready else "/livez"
    address = _admin(config)
    status, content = get(address, path)
    if status != 200:
        line = " ".join(content.decode("utf-8", "replace").split())[:200]
        raise ProbeError(f"{address}{path}: {status} {line}".rstrip())


def stats(config: Config) -> dict[str, Any]:
    """What the sidecar has counted, as `GET /v1/stats` says it.

    Raises: ProbeError.
    """
    status, found = ask(config, "/v1/stats", limit_s=TIMEOUT_S)
    if status != 200:
        raise ProbeError(f"{_admin(config)}/v1/stats: status {status}")
    return found


def ask(
    config: Config, path: str, given: Mapping[str, Any] | None = None, *, limit_s: float = LONG_S
) -> tuple[int, dict[str, Any]]:
    """Status and document of a GET at the admin listener of a configuration; with `given`, of a POST of it.

    Raises: ProbeError, also where the token is wrong.
    """
    address = _admin(config)
    content = None if given is None else json.dumps(given).encode("ascii")
    status, answer = get(address, path, token=config.admin.token, limit_s=limit_s, content=content)
    page = path.partition("?")[0]
    if status == 401:
        raise ProbeError(f"{address}: the sidecar wants another `admin.token`")
    try:
        found = json.loads(answer)
    except ValueError as exc:
        raise ProbeError(f"{address}{page}: status {status}, and the answer is not JSON") from exc
    if not isinstance(found, dict):
        raise ProbeError(f"{address}{page}: the answer is not an object")
    return status, found


def upstream(route: Route) -> None:
    """Connect to a route's upstream, with TLS where it is https, and send nothing.

    Raises: ProbeError.
    """
    origin = route.upstream
    clock = _Clock(route.timeout.connect_s)
    try:
        with socket.create_connection((origin.host, origin.port), clock.left_s()) as connection:
            if origin.scheme == "https":
                _wrap(connection, route.ca, origin.host, clock).close()
    except OSError as exc:
        raise ProbeError(_reason(exc)) from exc


def _wrap(connection: socket.socket, ca: str, host: str, clock: _Clock) -> socket.socket:
    import ssl

    context = ssl.create_default_context(cafile=ca or None)
    connection.settimeout(clock.left_s())
    return context.wrap_socket(connection, server_hostname=host)


def store(config: Config) -> bool:
    """PING the store: one sentinel, or one node of a cluster, is enough.

    False for an embedded one, which runs only while the sidecar does.

    Raises: ProbeError; its text holds no part of the URL.
    """
    if config.store.url.startswith("embedded:"):
        return False
    found = parse(config.store.url)
    account = found.asked if found.kind is Kind.SENTINEL else found.account
    fault = ProbeError("it has no address")
    for where in found.hosts:
        try:
            _ping(config, where, account, tls=found.tls)
        except ProbeError as exc:
            fault = exc
        else:
            return True
    raise fault


def _ping(config: Config, where: Address, account: Account, *, tls: bool) -> None:
    clock = _Clock(config.store.timeout_s)
    try:
        with _connect(where, clock) as plain:
            connection = _wrap(plain, config.store.ca, where.host, clock) if tls else plain
            with connection:
                for command in _commands(account.user, account.password):
                    _ask(connection, command, clock)
    except OSError as exc:
        raise ProbeError(_reason(exc)) from exc


def _commands(user: str, password: str) -> Iterator[tuple[str, ...]]:
    if password:
        yield ("AUTH", *([user] if user else []), password)
    yield ("PING",)


def _ask(connection: socket.socket, command: tuple[str, ...], clock: _Clock) -> None:
    words = [word.encode() for word in command]
    parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)]
    connection.settimeout(clock.left_s())
    connection.sendall(b"".join(parts))
    answer = b""
    while not answer.endswith(b"\r\n") and len(answer) < 4096:
        connection.settimeout(clock.left_s())
        piece = connection.recv(4096)
        if not piece:
            raise ProbeError("the connection was closed")
        answer += piece
    if answer.startswith(b"-"):
        # The code alone: what follows may quote what was sent.
        code = re.match(rb"-([A-Z]+)", answer)
        raise ProbeError(f"refused with {code[1].decode() if code else 'an error'}")
    if not answer.startswith(b"+"):
        raise ProbeError("the answer is not that of a Redis server")
