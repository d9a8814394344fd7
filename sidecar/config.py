"""Every setting as a frozen value, and the only home of every default. Reads nothing; `reader.py` does.

Durations are float seconds named `..._s`, sizes integer bytes named `..._bytes`. In YAML the unit stands
in the value (`15s`, `64MiB`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MIB = 1024 * 1024
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

STATUSES_2XX = frozenset(range(200, 300))


class Unknown(StrEnum):
    """What a retry gets while nobody knows whether a mail left."""

    HOLD = "hold"
    RESEND = "resend"


class Concurrent(StrEnum):
    """What an arrival gets while the first request under its key is outstanding."""

    REJECT = "reject"
    WAIT = "wait"


class StoreUnavailable(StrEnum):
    """What a send gets while the store is away."""

    REJECT = "reject"
    FORWARD = "forward"


class Missing(StrEnum):
    """What a send without a key gets."""

    FORWARD = "forward"
    REJECT = "reject"


class RecordKey(StrEnum):
    """Whether the key's text is kept in its record, for the operator."""

    TEXT = "text"
    DIGEST = "digest"


class UpstreamHost(StrEnum):
    """Which Host field goes upstream: the upstream's own, or the client's."""

    ROUTE = "route"
    PRESERVE = "preserve"


class Twins(StrEnum):
    """Whether the provider refuses or joins a second request with its key while the first still works."""

    GUARDED = "guarded"
    UNGUARDED = "unguarded"


class Shape(StrEnum):
    """The form of our problems that the clients of a route can read."""

    PROBLEM_JSON = "problem+json"
    RESEND = "resend"


class LogLevel(StrEnum):
    """The least level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """`auto`: text on a terminal, JSON otherwise."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: `host` and `port`, or the path of a unix socket. `localhost` stands for both families."""

    host: str = ""
    port: int = 0
    unix: str = ""

    def __str__(self) -> str:
        """As it is written in the configuration."""
        if self.unix:
            return f"unix:{self.unix}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Origin:
    """An upstream: scheme, host and port, and a path put before every target (empty for most)."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def authority(self) -> bytes:
        """The Host field for this origin: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        own = {"http": 80, "https": 443}[self.scheme]
        return (host if self.port == own else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        """As it is written in the configuration."""
        return f"{self.scheme}://{self.authority.decode()}{self.path}"


@dataclass(frozen=True, slots=True)
class Log:
    """`log:`."""

    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.AUTO


@dataclass(frozen=True, slots=True)
class Limits:
    """`limits:`. `header_bytes` bounds the request line and all fields together."""

    request_bytes: int = 64 * MIB
    stored_response_bytes: int = 1 * MIB
    header_bytes: int = 64 * 1024
    outstanding: int = 10_000
    memory_bytes: int = 512 * MIB


@dataclass(frozen=True, slots=True)
class Admin:
    """`admin:`. No address: no admin listener."""

    listen: tuple[Address, ...] = (Address("localhost", 8026),)
    token: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """`store:`. `url`: see `address.py`, or `embedded:DIR`; `timeout_s` bounds one command, a repeat included."""

    url: str = "embedded:./data"
    prefix: str = "sidecar"
    timeout_s: float = 1.0
    replicas: int = 0
    strict: bool = False
    memory_bytes: int = 256 * MIB
    ca: str = ""


@dataclass(frozen=True, slots=True)
class Native:
    """The provider's own idempotency: its field, how long it remembers, how long a key may be, and twins."""

    field: str
    window_s: float
    max_length: int = 256
    twins: Twins = Twins.UNGUARDED


@dataclass(frozen=True, slots=True)
class KeyRules:
    """`key:`. `also`: further sources in order, a field name or, with a leading `/`, a JSON pointer."""

    field: str = "Idempotency-Key"
    also: tuple[str, ...] = ()
    max_length: int = 256
    missing: Missing = Missing.FORWARD
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FingerprintRules:
    """`fingerprint:`. `ignore`: JSON pointers (leading `/`) or names of form fields."""

    enabled: bool = True
    ignore: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    mismatch: int = 422


@dataclass(frozen=True, slots=True)
class Timeout:
    """`timeout:`. `receive_s`: the client's upload; `connect_s`: until the first byte; `total_s`: from that byte on."""

    receive_s: float = 60.0
    connect_s: float = 5.0
    total_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Retry:
    """`retry:`. `attempts`: how many in all; `backoff_s`: before the second, doubled for each further one."""

    attempts: int = 1
    backoff_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a route, or one entry of its `sends`, does with an answer, an unknown outcome and a twin."""

    ttl_s: float = DAY_S
    lease_s: float = 15.0
    final: frozenset[int] = STATUSES_2XX | {400, 422}
    lost: frozenset[int] = frozenset((502, 504, 520, 522, 524, 527))
    unknown: Unknown = Unknown.HOLD
    hold_for_s: float = 30 * DAY_S
    resend_after_s: float = 0.0
    store_unavailable: StoreUnavailable = StoreUnavailable.REJECT
    concurrent: Concurrent = Concurrent.REJECT
    wait_limit_s: float = 20.0
    retry: Retry = Retry()


@dataclass(frozen=True, slots=True)
class Send:
    """One thing that sends mail: a method and a path template, perhaps told apart by a form or query field.

    `segments`: the path's segments; None stands for any one segment (`{domain}`).
    """

    text: str
    method: bytes
    segments: tuple[bytes | None, ...]
    discriminator: tuple[bytes, bytes] | None
    policy: Policy


@dataclass(frozen=True, slots=True)
class ProblemNames:
    """The provider's own words for our events: slug -> (status, name)."""

    names: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One provider account as clients see it, with preset, `defaults:` and its own settings already merged."""

    name: str
    provider: str = "generic"
    path: str = ""
    host: str = ""
    listen: tuple[Address, ...] = ()
    upstream: Origin
    upstream_host: UpstreamHost = UpstreamHost.ROUTE
    sends: tuple[Send, ...]
    credential: tuple[str, ...] = ("Authorization",)
    native: Native | None = None
    key: KeyRules = KeyRules()
    record_key: RecordKey = RecordKey.TEXT
    scope: tuple[str, ...] = ("credential",)
    fingerprint: FingerprintRules = FingerprintRules()
    policy: Policy = Policy()
    timeout: Timeout = Timeout()
    upstream_keepalive_s: float = 15.0
    problems: Shape = Shape.PROBLEM_JSON
    names: ProblemNames = ProblemNames()
    ca: str = ""
    replay_field: str = "Idempotent-Replayed"
    accepted: int = 200
    price_per_1000: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration. `source`: the file it was read from; `warnings`: what `check` says beside it."""

    routes: tuple[Route, ...]
    listen: tuple[Address, ...] = (Address("localhost", 8025),)
    admin: Admin = Admin()
    store: Store = Store()
    workers: int = 1
    drain_s: float = 5.0
    log: Log = Log()
    limits: Limits = Limits()
    source: str = ""
    warnings: tuple[str, ...] = field(default=())
