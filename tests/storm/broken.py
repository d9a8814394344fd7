"""Builds that break the promise on purpose, each with the weather in which that shows: the proof that the storm sees.

A patch names text of the package that has to stand there once; where the code has moved on, the patch follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storm.builds import Patch
from storm.mix import Mix

# Without processes that start again: a second of every restart would show nothing.
QUIET_PROCESSES: Mapping[str, float] = {"kill": 0, "term": 0, "now": 0, "store-kill": 0}
# The store keeps its word and a sidecar's way to it is cut off: owners lose their lease and go on.
CUT_OFF = Mix(workers=32, pause_s=2.0, fault_s=3.0, short=0.0, tries=12).only(faults={"front-freeze": 1})


@dataclass(frozen=True, slots=True)
class Broken:
    """One broken build. `rules`: what the judge finds of it, at least one of these."""

    patches: tuple[Patch, ...]
    mix: Mix
    rules: frozenset[str]
    seed: int = 1


BROKEN: dict[str, Broken] = {
    "release-without-owner-check": Broken(
        (
            Patch(
                "lua/release.lua",
                "if not record.state or record.owner ~= ARGV[1] then return {'stale'} end",
                "if not record.state then return {'stale'} end",
            ),
        ),
        Mix(native_share=0, answer_s=0.7, pause_s=0.8, tries=12).only(
            faults={"front-deaf": 1}, fates={"accept": 70, "free": 30}, manners={"patient": 70, "hasty": 30}
        ),
        frozenset(("accepted-twice",)),
    ),
    "release-after-a-lost-answer": Broken(
        (
            Patch(
                "exchange.py",
                "lambda age_s: self._store.lose(flight.claim, seen=seen, ttl_s=flight.ttl_s, age_s=age_s)",
                "lambda _age_s: self._store.release(flight.claim)",
            ),
        ),
        Mix(native_share=0).biased(faults=QUIET_PROCESSES),
        frozenset(("accepted-twice",)),
    ),
    "reserve-in-two-steps": Broken(
        (
            Patch("lua/reserve.lua", "if not record then", "if not record or ARGV[16] == 'seize' then"),
            Patch("store.py", '"resend" if terms.resend else "hold",\n', "policy,\n"),
            Patch(
                "store.py",
                "        window = -1 if terms.window_s is None else _ms(terms.window_s)\n",
                "        window = -1 if terms.window_s is None else _ms(terms.window_s)\n"
                '        there = (await self._run(Line.ASKING, "show", claim, 0))[0] != b"absent"\n'
                '        policy = ("resend" if terms.resend else "hold") if there else "seize"\n',
            ),
        ),
        Mix(native_share=0, twins=5, answer_s=0.7).biased(faults={**QUIET_PROCESSES, "front-delay": 40}),
        frozenset(("accepted-twice",)),
    ),
    "refusal-without-owner-check": Broken(
        (Patch("lua/complete.lua", "if refusal then return {'stale'} end\nreturn complete()", "return complete()"),),
        CUT_OFF.only(
            fates={"refuse-slow": 50, "accept-late": 25, "accept-stall": 25}, manners={"patient": 70, "hasty": 30}
        ).biased(native_share=1),
        frozenset(("refusal-after-acceptance",)),
    ),
    "lease-over-is-free": Broken(
        (
            Patch(
                "lua/reserve.lua",
                "local record = read()\n",
                "local record = read()\n"
                "if record and record.state == 'outstanding' and since_change(record) > record.lease then"
                " record = nil end\n",
            ),
        ),
        Mix(native_share=0, pause_s=0.5, answer_s=0.75).biased(faults={"kill": 20, "stop": 20, "front-freeze": 20}),
        frozenset(("accepted-twice",)),
    ),
    "former-owner-overwrites": Broken(
        (
            Patch(
                "lua/complete.lua",
                "if record.state == 'completed' then",
                "if record.state == 'completed' and refusal then",
            ),
        ),
        CUT_OFF.only(
            fates={"accept": 70, "accept-reset": 15, "accept-late": 15}, manners={"patient": 70, "hasty": 30}
        ).biased(native_share=1, answer_s=0.7, returns=8),
        frozenset(("replay-changed",)),
    ),
    "replay-of-another-key": Broken(
        (Patch("store.py", 'f"{tag}:{claim.record}",', 'f"{tag}:{claim.record[:2]}",'),),
        Mix().biased(faults=QUIET_PROCESSES),
        frozenset(("replay-foreign", "invented")),
    ),
    "reply-to-another-command": Broken(
        (
            Patch(
                "link.py",
                "            self._fail(self._written, self.trouble, applied=None)\n"
                "            self._break(self.trouble)\n",
                "            late = deque(command for command in self._written if command.deadline <= now)\n"
                "            self._written = deque(command for command in self._written if command.deadline > now)\n"
                "            self._fail(late, self.trouble, applied=None)\n",
            ),
        ),
        Mix(pause_s=0.4).biased(faults={**QUIET_PROCESSES, "store-pause": 20, "front-delay": 40}),
        frozenset(("accepted-twice", "altered", "invented", "replay-foreign", "mailed-twice")),
    ),
    "refusal-settles-an-unknown": Broken(
        (Patch("lua/complete.lua", "if refusal and record.earlier then", "if false then"),),
        Mix()
        .only(fates={"accept-reset": 30, "accept-stall": 20, "refuse-unseen": 50}, faults={"front-cut": 1})
        .biased(native_share=1),
        frozenset(("refusal-after-acceptance",)),
    ),
    "sent-no-whatever-was-before": Broken(
        (
            Patch(
                "exchange.py",
                "free = not flight.claim.earlier_unknown and",
                "free = True or",
            ),
        ),
        Mix(pause_s=0.6)
        .only(fates={"accept-reset": 40, "accept-stall": 30, "accept": 30}, faults={"upstream-refuses": 1})
        .biased(native_share=1),
        frozenset(("sent-no",)),
    ),
}
