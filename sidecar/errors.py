"""Every way to fail, as one table: slug, statuses, title, and whether a mail may have left.

Knows no HTTP library and does no I/O. `problem.py` renders what stands here; `metrics.py` and the log
use the same words, so that a client's error, a counter and a log line can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Sent(StrEnum):
    """May a mail have left under this key? There is no third answer."""

    NO = "no"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """The closed set of what one request can end as: in the log, in the metrics, in the admin interface."""

    FORWARDED = "forwarded"
    REPLAYED = "replayed"
    PASSED = "passed"
    UNPROTECTED = "unprotected"
    NO_ROUTE = "no-route"
    REQUEST_MALFORMED = "request-malformed"
    KEY_MISSING = "key-missing"
    KEY_MALFORMED = "key-malformed"
    KEY_REUSED = "key-reused"
    REQUEST_OUTSTANDING = "request-outstanding"
    CONTENT_TOO_LARGE = "content-too-large"
    STORE_UNAVAILABLE = "store-unavailable"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    UPSTREAM_UNREACHABLE = "upstream-unreachable"
    OUTCOME_UNKNOWN = "outcome-unknown"
    RESPONSE_NOT_KEPT = "response-not-kept"
    INTERNAL_ERROR = "internal-error"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the problem table.

    `statuses`: the first one is the usual one. `sent` is None where it depends on the record.
    `retryable`: the same request under the same key may end otherwise later; repeating it is never a danger.
    """

    statuses: tuple[int, ...]
    title: str
    sent: Sent | None
    retryable: bool


PROBLEMS: dict[Outcome, Row] = {
    Outcome.NO_ROUTE: Row((404,), "No route for this request", Sent.NO, False),
    Outcome.REQUEST_MALFORMED: Row((400, 405, 408, 414, 417, 431), "The request cannot be read", Sent.NO, False),
    Outcome.KEY_MISSING: Row((400,), "The idempotency key is missing", Sent.NO, False),
    Outcome.KEY_MALFORMED: Row((400,), "The idempotency key is malformed", Sent.NO, False),
    Outcome.KEY_REUSED: Row((422, 409), "The idempotency key was used for another request", None, False),
    Outcome.REQUEST_OUTSTANDING: Row((409,), "A request with this key is outstanding", Sent.UNKNOWN, True),
    Outcome.CONTENT_TOO_LARGE: Row((413,), "The content is too large", Sent.NO, False),
    Outcome.STORE_UNAVAILABLE: Row((503,), "The store is unavailable", Sent.NO, True),
    Outcome.OVERLOADED: Row((503,), "The sidecar is overloaded", Sent.NO, True),
    Outcome.DRAINING: Row((503,), "The sidecar is shutting down", Sent.NO, True),
    Outcome.UPSTREAM_UNREACHABLE: Row((502,), "The provider cannot be reached", Sent.NO, True),
    Outcome.OUTCOME_UNKNOWN: Row((504,), "Nobody knows whether a mail left", Sent.UNKNOWN, True),
    # Its status is that of the answer that was not kept.
    Outcome.RESPONSE_NOT_KEPT: Row((), "Accepted before; the answer was not kept", None, False),
    Outcome.INTERNAL_ERROR: Row((500,), "The sidecar failed before it sent anything", Sent.NO, True),
}


class Refusal(StrEnum):
    """What the admin interface answers where it does not do what it is asked."""

    PAGE_ABSENT = "page-absent"
    METHOD_REFUSED = "method-refused"
    TOKEN_MISSING = "token-missing"  # noqa: S105 - a slug
    TOKEN_UNSET = "token-unset"  # noqa: S105 - a slug
    HOST_FOREIGN = "host-foreign"
    ORIGIN_FOREIGN = "origin-foreign"
    QUESTION_MALFORMED = "question-malformed"
    CONTENT_NOT_JSON = "content-not-json"
    CONTENT_TOO_LARGE = "content-too-large"
    RECORD_ABSENT = "record-absent"
    RECORD_OUTSTANDING = "record-outstanding"
    RECORD_COMPLETED = "record-completed"
    RECORD_FRESH = "record-fresh"
    RECORD_UNREADABLE = "record-unreadable"
    STORE_UNAVAILABLE = "store-unavailable"


