"""What the machine's stories are made of: times, terms, answers, and an attempt as both sides know it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from sidecar.message import Answer
from sidecar.store import Claim, Terms

# Time goes in steps of STEP_S, and no limit is a multiple of it: the few ms that a real step takes decide nothing.
STEP_S = 20
LEASE_S, HOLD_S, TTL_S, AFTER_S, QUIET_S = 70.0, 610.0, 310.0, 35.0, 35.0
TERMS = {
    "hold": Terms(resend=False, window_s=None, margin_s=50, resend_after_s=0, longest_s=40),
    "resend": Terms(resend=True, window_s=397, margin_s=50, resend_after_s=0, longest_s=40),
    "later": Terms(resend=True, window_s=397, margin_s=50, resend_after_s=AFTER_S, longest_s=40),
    "anyway": Terms(resend=True, window_s=None, margin_s=50, resend_after_s=0, longest_s=40),
}
NEAR_S = 4.0
OWNERS = 4

ANSWERS = (
    Answer(200, b"OK", ((b"X-A", b"caf\xe9"), (b"x-a", b"")), b'{"id":"1"}'),
    Answer(202, b"Accepted", (), b"\x00\xff"),
    Answer(422, b"Unprocessable", ((b"X-A", b"1"),), b"no"),
    Answer(400, b"Bad", (), b""),
)
answers = st.sampled_from(ANSWERS)
owners = st.integers(0, OWNERS - 1)


@dataclass(slots=True)
class Attempt:
    """One attempt. `asked`: the claim it reserves with; `real` and `told`: as it owns it, in real and in model time.

    `alive_until_s`: until when it may write its first byte, as its own clock shows it. `ended`: its last word is said.
    """

    asked: Claim
    real: Claim
    told: Claim
    terms: Terms
    born_s: float
    granted: bool = False
    ended: bool = False
    alive_until_s: float = 0.0
