"""What a run prints: a table of figures, and where the judge found something the whole story of the keys concerned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from storm.history import Arrival, History, Request
from storm.run import Result

SHOWN_KEYS = 3
NEAR_S = 1.0


def table(result: Result) -> str:
    """The figures, one a line."""
    history = result.history
    answered = [one for one in history.arrivals if one.answer is not None]
    rows: list[tuple[str, object]] = [
        ("seed", result.seed),
        ("seconds of storm", f"{result.seconds:g}"),
        ("keys", len(result.mails)),
        ("arrivals", len(history.arrivals)),
        *((f"  {name}", count) for name, count in _sorted(str(one.end) for one in history.arrivals)),
        ("answers", len(answered)),
        ("  fresh", sum(not one.replayed and not one.slug for one in answered)),
        ("  replayed", sum(one.replayed for one in answered)),
        *((f"  {name}", count) for name, count in _sorted(one.slug for one in answered if one.slug)),
        ("requests at the upstream", len(history.requests)),
        *((f"  {name}", count) for name, count in _sorted(one.fate for one in history.requests)),
        ("  read whole", sum(one.read_s is not None for one in history.requests)),
        ("  accepted", sum(one.accepted_s is not None for one in history.requests)),
        ("  mailed", sum(one.mailed for one in history.requests)),
        ("faults", len(history.faults)),
        *((f"  {name}", count) for name, count in _sorted(one.kind for one in history.faults)),
        *((f"  exit code {code}", count) for code, count in sorted(result.exits.items())),
        ("keys at the end", sum(result.endings.values())),
        *((f"  {name}", count) for name, count in sorted(result.endings.items())),
        ("records at the end", len(history.left)),
        *((f"  {name}", count) for name, count in _sorted(_state(one) for one in history.left)),
        ("findings", len(result.findings)),
        *((f"  {name}", count) for name, count in _sorted(one.rule for one in result.findings)),
    ]
    return "\n".join(f"{name:30} {value:>8}" for name, value in rows)


def _state(record: object) -> str:
    state, route = getattr(record, "state", ""), getattr(record, "route", "")
    why = f", {getattr(record, 'why', '')}" if state != "completed" else ""
    return f"{route} {state}{why}"


def _sorted(words: Iterable[str]) -> list[tuple[str, int]]:
    return sorted(Counter(words).items())


def story(history: History, key: str) -> str:
    """Everything that happened under one key, and the faults meanwhile, in order of time."""
    lines: list[tuple[float, str]] = []
    for one in history.arrivals:
        if one.key == key:
            lines += _of_arrival(one)
    for request in history.requests:
        if request.key == key:
            lines += _of_request(request)
    if not lines:
        return ""
    begin_s = min(lines)[0]
    lines += _of_faults(history, [at_s for at_s, _ in lines])
    text = [f"{at_s - begin_s:9.3f}  {what}" for at_s, what in sorted(lines)]
    text += [f"{'at the end':>9} {record}" for record in history.left if record.key == key]
    return "\n".join([f"key {key}", *text])


def _of_faults(history: History, times_s: list[float]) -> list[tuple[float, str]]:
    """The faults near to when something happened."""
    lines: list[tuple[float, str]] = []
    for fault in history.faults:
        if any(fault.during(at_s - NEAR_S, at_s + 0.1) for at_s in times_s):
            where = "" if fault.target < 0 else f" of sidecar {fault.target}"
            lines.append((fault.begin_s, f"fault     {fault.kind}{where}"))
            if fault.end_s is not None and fault.end_s - fault.begin_s > 0.001:
                lines.append((fault.end_s, f"fault     {fault.kind}{where} is over"))
    return lines


def _of_arrival(one: Arrival) -> list[tuple[float, str]]:
    what = f"arrival   {one.number} at sidecar {one.sidecar}, content {one.digest}"
    lines = [(one.sent_s, what if one.whole else what + ", half of it")]
    if one.ended_s is not None:
        told = ""
        if one.answer is not None:
            told = f" {one.answer.status} {one.slug or ('replay' if one.replayed else 'fresh')}"
            told += f", sent: {one.problem['sent']}: {one.problem['detail']}" if one.problem else ""
            told += "" if one.upstream is None else f" of request {one.upstream}"
        lines.append((one.ended_s, f"          {one.number} {one.end}{told}"))
    return lines


def _of_request(one: Request) -> list[tuple[float, str]]:
    name = f"          request {one.number}"
    lines = [(one.begun_s, f"upstream  request {one.number} of arrival {one.arrival}, {one.fate}, key {one.native!r}")]
    if one.read_s is not None:
        lines.append((one.read_s, f"{name} read whole, content {one.digest}"))
    if one.accepted_s is not None:
        lines.append((one.accepted_s, f"{name} accepted{' and mailed' if one.mailed else ''}"))
    if one.answer is not None and one.answered_s is not None:
        lines.append((one.answered_s, f"{name} answered {one.answer.status}"))
    return lines


def text(result: Result) -> str:
    """The table, and, where there are findings, what they are and the stories of the first keys."""
    if not result.findings:
        return table(result)
    parts = [table(result), "", *(f"{one.rule}: {one.key or '-'}: {one.text}" for one in result.findings[:50])]
    keys = list(dict.fromkeys(one.key for one in result.findings if one.key))[:SHOWN_KEYS]
    return "\n".join([*parts, *(f"\n{story(result.history, key)}" for key in keys)])
