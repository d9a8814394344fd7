"""The judge on histories written by hand: each rule finds what it is for, and lets an honest sidecar pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sidecar.message import Answer, Fields
from storm.history import PROBLEM, Arrival, End, Fault, History, Left, Request, RouteRules
from storm.judge import judge

KEY = "hold-1"


class Written:
    """A history in the making. Times are seconds; each line comes a second after the one before."""

    def __init__(self) -> None:
        final = frozenset((400, 422))
        self.history = History(
            {
                "hold": RouteRules(False, final, frozenset((502, 504)), 10.0),
                "native": RouteRules(True, final, frozenset(range(500, 600)), 10.0),
            }
        )
        self.now_s = 100.0

    def tick(self) -> float:
        self.now_s += 1
        return self.now_s

    def arrive(self, key: str = KEY, *, digest: str = "content", whole: bool = True, sidecar: int = 0) -> Arrival:
        number = len(self.history.arrivals) + 1
        one = Arrival(number, key.partition("-")[0], key, sidecar, digest, self.tick(), whole)
        self.history.arrivals.append(one)
        return one

    def read(self, one: Arrival, *, accepted: bool = True, mailed: bool | None = None, **changes: Any) -> Request:
        made = Request(
            number=len(self.history.requests) + 1,
            route=one.route,
            key=one.key,
            native=one.key.encode(),
            arrival=one.number,
            begun_s=self.tick(),
            digest=one.digest,
            read_s=self.now_s,
            accepted_s=self.now_s if accepted else None,
            mailed=accepted if mailed is None else mailed,
        )
        made = replace(made, **changes)
        self.history.requests.append(made)
        return made

    def answer(self, request: Request, status: int = 200, fields: Fields = ()) -> Answer:
        number = ((b"Content-Type", b"application/json"), (b"X-Upstream", b"%d" % request.number))
        request.answer = Answer(status, b"Word", (*number, *fields), b'{"id": "mail-%d"}' % request.number)
        request.answered_s = self.tick()
        return request.answer

    def tell(self, one: Arrival, answer: Answer | None, end: End = End.ANSWERED) -> None:
        one.answer, one.end, one.ended_s = answer, end, self.tick()

    def sent(self, key: str = KEY, status: int = 200) -> Answer:
        """A mail that went as it should."""
        one = self.arrive(key)
        answer = self.answer(self.read(one, accepted=status < 300), status)
        self.tell(one, answer)
        return answer

    def fault(self, kind: str, target: int = 0, lasts_s: float = 1.0) -> None:
        begin_s = self.tick()
        self.now_s += lasts_s
        self.history.faults.append(Fault(kind, target, begin_s, self.now_s))

    def leave(self, state: str, key: str = KEY, **changes: Any) -> None:
        made = Left(key.partition("-")[0], key, state, state == "outstanding", True)
        self.history.left.append(replace(made, **changes))

    def found(self) -> set[str]:
        return {finding.rule for finding in judge(self.history, ended=True)}


def replay(answer: Answer) -> Answer:
    return replace(answer, fields=(*answer.fields, (b"Idempotent-Replayed", b"true")))


def problem(slug: str, status: int, sent: str) -> Answer:
    members = {"type": PROBLEM + slug, "status": status, "detail": "Text.", "sent": sent}
    fields = ((b"Content-Type", b"application/problem+json"),)
    return Answer(status, b"Word", fields, json.dumps(members).encode())


# What an honest sidecar may do.


def honest(run: Written) -> None:
    """A mail, its replay, and a key refused."""
    answer = run.sent()
    again = run.arrive()
    run.tell(again, replay(answer))
    run.leave("completed")
    refused = run.sent("hold-2", 422)
    run.tell(run.arrive("hold-2"), replay(refused))
    run.leave("completed", "hold-2")


def honest_retry_inside(run: Written) -> None:
    """Two attempts of the sidecar's own within one arrival: the client gets the second answer."""
    one = run.arrive("native-1")
    run.answer(run.read(one, mailed=True), 503)
    run.tell(one, run.answer(run.read(one, mailed=False)))
    run.leave("completed", "native-1")


def honest_unknown(run: Written) -> None:
    """The answer was lost: the key is unknown, and says so."""
    one = run.arrive()
    run.read(one)
    run.tell(one, problem("outcome-unknown", 504, "unknown"))
    run.tell(run.arrive(), problem("outcome-unknown", 504, "unknown"))
    run.leave("unknown", why="answer-lost")


def honest_unknown_of_a_killed_owner(run: Written) -> None:
    """Its owner was killed before anything was sent."""
    one = run.arrive()
    run.fault("kill")
    run.tell(one, None, End.CUT)
    run.leave("outstanding")


