"""Records over HTTP: `/v1/records` and what is below it. Reads questions, writes documents; `records.py` decides.

GET  /v1/records?route=&state=&limit=&cursor=    a list, newest first
GET  /v1/records?key=&route=                     those whose key has this text
GET  /v1/records/ID?route=&content=              one; content=1: with its answer
POST /v1/records/ID/resolve                      {"outcome": "sent" | "not-sent", ...}
POST /v1/records/ID/forget                       {}
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from sidecar.errors import OperatorError, Refusal, StoreError
from sidecar.guard import Guard
from sidecar.logline import Log
from sidecar.message import Answer, Fields, RecordId, end_to_end
from sidecar.record import Settled, Settlement, Shown, State
from sidecar.records import ID, MOST, Evidence, Found, Position, Records

LISTED = 50
# A question without an answer in it is small. Base64 makes four bytes of three.
SMALL_BYTES = 16 * 1024
ARRIVES_S = 10.0
ROUTE = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
VISIBLE = re.compile("[!-~]{1,256}")
# RFC 9110 sections 5.1 and 5.5.
FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
FIELD_VALUE = re.compile("(?:[!-~\x80-\xff](?:[ \t!-~\x80-\xff]*[!-~\x80-\xff])?)?")
NOT_KEPT = frozenset((b"content-length", b"set-cookie"))
STATES = (State.UNKNOWN, State.OUTSTANDING, State.COMPLETED)

WORDS = {
    Settlement.COMPLETED: "Settled as sent: it is not sent again, and a retry is told so.",
    Settlement.AGAIN: "It had been settled as sent before: nothing was changed.",
    Settlement.RELEASED: "Settled as not sent: the key is free, and its next request is forwarded.",
    Settlement.FORGOTTEN: "Forgotten: the key is free. Its next request is sent, even if a mail has left before.",
    Settlement.ABSENT: "There is no record any more: the key is free, and its next request is forwarded.",
}


class RecordPages:
    """Answers what lies at and below `/v1/records`."""

    def __init__(self, records: Records, guard: Guard, *, log: Log, answer_bytes: int) -> None:
        """`answer_bytes`: the largest content of an answer that is kept (`limits.stored_response`)."""
        self._records = records
        self._guard = guard
        self._log = log
        self._answer_bytes = answer_bytes

    async def handle(self, request: web.BaseRequest) -> dict[str, Any]:
        """The document for one request.

        Raises: OperatorError.
        """
        parts = request.path.removeprefix("/v1/records").split("/")[1:]
        try:
            if len(parts) == 2 and parts[1] in ("resolve", "forget"):
                return await self._change(request, parts[0], parts[1])
            if parts in ([], [""]):
                return await self._list(request)
            if len(parts) == 1:
                return await self._show(request, _record(parts[0]))
        except StoreError as exc:
            raise OperatorError(Refusal.STORE_UNAVAILABLE, f"The store cannot be asked: {exc.reason}.") from exc
        raise OperatorError(Refusal.PAGE_ABSENT, "There is nothing here.")

    # Reading.

    async def _list(self, request: web.BaseRequest) -> dict[str, Any]:
        asked = self._asked(request, "route", "state", "limit", "cursor", "key")
        route = _route(asked)
        if "key" in asked:
            found = await self._records.by_key(asked["key"].encode(), route)
        else:
            found = await self._records.listed(_state(asked), route, limit=_limit(asked), after=_position(asked))
        return {
            "records": [document(one) for one in found.found],
            "next": None if found.rest is None else str(found.rest),
        }

    async def _show(self, request: web.BaseRequest, record: RecordId) -> dict[str, Any]:
        asked = self._asked(request, "route", "content")
        content = asked.get("content", "") not in ("", "0", "false")
        if content and not self._guard.has_token:
            raise OperatorError(Refusal.TOKEN_UNSET, "Answers are shown only to who has a token: set admin.token.")
        found = await self._records.get(record, _route(asked), content=content)
        told = document(found)
        if found.shown.answer is not None:
            told["answer"] = _answer_document(found.shown.answer)
        return told

    def _asked(self, request: web.BaseRequest, *names: str) -> dict[str, str]:
        """The parameters of a question that reads."""
        if request.method not in ("GET", "HEAD"):
            raise OperatorError(Refusal.METHOD_REFUSED, "Only GET is served here.")
        self._guard.admit(request)
        for name in request.query:
            if name not in names or len(request.query.getall(name)) > 1:
                raise _malformed(f"The query knows {', '.join(names)}, once each.")
        return dict(request.query)

    # Settling.

    async def _change(self, request: web.BaseRequest, name: str, change: str) -> dict[str, Any]:
        if request.method != "POST":
            raise OperatorError(Refusal.METHOD_REFUSED, "Only POST is served here.")
        self._guard.admit_change(request)
        record = _record(name)
        given = await self._content(request)
        by, route = _text(given, "by", VISIBLE), _text(given, "route", ROUTE)
        if change == "forget":
            _only(given, "by", "route")
            outcome, forced = "forget", False
            settled = await self._records.forget(record, route)
        else:
            _only(given, "by", "route", "outcome", "force", "provider_id", "answer")
            outcome, forced = str(given.get("outcome")), _flag(given, "force")
            settled = await self._resolve(record, route, given, forced=forced)
        peer = request.remote or "unix socket"
        self._log.warning(
            "record-settled",
            record=record,
            outcome=outcome,
            result=settled.word,
            forced=forced,
            by=by or None,
            peer=peer,
        )
        return _settled_document(record, settled)

    async def _resolve(self, record: RecordId, route: str, given: Mapping[str, Any], *, forced: bool) -> Settled:
        outcome = given.get("outcome")
        if outcome == "sent":
            evidence = Evidence(_text(given, "provider_id", VISIBLE), self._answer(given.get("answer")))
            return await self._records.resolve_sent(record, evidence, route, forced=forced)
        if outcome != "not-sent":
            raise _malformed('`outcome` is "sent" or "not-sent".')
        if "answer" in given or "provider_id" in given:
            raise _malformed("What was not sent has neither an answer nor a provider's id.")
        return await self._records.resolve_not_sent(record, route, forced=forced)

    async def _content(self, request: web.BaseRequest) -> dict[str, Any]:
        limit_bytes = SMALL_BYTES + 2 * self._answer_bytes
        content = bytearray()
        try:
            async with asyncio.timeout(ARRIVES_S):
                async for piece in request.content.iter_any():
                    content += piece
                    if len(content) > limit_bytes:
                        raise OperatorError(Refusal.CONTENT_TOO_LARGE, f"At most {limit_bytes} bytes are read.")
        except TimeoutError as exc:
            raise _malformed("The content did not arrive in time.") from exc
        try:
            given = json.loads(content) if content else {}
        except (ValueError, RecursionError) as exc:
            raise _malformed("The content is not JSON.") from exc
        if not isinstance(given, dict):
            raise _malformed("The content is not a JSON object.")
        return given

    def _answer(self, given: Any) -> Answer | None:
        if given is None:
            return None
        if not isinstance(given, dict):
            raise _malformed("`answer` is an object.")
        _only(given, "status", "fields", "content_base64")
        status, text = given.get("status"), given.get("content_base64", "")
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status < 300:
            raise _malformed("`answer.status` is a status of 2xx: what was sent was accepted.")
        try:
            content = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error) as exc:
            raise _malformed("`answer.content_base64` is not Base64.") from exc
        if len(content) > self._answer_bytes:
            detail = f"An answer of at most {self._answer_bytes} bytes is kept (limits.stored_response)."
            raise OperatorError(Refusal.CONTENT_TOO_LARGE, detail)
        return Answer(status, b"OK" if status == 200 else b"", _fields(given.get("fields", [])), content)


def _malformed(detail: str) -> OperatorError:
    return OperatorError(Refusal.QUESTION_MALFORMED, detail)


def _record(text: str) -> RecordId:
    if not ID.fullmatch(text):
        raise _malformed("A record's id has 40 hexadecimal digits.")
    return RecordId(text)


def _route(asked: Mapping[str, str]) -> str:
    route = asked.get("route", "")
    if route and not ROUTE.fullmatch(route):
        raise _malformed("`route` is the name of a route.")
    return route


def _state(asked: Mapping[str, str]) -> State:
    state = asked.get("state") or State.UNKNOWN
    if state not in STATES:
        raise _malformed(f"`state` is one of {', '.join(STATES)}.")
    return State(state)


def _limit(asked: Mapping[str, str]) -> int:
    text = asked.get("limit") or str(LISTED)
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= limit <= MOST:
        raise _malformed(f"`limit` is a number from 1 to {MOST}.")
    return limit


def _position(asked: Mapping[str, str]) -> Position | None:
    text = asked.get("cursor")
    try:
        return Position.parse(text) if text else None
    except ValueError as exc:
        raise _malformed("`cursor` is the `next` of an earlier answer.") from exc


def _only(given: Mapping[str, Any], *names: str) -> None:
    if others := [name for name in given if name not in names]:
        raise _malformed(f"There are {len(others)} members that mean nothing here; it knows {', '.join(names)}.")


def _text(given: Mapping[str, Any], name: str, form: re.Pattern[str]) -> str:
    text = given.get(name)
    if text is None or text == "":
        return ""
    if not isinstance(text, str) or not form.fullmatch(text):
        raise _malformed(f"`{name}` does not have the form of one: {form.pattern}")
    return text


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _malformed(f"`{name}` is true or false.")
    return value


def _fields(given: Any) -> Fields:
    """The end-to-end fields of an answer: pairs, of which those that belong to the framing are made anew."""
    made = []
    for pair in given if isinstance(given, list) else [None]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise _malformed("`answer.fields` is a list of pairs: name and value.")
        name, value = pair
        if not FIELD_NAME.fullmatch(name) or not FIELD_VALUE.fullmatch(value):
            raise _malformed("`answer.fields` holds what is no field (RFC 9110 section 5).")
        made.append((name.encode("ascii"), value.encode("latin-1")))
    return tuple(field for field in end_to_end(tuple(made)) if field[0].lower() not in NOT_KEPT)


def document(found: Found) -> dict[str, Any]:
    """A record as JSON tells it; never with content."""
    shown = found.shown
    first = datetime.fromtimestamp(shown.first_ms / 1000, UTC) if shown.first_ms else None
    return {
        "id": shown.record,
        "route": found.route or None,
        "state": shown.state,
        "runs_here": found.here,
        "attempt": shown.attempt or None,
        "earlier_unknown": shown.earlier_unknown,
        "first_attempt": first and first.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "age_s": _seconds(shown.now_ms - shown.first_ms) if shown.first_ms and shown.now_ms else None,
        "expires_s": None if shown.expires_ms < 0 else _seconds(shown.expires_ms),
        "lease_left_s": _seconds(shown.lease_left_ms) if shown.state is State.OUTSTANDING else None,
        "owner": shown.owner.decode("ascii", "replace") or None,
        "why": shown.why or None,
        "seen": int(shown.seen) if shown.seen.isdigit() else None,
        "key": shown.key_text.decode("ascii", "replace") or None,
        "fingerprint_algorithm": shown.algorithm or None,
        **_settled_members(shown),
    }


def _settled_members(shown: Shown) -> dict[str, Any]:
    return {
        "status": shown.status or None,
        "content_kept": shown.kept if shown.state is State.COMPLETED else None,
        "content_bytes": shown.content_bytes if shown.kept else None,
        "resolved": shown.resolved,
        "provider_id": shown.provider_id or None,
    }


def _answer_document(answer: Answer) -> dict[str, Any]:
    return {
        "status": answer.status,
        "reason": answer.reason.decode("latin-1"),
        "fields": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.fields],
        "content_base64": base64.b64encode(answer.content).decode("ascii"),
    }


def _settled_document(record: RecordId, settled: Settled) -> dict[str, Any]:
    completed = settled.word in (Settlement.COMPLETED, Settlement.AGAIN)
    return {
        "id": record,
        "state": "completed" if completed else "absent",
        "changed": settled.word is not Settlement.AGAIN,
        "message": WORDS[settled.word],
    }


def _seconds(ms: int) -> float:
    return round(max(0, ms) / 1000, 3)
