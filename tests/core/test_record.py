"""What was found, and what to do about it: a row each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.config import Concurrent
from sidecar.errors import Outcome, Sent
from sidecar.message import Answer, Fields
from sidecar.record import (
    Completed,
    Forward,
    Found,
    Held,
    Later,
    Outstanding,
    Refuse,
    Replay,
    Reserved,
    Reused,
    Unreadable,
    Wait,
    decide,
    pack_fields,
    sent_of,
    unpack_fields,
)

DONE = Completed(Answer(200, b"OK", (), b""), True, b"")
OWNED = Reserved(1, False, b"", 1, 0, -1)


@pytest.mark.parametrize(
    ("found", "slug", "status", "sent", "retry_after_s"),
    [
        (Outstanding(4200), Outcome.REQUEST_OUTSTANDING, 409, Sent.UNKNOWN, 4.2),
        (Outstanding(3), Outcome.REQUEST_OUTSTANDING, 409, Sent.UNKNOWN, 1.0),
        (Later(30_000), Outcome.REQUEST_OUTSTANDING, 409, Sent.UNKNOWN, 30.0),
        (Held("owner-lost", ""), Outcome.OUTCOME_UNKNOWN, 504, Sent.UNKNOWN, None),
        (Held("answer-lost", "200"), Outcome.OUTCOME_UNKNOWN, 504, Sent.UNKNOWN, None),
        (Unreadable(), Outcome.OUTCOME_UNKNOWN, 504, Sent.UNKNOWN, None),
        (Reused(Sent.NO), Outcome.KEY_REUSED, 422, Sent.NO, None),
        (Reused(Sent.UNKNOWN), Outcome.KEY_REUSED, 422, Sent.UNKNOWN, None),
    ],
)
def test_what_is_refused(found: Found, slug: Outcome, status: int, sent: Sent, retry_after_s: float | None) -> None:
    decision = decide(found, concurrent=Concurrent.REJECT, mismatch_status=422)
    assert isinstance(decision, Refuse)
    problem = decision.problem
    assert (problem.slug, problem.status, problem.sent, problem.retry_after_s) == (slug, status, sent, retry_after_s)


def test_what_is_forwarded_and_replayed() -> None:
    assert decide(OWNED, concurrent=Concurrent.REJECT, mismatch_status=422) == Forward(OWNED)
    assert decide(DONE, concurrent=Concurrent.WAIT, mismatch_status=422) == Replay(DONE)


def test_only_an_outstanding_request_is_waited_for() -> None:
    assert isinstance(decide(Outstanding(1), concurrent=Concurrent.WAIT, mismatch_status=422), Wait)
    for found in (Later(1), Held("owner-lost", ""), Unreadable(), Reused(Sent.NO)):
        assert isinstance(decide(found, concurrent=Concurrent.WAIT, mismatch_status=422), Refuse)


def test_mismatch_has_the_status_the_route_says() -> None:
    decision = decide(Reused(Sent.NO), concurrent=Concurrent.REJECT, mismatch_status=409)
    assert isinstance(decision, Refuse)
    assert decision.problem.status == 409


@pytest.mark.parametrize(
    ("state", "status", "earlier", "sent"),
    [
        ("outstanding", "", False, Sent.UNKNOWN),
        ("unknown", "", False, Sent.UNKNOWN),
        ("completed", "200", False, Sent.UNKNOWN),
        ("completed", "422", False, Sent.NO),
        ("completed", "422", True, Sent.UNKNOWN),
    ],
)
def test_only_a_recorded_refusal_says_that_no_mail_left(state: str, status: str, earlier: bool, sent: Sent) -> None:
    assert sent_of(state, status, earlier) is sent


FIELD = st.tuples(
    st.from_regex(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+", fullmatch=True),
    st.binary(max_size=30).filter(lambda value: b"\r" not in value and b"\n" not in value),
)


@given(st.lists(FIELD, max_size=6).map(tuple))
def test_any_fields_come_back_from_a_record_as_they_were(fields: Fields) -> None:
    assert unpack_fields(pack_fields(fields)) == fields


def test_a_stored_line_that_is_no_field_is_told() -> None:
    with pytest.raises(ValueError, match="colon"):
        unpack_fields(b"nonsense\r\n")