def honest_unknown_after_a_late_answer(run: Written) -> None:
    """The upstream answered when nobody listened any more."""
    one = run.arrive()
    request = run.read(one, begun_s=run.now_s - 9)
    run.answer(request, 503)
    run.tell(one, problem("outcome-unknown", 504, "unknown"))
    run.leave("unknown")


def honest_sent_no(run: Written) -> None:
    """The store was away: nothing is said about the key, which was accepted before."""
    run.sent()
    run.tell(run.arrive(), problem("store-unavailable", 503, "no"))
    run.tell(run.arrive(digest="other"), problem("key-reused", 422, "unknown"))
    run.leave("completed")


def honest_not_kept(run: Written) -> None:
    """An answer too large to keep is told by its status."""
    run.sent(status=200)
    run.tell(run.arrive(), problem("response-not-kept", 200, "unknown"))
    run.leave("completed")


def honest_leaving(run: Written) -> None:
    """Who uploads half a mail leaves no trace; who leaves later gets nothing and the mail goes on."""
    run.tell(run.arrive(whole=False), None, End.LEFT)
    one = run.arrive()
    run.tell(one, None, End.LEFT)
    run.answer(run.read(one))
    run.leave("completed")


@pytest.mark.parametrize(
    "write",
    [
        honest,
        honest_retry_inside,
        honest_unknown,
        honest_unknown_of_a_killed_owner,
        honest_unknown_after_a_late_answer,
        honest_sent_no,
        honest_not_kept,
        honest_leaving,
    ],
)
def test_honest_run_has_no_findings(write: Callable[[Written], None]) -> None:
    run = Written()
    write(run)
    assert judge(run.history, ended=True) == []


# What each rule finds.


def test_key_accepted_twice_under_hold_is_found() -> None:
    run = Written()
    run.sent()
    run.sent()
    assert run.found() >= {"accepted-twice"}


def test_native_key_may_be_accepted_twice_and_mailed_once() -> None:
    run = Written()
    first, second = run.arrive("native-1"), run.arrive("native-1")
    run.tell(first, run.answer(run.read(first)))
    request = run.read(second, mailed=False)
    run.tell(second, run.answer(request))
    run.leave("completed", "native-1")
    assert run.found() == set()
    request.mailed = True
    assert run.found() == {"mailed-twice"}


def test_success_without_an_acceptance_is_found() -> None:
    run = Written()
    one = run.arrive()
    run.tell(one, run.answer(run.read(one, accepted=False)))
    run.leave("completed")
    assert run.found() == {"invented"}


def test_success_for_other_content_is_found() -> None:
    run = Written()
    answer = run.sent()
    run.tell(run.arrive(digest="other"), replay(answer))
    run.leave("completed")
    assert run.found() == {"invented", "replay-foreign"}


@pytest.mark.parametrize("part", ["status", "reason", "fields", "content"])
def test_fresh_answer_that_was_changed_is_found(part: str) -> None:
    run = Written()
    one = run.arrive()
    answer = run.answer(run.read(one))
    changes: dict[str, Any] = {
        "status": 202,
        "reason": b"Other",
        "fields": (*answer.fields, (b"X-More", b"1")),
        "content": b"other",
    }
    run.tell(one, replace(answer, **{part: changes[part]}))
    run.leave("completed")
    assert run.found() == {"changed"}


def test_answer_that_was_given_to_another_arrival_is_found() -> None:
    run = Written()
    answer = run.sent()
    run.tell(run.arrive(), answer)
    run.leave("completed")
    assert run.found() == {"invented"}


def test_replays_that_differ_are_found() -> None:
    run = Written()
    one, two = run.arrive("native-1"), run.arrive("native-1")
    run.tell(one, run.answer(run.read(one)))
    run.tell(two, run.answer(run.read(two, mailed=False)))
    for request in run.history.requests:
        assert request.answer is not None
        run.tell(run.arrive("native-1"), replay(request.answer))
    run.leave("completed", "native-1")
    assert run.found() == {"replay-changed"}


def test_replay_of_another_keys_answer_is_found() -> None:
    run = Written()
    foreign = run.sent("hold-2")
    run.sent()
    run.tell(run.arrive(), replay(foreign))
    run.leave("completed")
    run.leave("completed", "hold-2")
    assert run.found() == {"replay-foreign"}


def test_replay_of_an_answer_that_settles_nothing_is_found() -> None:
    run = Written()
    run.tell(run.arrive(), replay(run.sent(status=503)))
    assert run.found() == {"replay-foreign"}


