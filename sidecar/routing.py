"""Listener, Host, method and target lead to a route, to what goes upstream, and to the sends that may be meant.

Pure. Routes and `sends` are matched on a normalised copy of the path (`paths.py`); what is forwarded keeps its
bytes, but for the prefix of the route, which is taken off however it was spelt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.config import Address, Config, Route, Send
from sidecar.errors import Outcome, ProblemError
from sidecar.paths import SPECIAL, fold, join, normalise, readings

# Anything else in a target is either an attack on a parser behind us or a fragment, which no client sends
# (RFC 9112 section 3.2: the target is a URI reference without one).
SENDABLE = re.compile(rb"[!\"$-~]+")
# RFC 9112 section 3.2.2; the scheme in any case (RFC 3986 section 3.1).
ABSOLUTE = re.compile(rb"https?://([^/?@]+)([/?].*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request belongs.

    `target` goes upstream; `path` is the normalised copy without the route's prefix, for matching and the
    fingerprint; `query` is what follows the first `?`. `sends`: those whose method and path match, empty for a
    request that passes through.
    """

    route: Route
    target: bytes
    path: bytes
    query: bytes
    sends: tuple[Send, ...]


def discriminators(match: Match) -> frozenset[bytes]:
    """The names of query and form fields that tell the sends of a match apart; mostly none."""
    return frozenset(send.discriminator[0] for send in match.sends if send.discriminator)


def discriminated(match: Match, found: Mapping[bytes, bytes]) -> Send | None:
    """The send that is meant, given the values of `discriminators` that were found; None: none of them says so.

    Several values of one name are joined by commas: any of them counts, since servers take the first or the last.
    """
    for send in match.sends:
        if send.discriminator:
            name, value = send.discriminator
            if value in found.get(name, b"").split(b","):
                return send
    return next((send for send in match.sends if not send.discriminator), None)


class _Mount:
    """A route as it hangs at one prefix, given by its segments; none of them: the root."""

    def __init__(self, route: Route, prefix: str) -> None:
        self.route = route
        self.prefix = b"" if prefix == "/" else prefix.encode("ascii")
        self.depth = self.prefix.count(b"/")
        self.before = route.upstream.path.encode("ascii")


class _Sends:
    """The sends of one route, by method and path."""

    def __init__(self, sends: tuple[Send, ...]) -> None:
        self.templates = tuple(send for send in sends if None in send.segments)
        exact = {(send.method, self.path(send)) for send in sends if None not in send.segments}
        self.exact = {
            (method, path): (
                *(send for send in sends if send.method == method and self.path(send) == path),
                *self.parametrised(method, path),
            )
            for method, path in exact
        }

    @staticmethod
    def path(send: Send) -> bytes:
        return b"/" + b"/".join(segment or b"{}" for segment in send.segments)

    def parametrised(self, method: bytes, path: bytes) -> tuple[Send, ...]:
        segments = path[1:].split(b"/")
        return tuple(
            send
            for send in self.templates
            if send.method == method
            and len(send.segments) == len(segments)
            and all(
                bool(given) if wanted is None else wanted == given
                for wanted, given in zip(send.segments, segments, strict=True)
            )
        )

    def matching(self, method: bytes, path: bytes) -> tuple[Send, ...]:
        found = self.exact.get((method, path))
        if found is None and self.templates:
            found = self.parametrised(method, path)
        return found or ()


