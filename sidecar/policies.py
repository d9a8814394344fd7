"""The settings of a policy, and the entries of `sends`, each of which may have policies of its own."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar import forms
from sidecar.config import Concurrent, StoreUnavailable, Unknown
from sidecar.tables import Setting, Table
from sidecar.tree import Entries, Findings, Node
from sidecar.values import Choice, Duration, JsonSchema, Kind, ListOf, Matching, Read, Values, Whole


class Statuses(ListOf):
    """A list of statuses and classes of them, read as one set."""

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`."""
        read = super().read(node, name, findings)
        if read.failed:
            return read
        return Read(frozenset[int]().union(*read.value), read.place)


class Status(Matching):
    """A status, or a class such as `2xx`."""

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        number = {"type": "integer", "minimum": 200, "maximum": 599}
        return {"anyOf": [number, {"type": "string", "pattern": "^[2-5]([0-9][0-9]|xx)$"}]}


# What a route or one entry of its `sends` may say.
POLICY = (
    Setting(
        "ttl",
        Duration(),
        "How long a final answer is replayed, from the moment it was recorded. A replay does not prolong it.",
    ),
    Setting(
        "lease",
        Duration(),
        "How long a reservation stands unrenewed; it is renewed at a third of that while the exchange runs.",
    ),
    Setting(
        "final",
        Statuses(Status("a status", forms.statuses)),
        "Complete answers that settle a key, beside every 2xx: retries get them again.",
    ),
    Setting(
        "lost",
        Statuses(Status("a status", forms.lost_statuses)),
        "Complete answers after which nobody knows whether the mail left. Where `unknown` is `resend`, all 5xx.",
    ),
    Setting(
        "unknown",
        Choice(Unknown),
        "What a retry gets when nobody knows whether the mail left: `hold`, an error until someone settles it; "
        "`resend`, it is sent again. Default: `resend` where the provider guards twins of its own key, else `hold`.",
    ),
    Setting("hold_for", Duration(), "How long an unsettled record is kept; at least as long as `ttl`."),
    Setting(
        "resend_after",
        Duration(zero=True),
        "With `unknown: resend`: how long after the last attempt's end a retry still gets 409.",
    ),
    Setting(
        "store_unavailable",
        Choice(StoreUnavailable),
        "While the store is away: `reject`, 503 and nothing is sent; `forward`, sent without protection.",
    ),
    Setting(
        "concurrent",
        Choice(Concurrent),
        "What an arrival gets while the first request under its key is outstanding: `reject`, 409 at once; "
        "`wait`, the first one's answer.",
    ),
    Setting(
        "wait_limit",
        Duration(),
        "With `concurrent: wait`: how long an arrival waits before its 409.",
    ),
    Setting(
        "retry",
        Table(
            Setting("attempts", Whole(1, 20), "How many attempts in all; 1 is none of our own."),
            Setting(
                "backoff",
                Duration(zero=True),
                "How long before the second attempt; doubled for each one more.",
            ),
        ),
        "Attempts of the sidecar's own, within one reservation. What may have been sent is repeated only where "
        "the provider guards twins of its own key.",
    ),
)


@dataclass(frozen=True, slots=True)
class SendEntry:
    """One entry of `sends` as read: the template, and the policies it has of its own."""

    template: forms.Template
    own: Values


class SendKind(Kind):
    """`POST /path`, or a table with `match` and policies."""

    def __init__(self, table: Table) -> None:
        """`table`: what an entry with policies may say."""
        self.table = table
        self.match = Matching("a method and a path", forms.template, pattern="^[A-Z-]+ +/")

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`."""
        if not isinstance(node, Entries):
            read = self.match.read(node, name, findings)
            return Read(SendEntry(read.value, {}), read.place, failed=read.failed)
        own = self.table.read(node, "", findings)
        match = own.pop("match", Read(None, node.place, failed=True))
        return Read(SendEntry(match.value, own), node.place, failed=match.failed)

    def schema(self) -> JsonSchema:
        """See `Kind.schema`."""
        return {"anyOf": [self.match.schema(), self.table.schema()]}


SENDS = SendKind(
    Table(
        Setting(
            "match",
            Matching("a method and a path", forms.template, pattern="^[A-Z-]+ +/"),
            "Method and path template, and `name=value` of a form or query field where one tells sends apart.",
        ),
        *POLICY,
        required=("match",),
    )
)
