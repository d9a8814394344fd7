"""What must be true of a run, one rule a function: pure, from the logs alone.

A rule may be asked about a run that still goes on, but for those of `AT_THE_END`. It never guesses: where the logs
leave room for an honest sidecar, there is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from storm.history import Arrival, End, Fault, History, Indexed, Request, accepted, number_of, substance

# What nobody is told of a key whose answer is recorded.
NOT_SETTLED = ("outcome-unknown", "upstream-unreachable", "internal-error")
# These have not read the key's record: their `sent: no` is of that one request alone.
OF_THE_REQUEST = ("no-route", "content-too-large", "store-unavailable", "overloaded", "draining", "request-malformed")
# An answer that took this part of `timeout.total` may have come too late for the sidecar.
LATE = 0.6


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `key` is empty where it is not about one."""

    rule: str
    key: str
    text: str


Rule = Callable[[Indexed], Iterator[Finding]]


def one_acceptance_under_hold(run: Indexed) -> Iterator[Finding]:
    """No key is accepted twice where the provider has no key of its own."""
    for key, requests in run.by_key.items():
        found = accepted(requests)
        if len(found) > 1 and not run.history.rules[found[0].route].native:
            yield Finding("accepted-twice", key, f"requests {_numbers(found)} were accepted")


def one_mail_under_a_native_key(run: Indexed) -> Iterator[Finding]:
    """No key is mailed twice, however its clients spelt it and whatever the provider remembers."""
    for key, requests in run.by_key.items():
        found = [one for one in requests if one.mailed]
        if len(found) > 1 and run.history.rules[found[0].route].native:
            yield Finding("mailed-twice", key, f"requests {_numbers(found)} made a mail each")


def every_success_was_accepted(run: Indexed) -> Iterator[Finding]:
    """A 2xx is never invented, and never given for other content."""
    for one in run.ended:
        found = [
            request
            for request in accepted(run.by_key.get(one.key, []))
            if request.digest == one.digest and (request.accepted_s or 0) <= (one.ended_s or 0)
        ]
        if one.success and not found:
            yield Finding("invented", one.key, f"arrival {one.number} got a 2xx and nothing like it was accepted")


def fresh_answers_are_the_upstreams(run: Indexed) -> Iterator[Finding]:
    """An answer that is no replay and no problem is the one the upstream gave to this very arrival, unchanged."""
    for one in run.ended:
        if one.replayed or one.slug or one.answer is None:
            continue
        mine = run.by_arrival.get(one.number, [])
        answer = mine[-1].answer if mine else None
        if answer is None:
            yield Finding("invented", one.key, f"arrival {one.number} has an answer the upstream did not give it")
        elif substance(answer) != substance(one.answer):
            yield Finding("changed", one.key, f"arrival {one.number}: {one.answer} instead of {answer}")


def replays_are_the_first_answer(run: Indexed) -> Iterator[Finding]:
    """All replays of a key are one final answer that the upstream gave to a request with this key and content."""
    firsts: dict[str, Arrival] = {}
    for one in run.ended:
        if not one.replayed or one.answer is None:
            continue
        before = firsts.setdefault(one.key, one)
        if before.answer is not None and substance(before.answer) != substance(one.answer):
            yield Finding("replay-changed", one.key, f"arrivals {before.number} and {one.number} differ")
        text = _foreign(run, one)
        if text:
            yield Finding("replay-foreign", one.key, f"arrival {one.number}: {text}")


def _foreign(run: Indexed, one: Arrival) -> str:
    """Why a replay is not an answer of this key's; empty where it is."""
    request = run.by_number.get(one.upstream or 0)
    assert one.answer is not None
    if request is None or request.key != one.key:
        return "its answer belongs to another key"
    if request.answer is None or substance(request.answer) != substance(one.answer):
        return f"request {request.number} was answered otherwise"
    if request.digest != one.digest:
        return f"request {request.number} had other content"
    if not _final(run, request, one.answer.status):
        return f"status {one.answer.status} settles nothing"
    return ""


def _final(run: Indexed, request: Request, status: int) -> bool:
    return 200 <= status < 300 or status in run.history.rules[request.route].final