class Router:
    """All mounts of a configuration, prepared for one look-up per request."""

    def __init__(self, config: Config) -> None:
        """`config`: one whose mounts do not collide, as the reader sees to."""
        self._own = {address: _Mount(route, "/") for route in config.routes for address in route.listen}
        self._hosts = {route.host.encode("ascii"): _Mount(route, "/") for route in config.routes if route.host}
        mounts = (_Mount(route, route.path) for route in config.routes if route.path)
        self._paths = sorted(mounts, key=lambda mount: len(mount.prefix), reverse=True)
        self._sends = {route.name: _Sends(route.sends) for route in config.routes}

    def match(self, *, listener: Address | None, host: bytes | None, method: bytes, target: bytes) -> Match:
        """Find the route. `listener`: None for the main ones; `host`: the Host field; `target`: as it came.

        Raises: ProblemError `no-route` or `request-malformed`.
        """
        if method == b"CONNECT":
            raise _malformed("CONNECT asks for a tunnel, and there is none here.")
        if not SENDABLE.fullmatch(target):
            raise _malformed("The target holds a fragment, or bytes that are not visible ASCII.")
        if target == b"*":
            return self._asterisk(listener, host, method)
        if target[0] != 0x2F:  # /
            host, target = _origin_form(target)
        raw, mark, query = target.partition(b"?")
        path = _path(raw)
        mount = self._mount(listener, host, path)
        rest, path = _without_prefix(mount, raw, path)
        return Match(
            route=mount.route,
            target=mount.before + rest + mark + query,
            path=path,
            query=query,
            sends=self._matching(mount, method, rest, path),
        )

    def _asterisk(self, listener: Address | None, host: bytes | None, method: bytes) -> Match:
        # RFC 9112 section 3.2.4: the asterisk-form is only used for a server-wide OPTIONS.
        if method != b"OPTIONS":
            raise _malformed("The target * belongs to OPTIONS alone.")
        mount = self._mount(listener, host, b"/")
        return Match(mount.route, b"*", b"*", b"", ())

    def _mount(self, listener: Address | None, host: bytes | None, path: bytes) -> _Mount:
        if listener is not None and (own := self._own.get(listener)):
            return own
        if self._hosts and host is not None and (named := self._hosts.get(_host_name(host))):
            return named
        for mount in self._paths:
            prefix = mount.prefix
            if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                return mount
        raise ProblemError(
            Outcome.NO_ROUTE,
            "No route is mounted at this path or Host. Nothing was sent. "
            "`sidecar check` prints the routes; the base URL must hold the route's path.",
        )

    def _matching(self, mount: _Mount, method: bytes, rest: bytes, path: bytes) -> tuple[Send, ...]:
        sends = self._sends[mount.route.name]
        found = sends.matching(method, path)
        if found or not SPECIAL.search(rest):
            return found
        # We are stricter here than the normal form: the provider may read a spelling otherwise than we do. It reads
        # the upstream's own path with it, which dot segments may leave and enter again.
        before, whole = mount.before, mount.before + rest
        others = sorted({normalise(whole), *readings(whole)})
        inside = (other[len(before) :] for other in others if other.startswith(before + b"/"))
        return next((matching for other in inside if (matching := sends.matching(method, other))), ())


def _malformed(detail: str) -> ProblemError:
    return ProblemError(Outcome.REQUEST_MALFORMED, f"{detail} Nothing was sent.")


def _origin_form(target: bytes) -> tuple[bytes, bytes]:
    """Host and the rest of an absolute-form target.

    RFC 9112 section 3.2.2: "the server MUST ignore the received Host header field (if any) and instead use the
    host information of the request-target". It chooses a route; it is never where anything is sent.
    """
    match = ABSOLUTE.fullmatch(target)
    if match is None:
        raise _malformed("The target is neither a path nor a URL of http or https.")
    host, rest = match[1], match[2] or b"/"
    return host, rest if rest.startswith(b"/") else b"/" + rest


def _host_name(host: bytes) -> bytes:
    """The Host field without its port, in lower case."""
    name = host.strip().lower()
    if not name.startswith(b"["):
        name = name.partition(b":")[0]
    return name.rstrip(b".")


def _path(raw: bytes) -> bytes:
    return join(fold(raw)) if SPECIAL.search(raw) else raw


def _without_prefix(mount: _Mount, raw: bytes, path: bytes) -> tuple[bytes, bytes]:
    """What of the raw path goes upstream, and its normalised copy.

    The prefix ends where its last segment does in `raw`, whatever stood before and was folded away.
    """
    if not mount.depth:
        return raw, path
    normal = path[len(mount.prefix) :] or b"/"
    if raw is path:
        return normal, normal
    end = fold(raw)[mount.depth - 1][1]
    return raw[end:] or b"/", normal
