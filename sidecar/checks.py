"""What contradicts what in a configuration that can be read: errors, and warnings for what is rarely meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from sidecar.config import (
    Address,
    Config,
    Native,
    Origin,
    Policy,
    Route,
    Twins,
    Unknown,
)
from sidecar.merge import Layers, sends_of
from sidecar.tree import Findings, Place

Where = Callable[[Place, str], None]


@dataclass(frozen=True, slots=True)
class Judged:
    """A route, and the layers it was made of."""

    route: Route
    layers: Layers


def duration(seconds: float) -> str:
    """A duration as it is written in a configuration."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length and seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{round(seconds * 1000)}ms"


def is_loopback(host: str) -> bool:
    """Whether a host, as it is written, is surely this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check(config: Config, judged: Iterable[Judged], top: Layers, findings: Findings) -> list[str]:
    """Collect every contradiction in `findings`; answers the warnings, each with its place."""
    warnings: dict[str, None] = {}

    def warn(place: Place, message: str) -> None:
        warnings[str(findings.finding(place, message))] = None

    judged = list(judged)
    for each in judged:
        _policies(each, config, findings, warn)
        _route(each, warn)
    _mounts(judged, findings)
    _listeners(config, judged, top, findings)
    _admin(config, top, warn)
    _store(config, top, findings, warn)
    return list(warnings)


def _policies(judged: Judged, config: Config, findings: Findings, warn: Where) -> None:
    route = judged.route
    told: list[tuple[Layers, Policy, str]] = [(judged.layers, route.policy, f"route `{route.name}`")]
    for (layers, entry), send in zip(sends_of(judged.layers), route.sends, strict=True):
        if entry.own:
            told.append((layers, send.policy, f"route `{route.name}`, `{send.text}`"))
    said: set[tuple[Place, str]] = set()
    for layers, policy, who in told:
        _times(layers, route, policy, config, findings)
        _resending(layers, route, policy, findings)
        odd = set(_odd(layers, route, policy)) - said  # what is inherited has been said of the route
        said |= odd
        for place, message in sorted(odd):
            warn(place, f"{who}: {message}")


def _times(layers: Layers, route: Route, policy: Policy, config: Config, findings: Findings) -> None:
    exchange = ("lease", "timeout.connect", "timeout.total", "retry.attempts")
    each_s = route.timeout.connect_s + route.timeout.total_s
    longest_s = policy.lease_s + each_s * policy.retry.attempts
    if policy.ttl_s <= longest_s and not layers.broken("ttl", *exchange):
        findings.add(
            layers.where("ttl", *exchange),
            f"`ttl` ({duration(policy.ttl_s)}) must be longer than `lease` + `retry.attempts` times "
            f"(`timeout.connect` + `timeout.total`), {duration(longest_s)}, or a record may end before its request",
        )
    least_s = round(3 * config.store.timeout_s, 6)  # floats: three times 0.4 is more than 1.2
    if policy.lease_s < least_s and not layers.broken("lease"):
        findings.add(
            layers.where("lease"),
            f"`lease` ({duration(policy.lease_s)}) must be at least three times `store.timeout` "
            f"({duration(least_s)}), or it may end while it is being renewed",
        )
    if policy.hold_for_s < policy.ttl_s and not layers.broken("hold_for", "ttl"):
        findings.add(
            layers.where("hold_for", "ttl"),
            f"`hold_for` ({duration(policy.hold_for_s)}) must be at least `ttl` ({duration(policy.ttl_s)})",
        )


def _resending(layers: Layers, route: Route, policy: Policy, findings: Findings) -> None:
    native = route.native
    if policy.unknown is not Unknown.RESEND or native is None or native.twins is Twins.GUARDED:
        return
    if layers.broken("resend_after", "timeout.total", "native.twins", "unknown"):
        return
    if policy.resend_after_s < route.timeout.total_s:
        findings.add(
            layers.where("resend_after", "unknown"),
            f"`unknown: resend` at a provider that does not guard twins needs `resend_after` of at least "
            f"`timeout.total` ({duration(route.timeout.total_s)}), or the first request may still be on its way",
        )


def _odd(layers: Layers, route: Route, policy: Policy) -> Iterator[tuple[Place, str]]:
    native = route.native
    resend = policy.unknown is Unknown.RESEND
    if resend and native is None and not layers.broken("native"):
        yield (
            layers.where("unknown"),
            "`unknown: resend` without `native` is at-least-once: for mail that is worse lost than doubled",
        )
    if policy.resend_after_s and not resend:
        yield layers.where("resend_after"), "`resend_after` has no effect without `unknown: resend`"
    if native and policy.ttl_s < native.window_s:
        yield (
            layers.where("ttl"),
            (
                f"`ttl` ({duration(policy.ttl_s)}) is shorter than `native.window` ({duration(native.window_s)}): "
                "between the two a key sends nothing, the provider replays its own old answer"
            ),
        )
    if policy.retry.attempts > 1 and not _guarded(native):
        yield (
            layers.where("retry.attempts"),
            "without `native: {twins: guarded}` only what was surely not sent is repeated by `retry`",
        )


def _guarded(native: Native | None) -> bool:
    return native is not None and native.twins is Twins.GUARDED


def _route(judged: Judged, warn: Where) -> None:
    route, layers = judged.route, judged.layers
    who = f"route `{route.name}`"
    if "credential" not in route.scope:
        warn(
            layers.where("scope"),
            f"{who}: a `scope` without `credential` gives replays to whoever knows key and content",
        )
    if route.upstream.scheme == "http" and not is_loopback(route.upstream.host):
        warn(
            layers.where("upstream"),
            f"{who}: credentials and mails travel to the upstream in clear text: write https://",
        )


def _mounts(judged: list[Judged], findings: Findings) -> None:
    """No two routes answer at one path, one Host or one listener."""
    paths: dict[str, str] = {}
    hosts: dict[str, str] = {}
    for each in judged:
        route, layers = each.route, each.layers
        if other := paths.get(route.path):
            findings.add(layers.where("path"), f"`path: {route.path}` is that of route `{other}` already")
        if route.host and (other := hosts.get(route.host)):
            findings.add(layers.where("host"), f"`host: {route.host}` is that of route `{other}` already")
        paths.setdefault(route.path, route.name)
        hosts.setdefault(route.host, route.name)
        _sends(each, findings)


def _sends(judged: Judged, findings: Findings) -> None:
    seen: set[tuple[object, ...]] = set()
    for send in judged.route.sends:
        same = (send.method, send.segments, send.discriminator)
        if same in seen:
            message = f"`sends` holds `{send.text}` twice: keep one"
            findings.add(judged.layers.where("sends"), message)
        seen.add(same)


def _listeners(config: Config, judged: list[Judged], top: Layers, findings: Findings) -> None:
    """No address is listened at twice, and none is an upstream."""
    told: list[tuple[Place, Address, str]] = [
        *((top.where("listen"), address, "`listen`") for address in config.listen),
        *((top.where("admin.listen"), address, "`admin.listen`") for address in config.admin.listen),
        *(
            (each.layers.where("listen"), address, f"route `{each.route.name}`")
            for each in judged
            for address in each.route.listen
        ),
    ]
    for index, (place, address, _) in enumerate(told):
        for _, other, who in told[:index]:
            if overlap(address, other):
                findings.add(place, f"`{address}` is taken by {who} already: choose another port")
                break
    for each in judged:
        if any(_leads_to(each.route.upstream, address) for _, address, _ in told):
            findings.add(each.layers.where("upstream"), "`upstream` is a listener of the sidecar itself")


def overlap(one: Address, other: Address) -> bool:
    """Whether both cannot be listened at."""
    if one.unix or other.unix:
        return one.unix == other.unix
    if one.port != other.port or one.port == 0:
        return False
    hosts = {one.host, other.host}
    return len(hosts) == 1 or bool(hosts & WILDCARDS) or all(map(is_local_name, hosts))


WILDCARDS = frozenset(("0.0.0.0", "::"))  # noqa: S104


def is_local_name(host: str) -> bool:
    """`localhost`, or one of the two addresses it stands for."""
    return host in ("localhost", "127.0.0.1", "::1")


def _leads_to(upstream: Origin, address: Address) -> bool:
    if address.unix or upstream.port != address.port:
        return False
    if upstream.host == address.host:
        return True
    here = address.host in WILDCARDS or is_loopback(address.host)
    return here and (is_loopback(upstream.host) or upstream.host in WILDCARDS)


def _admin(config: Config, top: Layers, warn: Where) -> None:
    open_to_others = any(not address.unix and not is_loopback(address.host) for address in config.admin.listen)
    if open_to_others and not config.admin.token and not top.broken("admin.token"):
        warn(
            top.where("admin.listen"),
            "`admin.listen` is not on loopback and `admin.token` is empty: "
            "only /livez, /readyz and /metrics are served there",
        )


def _store(config: Config, top: Layers, findings: Findings, warn: Where) -> None:
    store = config.store
    if top.broken("store.url"):
        return
    if store.replicas and store.url.startswith("embedded:"):
        findings.add(
            top.where("store.replicas"),
            "`store.replicas`: the embedded store has no replicas, so nothing could be reserved: leave it at 0",
        )
    if store.ca and not store.url.startswith("rediss"):
        warn(top.where("store.ca"), "`store.ca` has no effect without rediss://")


def grace_s(config: Config) -> float:
    """How long whoever stops the sidecar must wait: the drain, the longest exchange, and some seconds to write."""
    longest_s = max((route.timeout.total_s for route in config.routes), default=0.0)
    return config.drain_s + longest_s + 5.0
