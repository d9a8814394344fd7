"""The admin listener: health, metrics, totals and the page that explains our problems. It never asks the store."""

from __future__ import annotations

import hmac
import html
import json
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from sidecar.errors import PROBLEMS, Outcome
from sidecar.metrics import Metrics

OPEN = ("/livez", "/readyz", "/metrics")
# What an operator or a client should do about each problem; `sent` stands in the table.
ADVICE = {
    Outcome.NO_ROUTE: "No route is mounted at this path, host or listener. `sidecar check` prints the routes.",
    Outcome.REQUEST_MALFORMED: "The request breaks a rule of HTTP or a limit; the detail says which.",
    Outcome.KEY_MISSING: "Send an idempotency key; this route refuses sends without one.",
    Outcome.KEY_MALFORMED: "One key line, printable ASCII, within the route's limit, quotes closed.",
    Outcome.KEY_REUSED: "The key belongs to another request. Use one key per mail.",
    Outcome.REQUEST_OUTSTANDING: "The first request under the key still runs. Repeat it after Retry-After.",
    Outcome.CONTENT_TOO_LARGE: "Raise limits.request, or send less.",
    Outcome.STORE_UNAVAILABLE: "The store is away, so nothing was sent. /readyz says why; repeat later.",
    Outcome.OVERLOADED: "limits.outstanding or limits.memory is reached. Repeat later.",
    Outcome.DRAINING: "This sidecar shuts down. Repeat at another one, or later.",
    Outcome.UPSTREAM_UNREACHABLE: "Not a byte left; the key is free. Repeat.",
    Outcome.OUTCOME_UNKNOWN: "The request left and no complete answer came: look in the provider's log for the mail.",
    Outcome.RESPONSE_NOT_KEPT: "The provider answered; its content was too large to keep. Do not send again.",
    Outcome.INTERNAL_ERROR: "A fault of the sidecar before anything was sent. Repeat, and report it.",
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this sidecar should get requests, and what to know beside it."""

    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    unprotected_share: float | None


class Admin:
    """Answers the admin listener's requests."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        readiness: Callable[[], Readiness],
        stats: Callable[[], dict[str, object]],
        token: str,
        everywhere: bool,
    ) -> None:
        """`everywhere`: it can be reached from beyond this host, so that without a token only health is served."""
        self._metrics = metrics
        self._readiness = readiness
        self._stats = stats
        self._token = token
        self._everywhere = everywhere
        self._pages: dict[str, Callable[[], web.Response]] = {
            "/livez": lambda: _json({"live": True}),
            "/readyz": self._ready,
            "/metrics": self._scrape,
            "/v1/stats": lambda: _json(self._stats()),
            "/problems": lambda: web.Response(text=problems_page(), content_type="text/html"),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request."""
        path = request.path
        page = self._pages.get(path)
        if page is None:
            return _json({"error": "there is no such page"}, 404)
        if path not in OPEN and (refusal := self._refusal(request)) is not None:
            return refusal
        if request.method not in ("GET", "HEAD"):
            return _json({"error": "only GET is served here"}, 405)
        return page()

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        if not self._token:
            if self._everywhere:
                return _json({"error": "set admin.token: this listener can be reached from beyond this host"}, 403)
            return None
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode()):
            return None
        return _json({"error": "Authorization: Bearer TOKEN is needed (admin.token)"}, 401)

    def _ready(self) -> web.Response:
        state = self._readiness()
        document = {
            "ready": not state.reasons,
            "reasons": list(state.reasons),
            "notes": list(state.notes),
            "unprotected_share": state.unprotected_share,
        }
        return _json(document, 503 if state.reasons else 200)

    def _scrape(self) -> web.Response:
        text = self._metrics.render()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", status=status, content_type="application/json")


def problems_page() -> str:
    """The page that the Link field of our problems leads to: one section a slug."""
    rows = []
    for slug, row in PROBLEMS.items():
        statuses = ", ".join(map(str, row.statuses)) or "as the first answer"
        sent = "depends on the record" if row.sent is None else str(row.sent)
        rows.append(
            f'<section id="{slug}"><h2>{slug}</h2><p>{html.escape(row.title)}. Status: {statuses}.'
            f" May a mail have left: {sent}.</p><p>{html.escape(ADVICE[slug])}</p></section>"
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Problems of the e-mail idempotency sidecar</title>'
        f"<h1>Problems</h1>{''.join(rows)}</html>\n"
    )
