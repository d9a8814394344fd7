"""Where a store is, as its URL says: one server, the sentinels that know it, or nodes of a cluster. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import parse_qs, unquote

from sidecar.config import Address


class Kind(StrEnum):
    """Who says which server takes the writes: the URL, sentinels, or the cluster's own map."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Account:
    """Who we are to a server; both empty: we do not say."""

    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's URL, read.

    `hosts`: the server itself, the sentinels, or some nodes of the cluster. `name`: the primary's, at the sentinels;
    `asked`: the account there.
    """

    kind: Kind
    hosts: tuple[Address, ...]
    tls: bool = False
    account: Account = Account()
    asked: Account = Account()
    name: str = ""
    database: int = 0


PLAIN = "is not a store: write embedded:DIR, redis://host:port/0 or unix:///path/of/the.sock"
SENTINEL = "is not a store behind sentinels: write redis+sentinel://host:port,host:port/NAME or .../NAME/0"
CLUSTER = "is not a cluster: write redis+cluster://host:port,host:port; it has no database but 0"

_ACCOUNT = r"(?:(?P<user>[^:@/?#]*)(?::(?P<password>[^@/?#]*))?@)?"
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^:@/?#\[\],]+)(?::\d{1,5})?"
_HOSTS = rf"(?P<hosts>{_HOST}(?:,{_HOST})*)"
_DATABASE = r"(?:/(?P<database>\d*))?"

_SERVER_URL = re.compile(rf"//{_ACCOUNT}(?P<hosts>{_HOST}){_DATABASE}", re.ASCII)
_UNIX_URL = re.compile(rf"//{_ACCOUNT}(?P<path>/[^?#]+)(?:\?db=(?P<database>\d+))?", re.ASCII)
_SENTINEL_URL = re.compile(rf"//{_ACCOUNT}{_HOSTS}/(?P<name>[^/?#]+){_DATABASE}(?:\?(?P<query>[^#]*))?", re.ASCII)
_CLUSTER_URL = re.compile(rf"//{_ACCOUNT}{_HOSTS}(?:/0?)?", re.ASCII)

# What may stand behind the `?` of sentinels: their own account.
_SENTINEL_USER, _SENTINEL_PASSWORD = "sentinel_user", "sentinel_password"


def parse(url: str) -> StoreAddress:
    """A `store.url` that is not `embedded:`.

    Raises: ValueError with what to write instead; its text holds no part of the URL.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "unix":
        found = _match(_UNIX_URL, rest, PLAIN)
        path = Address(unix=unquote(found["path"]))
        return StoreAddress(Kind.SERVER, (path,), account=_account(found), database=_database(found))
    base, _, kind = scheme.partition("+")
    tls = base == "rediss"
    if base not in ("redis", "rediss") or kind not in _KINDS:
        raise ValueError(PLAIN)
    return _KINDS[kind](rest, tls)


def _server(rest: str, tls: bool) -> StoreAddress:
    found = _match(_SERVER_URL, rest, PLAIN)
    return StoreAddress(Kind.SERVER, _hosts(found["hosts"], 6379), tls, _account(found), database=_database(found))


def _cluster(rest: str, tls: bool) -> StoreAddress:
    found = _match(_CLUSTER_URL, rest, CLUSTER)
    return StoreAddress(Kind.CLUSTER, _hosts(found["hosts"], 6379), tls, _account(found))


def _sentinels(rest: str, tls: bool) -> StoreAddress:
    found = _match(_SENTINEL_URL, rest, SENTINEL)
    query = parse_qs(found["query"] or "", keep_blank_values=True)
    if query.keys() - {_SENTINEL_USER, _SENTINEL_PASSWORD} or any(len(values) > 1 for values in query.values()):
        raise ValueError(f"may have {_SENTINEL_USER}= and {_SENTINEL_PASSWORD}= behind its `?`, once each, and no more")
    asked = Account(query.get(_SENTINEL_USER, [""])[0], query.get(_SENTINEL_PASSWORD, [""])[0])
    return StoreAddress(
        Kind.SENTINEL,
        _hosts(found["hosts"], 26379),
        tls,
        _account(found),
        asked,
        unquote(found["name"]),
        _database(found),
    )


_KINDS: dict[str, Callable[[str, bool], StoreAddress]] = {
    "": _server,
    "sentinel": _sentinels,
    "cluster": _cluster,
}


def _match(pattern: re.Pattern[str], rest: str, otherwise: str) -> re.Match[str]:
    found = pattern.fullmatch(rest)
    if found is None:
        raise ValueError(otherwise)
    return found


def _account(found: re.Match[str]) -> Account:
    return Account(unquote(found["user"] or ""), unquote(found["password"] or ""))


def _database(found: re.Match[str]) -> int:
    return int(found["database"] or 0)


def _hosts(text: str, default: int) -> tuple[Address, ...]:
    return tuple(_host(part, default) for part in text.split(","))


def _host(text: str, default: int) -> Address:
    name, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, port = text, str(default)
    if not 1 <= int(port) <= 65535:
        raise ValueError("has a port out of range: write 1 to 65535")
    return Address(unquote(name).removeprefix("[").removesuffix("]"), int(port))
