"""The admin listener: health, metrics, totals, the page that explains our problems, and the records.

Only the records' pages ask the store.
"""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from sidecar.admin_records import RecordPages
from sidecar.errors import PROBLEMS, OperatorError, Outcome, Refusal
from sidecar.guard import Guard
from sidecar.metrics import Metrics
from sidecar.problem import TYPE

OPEN = ("/livez", "/readyz", "/metrics")
REFRESHED = ("/readyz", "/metrics", "/v1/stats")
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
    Outcome.OUTCOME_UNKNOWN: "The request left and no complete answer came: look for the mail in the provider's log,"
    " and settle the key with `sidecar keys resolve`.",
    Outcome.RESPONSE_NOT_KEPT: "The mail was accepted; its answer was too large to keep, or never came and the operator"
    " settled the key. Do not send again.",
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
        guard: Guard,
        records: RecordPages,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`guard`: who may ask for more than health and metrics. `records`: the pages at `/v1/records`.

        `refresh`, bounded in time: what must have been asked before readiness, metrics and totals are told.
        """
        self._metrics = metrics
        self._readiness = readiness
        self._stats = stats
        self._guard = guard
        self._records = records
        self._refresh = refresh
        self._pages: dict[str, Callable[[], web.Response]] = {
            "/livez": lambda: _json({"live": True}),
            "/readyz": self._ready,
            "/metrics": self._scrape,
            "/v1/stats": lambda: _json(self._stats()),
            "/problems": lambda: web.Response(text=problems_page(), content_type="text/html"),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request."""
        try:
            return await self._answer(request)
        except OperatorError as exc:
            return _refused(exc)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        path = request.path
        if path == "/v1/records" or path.startswith("/v1/records/"):
            return _json(await self._records.handle(request))
        page = self._pages.get(path)
        if page is None:
            raise OperatorError(Refusal.PAGE_ABSENT, "There is nothing here.")
        if path not in OPEN:
            self._guard.admit(request)
        if request.method not in ("GET", "HEAD"):
            raise OperatorError(Refusal.METHOD_REFUSED, "Only GET is served here.")
        if self._refresh is not None and path in REFRESHED:
            await self._refresh()
        return page()

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


def _refused(refusal: OperatorError) -> web.Response:
    """RFC 9457, with a slug of the admin interface's own."""
    members = {
        "type": TYPE + refusal.slug,
        "title": refusal.title,
        "status": refusal.status,
        "detail": refusal.detail,
    }
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    if refusal.slug is Refusal.TOKEN_MISSING:
        # RFC 9110 section 11.6.1: a 401 says which scheme would do.
        headers["WWW-Authenticate"] = "Bearer"
    text = json.dumps(members) + "\n"
    return web.Response(text=text, status=refusal.status, content_type="application/problem+json", headers=headers)


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
