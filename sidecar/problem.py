"""Renders one problem for the clients of one route: RFC 9457, or the form their SDK can read."""

from __future__ import annotations

import json
import math
from http import HTTPStatus

from sidecar.config import Route, Shape
from sidecar.errors import ProblemError
from sidecar.message import Answer, Field

# A name for each kind of problem. A URN, since no address would be true for every installation; the Link field
# leads to the page the admin listener serves.
TYPE = "urn:email-idempotency-sidecar:problem:"


def render(problem: ProblemError, route: Route | None, help_url: str = "") -> Answer:
    """The whole answer for a problem, Content-Length excepted. `help_url`: where `#slug` is explained, or empty."""
    status, name = _provider_words(problem, route)
    members: dict[str, object] = {
        "type": TYPE + problem.slug,
        "title": problem.title,
        "status": status,
        "detail": problem.detail,
        "sent": str(problem.sent),
        "retryable": problem.retryable,
    }
    content_type = b"application/problem+json"
    if route is not None and route.problems is Shape.RESEND:
        # Resend's SDKs read `name`, `statusCode` and `message`, and nothing but application/json.
        members |= {"name": name, "statusCode": status, "message": problem.detail}
        content_type = b"application/json"
    fields: list[Field] = [(b"Content-Type", content_type)]
    if problem.retry_after_s is not None:
        fields.append((b"Retry-After", b"%d" % max(1, math.ceil(problem.retry_after_s))))
    if problem.proxy_status is not None:
        # RFC 9209 section 2: the name of the intermediary, and what failed.
        fields.append((b"Proxy-Status", b"email-idempotency-sidecar; error=" + problem.proxy_status.encode("ascii")))
    if help_url:
        fields.append((b"Link", b'<%b#%b>; rel="help"' % (help_url.encode("ascii"), problem.slug.encode("ascii"))))
    content = json.dumps(members, ensure_ascii=True).encode("ascii")
    return Answer(status, reason(status), tuple(fields), content)


def _provider_words(problem: ProblemError, route: Route | None) -> tuple[int, str]:
    """Status and name of this event as the provider has them, where it has words of its own."""
    if route is not None:
        for slug, status, name in route.names.names:
            if slug == problem.slug:
                return status, name
    return problem.status, problem.slug.replace("-", "_")


def reason(status: int) -> bytes:
    """The reason phrase of a status; that of its class where it has none."""
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b"OK" if 200 <= status < 300 else b"Error"