def answers_not_kept_were_given(run: Indexed) -> Iterator[Finding]:
    """`response-not-kept` has the status of an answer that this key really got."""
    for one in run.ended:
        if one.slug != "response-not-kept" or one.answer is None:
            continue
        given = {request.answer.status for request in run.by_key.get(one.key, []) if request.answer is not None}
        if one.answer.status not in given:
            yield Finding("invented", one.key, f"arrival {one.number}: nothing was answered {one.answer.status}")


def no_refusal_is_replayed_after_an_acceptance(run: Indexed) -> Iterator[Finding]:
    """Who repeats a key that was accepted is never told that it was refused."""
    for one in run.ended:
        if one.replayed and not one.success:
            found = [it for it in accepted(run.by_key.get(one.key, [])) if (it.accepted_s or 0) <= (one.ended_s or 0)]
            if found:
                yield Finding("refusal-after-acceptance", one.key, f"arrival {one.number}, request {_numbers(found)}")


def sent_no_is_true(run: Indexed) -> Iterator[Finding]:
    """`sent: no` is never said of a request that was read whole, nor, where the record was read, of such a key."""
    for one in run.ended:
        if one.problem.get("sent") != "no":
            continue
        mine = [it for it in run.by_arrival.get(one.number, []) if it.read_s is not None]
        # A refusal whose content was too large to keep was read, of course.
        if mine and one.slug != "response-not-kept":
            yield Finding("sent-no", one.key, f"arrival {one.number} ({one.slug}) was read as request {_numbers(mine)}")
        if one.slug in OF_THE_REQUEST:
            continue
        before = [it for it in accepted(run.by_key.get(one.key, [])) if (it.read_s or 0) < one.sent_s]
        if before:
            yield Finding("sent-no", one.key, f"arrival {one.number} ({one.slug}) after request {_numbers(before)}")


def requests_are_as_they_were_sent(run: Indexed) -> Iterator[Finding]:
    """Nothing goes upstream that a client did not send whole, nor with another key or content."""
    arrivals = {one.number: one for one in run.arrivals}
    for request in run.requests:
        one = arrivals.get(request.arrival)
        if one is None or not one.whole:
            yield Finding("not-whole", request.key, f"request {request.number} of an arrival that was not sent whole")
        elif (one.route, one.key) != (request.route, request.key) or request.digest not in ("", one.digest):
            yield Finding("altered", request.key, f"request {request.number} is not what arrival {one.number} sent")


def clients_that_stay_are_answered(run: Indexed) -> Iterator[Finding]:
    """A connection ends without an answer only where its sidecar was ended, stopped or told to stop meanwhile."""
    for one in run.arrivals:
        if one.end not in (End.CUT, End.UNANSWERED):
            continue
        if not any(fault.kind in ("kill", "stop", "doze", "now", "term") for fault in _its_faults(run, one, 0.1)):
            yield Finding("no-answer", one.key, f"arrival {one.number} stayed and was not answered ({one.end})")


def settled_keys_stay_settled(run: Indexed) -> Iterator[Finding]:
    """Once a key's answer was replayed, no later arrival is sent upstream, or told that nobody knows."""
    since_s: dict[str, float] = {}
    for one in run.ended:
        if one.replayed and one.ended_s is not None:
            since_s[one.key] = min(one.ended_s, since_s.get(one.key, one.ended_s))
    for one in run.ended:
        fresh = not one.replayed and not one.slug
        if one.sent_s > since_s.get(one.key, float("inf")) and (fresh or one.slug in NOT_SETTLED):
            yield Finding("unsettled", one.key, f"arrival {one.number} ({one.slug or 'fresh'}) after a replay")


def _its_faults(run: Indexed, one: Arrival, grace_s: float) -> Iterator[Fault]:
    """The faults of its sidecar while an arrival was there, and for a while longer."""
    end_s = (one.sent_s if one.ended_s is None else one.ended_s) + grace_s
    return (it for it in run.history.faults if it.target == one.sidecar and it.during(one.sent_s, end_s))


# What can be told only once everything is quiet.


def nothing_is_stuck(run: Indexed) -> Iterator[Finding]:
    """At the end each key is settled or unknown."""
    for key in run.history.stuck:
        yield Finding("stuck", key, "neither a final answer nor `outcome-unknown` at the end")
    for record in run.history.left:
        if record.state == "outstanding" and not record.lease_over:
            yield Finding("stuck", record.key, "its record is outstanding at the end, with its lease alive")