def test_refusal_replayed_after_an_acceptance_is_found() -> None:
    run = Written()
    lost, second = run.arrive("native-1"), run.arrive("native-1")
    run.read(lost)
    refusal = run.answer(run.read(second, accepted=False), 422)
    run.tell(second, refusal)
    run.leave("unknown", "native-1")
    assert run.found() == set()
    run.tell(run.arrive("native-1"), replay(refusal))
    assert run.found() == {"refusal-after-acceptance"}


def test_answer_not_kept_that_was_never_given_is_found() -> None:
    run = Written()
    run.sent(status=200)
    run.tell(run.arrive(), problem("response-not-kept", 202, "unknown"))
    run.leave("completed")
    assert run.found() == {"invented"}


@pytest.mark.parametrize("slug", ["store-unavailable", "upstream-unreachable", "internal-error"])
def test_sent_no_of_a_request_that_was_read_is_found(slug: str) -> None:
    run = Written()
    one = run.arrive()
    run.read(one, accepted=False)
    run.tell(one, problem(slug, 503, "no"))
    assert run.found() == {"sent-no"}


def test_sent_no_of_a_key_that_was_accepted_is_found() -> None:
    run = Written()
    lost = run.arrive("native-1")
    run.read(lost)
    run.tell(run.arrive("native-1"), problem("upstream-unreachable", 502, "no"))
    run.leave("unknown", "native-1")
    assert run.found() == {"sent-no"}


def test_request_of_half_an_upload_is_found() -> None:
    run = Written()
    run.read(run.arrive(whole=False), accepted=False)
    assert run.found() == {"not-whole"}


@pytest.mark.parametrize("changes", [{"key": "hold-2"}, {"digest": "other"}])
def test_request_that_is_not_what_was_sent_is_found(changes: dict[str, Any]) -> None:
    run = Written()
    run.read(run.arrive(), accepted=False, **changes)
    assert run.found() == {"altered"}


@pytest.mark.parametrize(("kind", "target", "rule"), [("kill", 0, set()), ("kill", 1, {"no-answer"})])
def test_client_left_without_an_answer_by_a_living_sidecar_is_found(kind: str, target: int, rule: set[str]) -> None:
    run = Written()
    one = run.arrive()
    run.fault(kind, target)
    run.tell(one, None, End.CUT)
    assert run.found() == rule


def test_unknown_that_nothing_explains_is_found() -> None:
    run = Written()
    one = run.arrive()
    run.answer(run.read(one, accepted=False), 503)
    run.leave("unknown")
    assert run.found() == {"needless-unknown"}


def test_record_that_is_not_listed_is_found() -> None:
    run = Written()
    run.sent()
    run.leave("completed", listed=False)
    assert run.found() == {"not-listed"}


def test_stuck_key_is_found() -> None:
    run = Written()
    run.history.stuck.append(KEY)
    run.leave("outstanding", "hold-2", lease_over=False)
    assert [finding.key for finding in judge(run.history, ended=True) if finding.rule == "stuck"] == [KEY, "hold-2"]


def test_forgotten_success_is_found() -> None:
    run = Written()
    run.sent()
    assert run.found() == {"forgotten"}


def test_key_that_was_replayed_and_is_sent_again_is_found() -> None:
    run = Written()
    answer = run.sent("native-1")
    run.tell(run.arrive("native-1"), replay(answer))
    again = run.arrive("native-1")
    run.tell(again, run.answer(run.read(again, mailed=False)))
    run.leave("completed", "native-1")
    assert run.found() == {"unsettled"}


def test_key_that_was_replayed_and_is_told_unknown_is_found() -> None:
    run = Written()
    answer = run.sent()
    meanwhile = run.arrive()
    run.tell(run.arrive(), replay(answer))
    run.tell(meanwhile, problem("outcome-unknown", 504, "unknown"))
    run.leave("completed")
    assert run.found() == set()
    run.tell(run.arrive(), problem("outcome-unknown", 504, "unknown"))
    assert run.found() == {"unsettled"}


@pytest.mark.parametrize(("kind", "rule"), [("front-cut", set()), ("upstream-drops", {"own-fault"})])
def test_exit_code_that_nothing_explains_is_found(kind: str, rule: set[str]) -> None:
    run = Written()
    run.fault(kind, 0 if kind == "front-cut" else -1)
    run.fault("term")
    run.history.faults[-1].code = 1
    assert run.found() == rule


def test_key_without_an_expiry_and_own_faults_are_found() -> None:
    run = Written()
    run.history.eternal.append("sidecar:{00}:x")
    run.history.faults_of_ours.append("exchange-failed")
    assert run.found() == {"eternal", "own-fault"}


def test_run_that_goes_on_is_not_judged_by_its_end() -> None:
    run = Written()
    run.sent()
    run.history.stuck.append(KEY)
    assert judge(run.history, ended=False) == []