REFUSALS: dict[Refusal, tuple[int, str]] = {
    Refusal.PAGE_ABSENT: (404, "There is no such page"),
    Refusal.METHOD_REFUSED: (405, "This method is not served here"),
    Refusal.TOKEN_MISSING: (401, "The token is missing or wrong"),
    Refusal.TOKEN_UNSET: (403, "This needs admin.token"),
    Refusal.HOST_FOREIGN: (403, "The Host is not this sidecar's"),
    Refusal.ORIGIN_FOREIGN: (403, "The request comes from another site"),
    Refusal.QUESTION_MALFORMED: (400, "The request cannot be understood"),
    Refusal.CONTENT_NOT_JSON: (415, "The content must be application/json"),
    Refusal.CONTENT_TOO_LARGE: (413, "The content is too large"),
    Refusal.RECORD_ABSENT: (404, "There is no such record"),
    Refusal.RECORD_OUTSTANDING: (409, "A request may be running"),
    Refusal.RECORD_COMPLETED: (409, "The record is completed"),
    Refusal.RECORD_FRESH: (409, "It is too early to say that nothing was sent"),
    Refusal.RECORD_UNREADABLE: (409, "The record cannot be read"),
    Refusal.STORE_UNAVAILABLE: (503, "The store is unavailable"),
}


class SidecarError(Exception):
    """The root of everything this package raises on purpose."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One mistake in a configuration: where it stands and what to do about it (lines and columns from 1)."""

    line: int
    column: int
    message: str
    path: str = ""

    def __str__(self) -> str:
        """`FILE:LINE:COLUMN: message`, the form editors and terminals make a link of."""
        return f"{self.path}:{self.line}:{self.column}: {self.message}"


class ConfigError(SidecarError):
    """The configuration cannot be used; carries all of its mistakes at once."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        """`findings`: at least one, in the order of the file."""
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = tuple(findings)


class StartError(SidecarError):
    """The sidecar cannot start; one sentence that says what to do."""


class StoreError(SidecarError):
    """The store did not do what it was asked.

    `applied` is False where the command surely had no effect, None where nobody knows: it may have
    been applied, or may be applied later.
    """

    def __init__(self, reason: str, *, applied: bool | None) -> None:
        """`reason`: one clause for the log and `/readyz`; it never holds a key or an address with a password."""
        super().__init__(reason)
        self.reason = reason
        self.applied = applied


class NotSentError(SidecarError):
    """The upstream surely has not read a byte of this request: nothing was handed to a transport."""

    def __init__(self, reason: str) -> None:
        """`reason`: a Proxy-Status error type of RFC 9209 section 2.3, such as `connection_refused`."""
        super().__init__(reason)
        self.reason = reason


class LostError(SidecarError):
    """Bytes of the request left and no complete, readable answer came: nobody knows the outcome.

    `status` is the answer's status where at least its head was read.
    """

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        """`reason`: a Proxy-Status error type of RFC 9209 section 2.3, such as `connection_terminated`."""
        super().__init__(reason)
        self.reason = reason
        self.status = status


class ProblemError(SidecarError):
    """An answer of ours: one row of `PROBLEMS`, with the detail of this occurrence."""

    def __init__(
        self,
        slug: Outcome,
        detail: str,
        *,
        status: int | None = None,
        sent: Sent | None = None,
        retry_after_s: float | None = None,
        proxy_status: str | None = None,
    ) -> None:
        """`detail` says what to do next and never holds content, recipients, credentials or keys.

        `status` and `sent` default to those of the row; `sent` must be given where the row leaves it open.
        `proxy_status`: a Proxy-Status error type (RFC 9209).
        """
        row = PROBLEMS[slug]
        super().__init__(f"{slug}: {detail}")
        self.slug = slug
        self.status = row.statuses[0] if status is None else status
        self.title = row.title
        self.detail = detail
        known = row.sent if sent is None else sent
        if known is None:
            raise ValueError(f"{slug} needs `sent`")
        self.sent = known
        self.retryable = row.retryable
        self.retry_after_s = retry_after_s
        self.proxy_status = proxy_status


class OperatorError(SidecarError):
    """An answer of the admin interface: one row of `REFUSALS`, with the detail of this occurrence."""

    def __init__(self, slug: Refusal, detail: str, *, retry_after_s: int | None = None) -> None:
        """`detail` says what to do next and never holds content, recipients, credentials or keys."""
        super().__init__(f"{slug}: {detail}")
        self.slug = slug
        self.status, self.title = REFUSALS[slug]
        self.detail = detail
        self.retry_after_s = retry_after_s