def unknowns_have_a_reason(run: Indexed) -> Iterator[Finding]:
    """Each unknown record is listed, and belongs to a mail that may have left or an owner that was ended."""
    for record in run.history.left:
        if not record.listed:
            yield Finding("not-listed", record.key, f"its record ({record.state}) is not in the list of its state")
        # Two attempts that both know that nothing was accepted leave an unknown: the first one is no owner any more.
        explained = record.attempt > 1 or _may_have_left(run, record.key) or _owner_was_ended(run, record.key)
        if record.open and not explained:
            yield Finding("needless-unknown", record.key, f"nothing may have left and its owners live ({record.why})")


def _may_have_left(run: Indexed, key: str) -> bool:
    return any(_doubtful(run, request) for request in run.by_key.get(key, []))


def _doubtful(run: Indexed, request: Request) -> bool:
    """Whether the sidecar may honestly not know how this request ended."""
    rules = run.history.rules[request.route]
    if request.answer is None or request.answered_s is None or request.answer.status in rules.lost:
        return True
    return request.answered_s - request.begun_s > LATE * rules.total_s


def _owner_was_ended(run: Indexed, key: str) -> bool:
    """Whether a sidecar was ended or stopped, or the upstream dropped connections unread, while it had this key."""
    for one in run.arrivals_of.get(key, []):
        if any(fault.ends_an_owner for fault in _its_faults(run, one, run.history.grace_s)):
            return True
        end_s = one.sent_s if one.ended_s is None else one.ended_s
        unread = (fault for fault in run.history.faults if fault.kind.startswith("upstream-"))
        if any(fault.during(one.sent_s, end_s + run.history.grace_s) for fault in unread):
            return True
    return False


def successes_stay(run: Indexed) -> Iterator[Finding]:
    """A record that is completed at the end is one the upstream answered; a key told 2xx is never without a record."""
    state = {record.key: record.state for record in run.history.left}
    for one in run.ended:
        if one.success and one.key not in state:
            yield Finding("forgotten", one.key, f"arrival {one.number} got a 2xx and there is no record at the end")


def every_key_of_the_store_expires(run: Indexed) -> Iterator[Finding]:
    """No key without an expiry, ever."""
    for name in run.history.eternal:
        yield Finding("eternal", "", f"{name} has no expiry")


def sidecars_have_no_faults(run: Indexed) -> Iterator[Finding]:
    """No exception nobody foresaw, no exit nobody asked for; exit code 1 only where the store could not be told."""
    for line in run.history.faults_of_ours:
        yield Finding("own-fault", "", line)
    for fault in run.history.faults:
        if fault.kind == "term" and fault.code == 1 and not _store_was_away(run, fault):
            yield Finding("own-fault", "", f"exit code 1 of sidecar {fault.target} at {fault.begin_s:.3f}: no reason")


def _store_was_away(run: Indexed, fault: Fault) -> bool:
    """Whether a sidecar that ended could not reach the store just before, or for some time meanwhile."""
    end_s = fault.begin_s + run.history.grace_s
    return any(
        it.kind.startswith(("store-", "front-"))
        and it.target in (-1, fault.target)
        and it.during(fault.begin_s - run.history.grace_s, end_s)
        for it in run.history.faults
    )


AT_ANY_TIME: tuple[Rule, ...] = (
    one_acceptance_under_hold,
    one_mail_under_a_native_key,
    every_success_was_accepted,
    fresh_answers_are_the_upstreams,
    replays_are_the_first_answer,
    answers_not_kept_were_given,
    no_refusal_is_replayed_after_an_acceptance,
    sent_no_is_true,
    requests_are_as_they_were_sent,
    clients_that_stay_are_answered,
    settled_keys_stay_settled,
)
AT_THE_END: tuple[Rule, ...] = (
    nothing_is_stuck,
    unknowns_have_a_reason,
    successes_stay,
    every_key_of_the_store_expires,
    sidecars_have_no_faults,
)


def judge(history: History, *, ended: bool) -> list[Finding]:
    """Every broken rule. `ended`: the run is over and everything was quiet before the store was read."""
    run = Indexed(history)
    rules = (*AT_ANY_TIME, *AT_THE_END) if ended else AT_ANY_TIME
    return [finding for rule in rules for finding in rule(run)]


def _numbers(requests: list[Request]) -> str:
    return ", ".join(str(one.number) for one in requests)


__all__ = ["Finding", "judge", "number_of"]
