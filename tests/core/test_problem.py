"""The problem table, and how a problem looks to the clients of a route."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sidecar.config import Origin, ProblemNames, Route, Shape
from sidecar.errors import PROBLEMS, Outcome, ProblemError, Sent
from sidecar.message import Answer, first
from sidecar.problem import reason, render

ROUTE = Route(name="mail", upstream=Origin("https", "api.example.com", 443), sends=())
RESEND = replace(
    ROUTE,
    problems=Shape.RESEND,
    names=ProblemNames((("key-reused", 409, "invalid_idempotent_request"),)),
)


def problem(slug: Outcome, **more: object) -> ProblemError:
    status = PROBLEMS[slug].statuses[0] if PROBLEMS[slug].statuses else 202
    return ProblemError(slug, "Do this next.", status=status, sent=Sent.UNKNOWN, **more)  # type: ignore[arg-type]


def members(answer: Answer) -> dict[str, object]:
    document = json.loads(answer.content)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("slug", PROBLEMS)
def test_every_problem_has_the_members_of_rfc_9457_and_our_two(slug: Outcome) -> None:
    answer = render(problem(slug), ROUTE)
    document = members(answer)
    assert document["type"] == f"urn:email-idempotency-sidecar:problem:{slug}"
    assert document["status"] == answer.status
    assert document["sent"] == "unknown"
    assert document["retryable"] is PROBLEMS[slug].retryable
    assert document["title"] == PROBLEMS[slug].title
    assert first(answer.fields, b"content-type") == b"application/problem+json"


@pytest.mark.parametrize(("status", "phrase"), [(504, b"Gateway Timeout"), (200, b"OK"), (299, b"OK"), (599, b"Error")])
def test_every_status_has_a_reason(status: int, phrase: bytes) -> None:
    assert reason(status) == phrase


def test_every_outcome_that_is_no_success_is_a_problem() -> None:
    fine = {Outcome.FORWARDED, Outcome.REPLAYED, Outcome.PASSED, Outcome.UNPROTECTED}
    assert set(PROBLEMS) == set(Outcome) - fine


def test_resend_gets_its_own_members_names_and_statuses() -> None:
    reused = render(problem(Outcome.KEY_REUSED), RESEND)
    assert (reused.status, members(reused)["name"]) == (409, "invalid_idempotent_request")
    unknown = members(render(problem(Outcome.OUTCOME_UNKNOWN), RESEND))
    assert (unknown["name"], unknown["statusCode"], unknown["message"]) == ("outcome_unknown", 504, "Do this next.")
    assert first(reused.fields, b"content-type") == b"application/json"


def test_fields_that_help_a_client() -> None:
    answer = render(
        problem(Outcome.STORE_UNAVAILABLE, retry_after_s=0.2, proxy_status="dns_error"),
        ROUTE,
        "http://localhost/problems",
    )
    assert first(answer.fields, b"retry-after") == b"1"
    assert first(answer.fields, b"proxy-status") == b"email-idempotency-sidecar; error=dns_error"
    assert first(answer.fields, b"link") == b'<http://localhost/problems#store-unavailable>; rel="help"'
    assert first(render(problem(Outcome.OVERLOADED, retry_after_s=4.2), ROUTE).fields, b"retry-after") == b"5"


def test_a_problem_whose_row_leaves_sent_open_must_be_told() -> None:
    with pytest.raises(ValueError, match="key-reused"):
        ProblemError(Outcome.KEY_REUSED, "x")
