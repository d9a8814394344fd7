"""One request on its way through the data plane: what is known of it so far, for its log line and its counters."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.errors import Outcome, ProblemError
from sidecar.routing import Match
from sidecar.server import Inbound
from sidecar.upstream import Upstream


@dataclass(slots=True)
class Arrival:
    """Filled in step by step. `outcome` is what the request ends as if nothing else happens any more.

    `begun`: bytes may have left. `left`: the client has. `behind`: its exchange goes on without it.
    """

    inbound: Inbound
    begin_s: float
    match: Match | None = None
    upstream: Upstream | None = None
    outcome: Outcome = Outcome.REQUEST_MALFORMED
    status: int = 0
    problem: ProblemError | None = None
    send: str = ""
    record: str = ""
    attempt: int = 0
    content_bytes: int = 0
    upstream_s: float = 0.0
    begun: bool = False
    left: bool = False
    behind: bool = False
    logged: bool = False

    @property
    def route(self) -> str:
        """The route's name, `-` before one was found."""
        return "-" if self.match is None else self.match.route.name
