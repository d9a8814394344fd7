"""`sidecar keys`: finds the records of a running sidecar and settles unknown outcomes, through its admin listener."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO
from urllib.parse import urlencode

import click

from sidecar.config import Config
from sidecar.errors import SidecarError
from sidecar.options import admin_option, config_option, running

Record = dict[str, Any]

ID = re.compile("[0-9a-f]{40}")
WIDTH = 100
LABEL_WIDTH = 10
# How many records one question asks for; more are asked for in turn.
PAGE = 100
AGES = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
WHY = {
    "owner-lost": "the sidecar that sent it stopped before an answer was recorded",
    "answer-lost": "it was sent, and no complete answer came",
}


class KeysError(SidecarError):
    """What was asked for was not done; one sentence that says why."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
route_option = click.option("--route", default="", metavar="ROUTE", help="Of this route alone.")
key_argument = click.argument("key", metavar="KEY|ID")


@click.group()
def keys() -> None:
    """List records, and settle those whose outcome nobody knows."""


@keys.command("list")
@config_option
@admin_option
@route_option
@click.option(
    "--state",
    default="unknown",
    show_default=True,
    type=click.Choice(["unknown", "outstanding", "completed"]),
    help="Unknown: nobody knows whether a mail left.",
)
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 10_000), help="At most so many.")
@json_option
def list_(path: str, admin: str, route: str, state: str, limit: int, as_json: bool) -> None:
    """List records, the latest change first."""
    records, more = _list(running(path, admin), route, state, limit)
    if as_json:
        click.echo(json.dumps({"records": records, "more": more}, indent=2))
        return
    for line in table(records):
        click.echo(line)
    if not records:
        click.echo(f"no {state} records{f' on route {route}' if route else ''}")
    if more:
        click.echo(f"... and more: --limit {2 * limit} shows them", err=True)


@keys.command()
@config_option
@admin_option
@route_option
@key_argument
@click.option("--content", is_flag=True, help="With the recorded answer; needs admin.token.")
@json_option
def show(path: str, admin: str, route: str, key: str, content: bool, as_json: bool) -> None:
    """Show one record, by its id or the text of its key."""
    config = running(path, admin)
    record = _find(config, key, route)
    if content:
        query = urlencode({"content": 1, "route": record["route"] or ""})
        record = _asked(config, f"/v1/records/{record['id']}?{query}")
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    for line in described(record):
        click.echo(line)


@keys.command()
@config_option
@admin_option
@route_option
@key_argument
@click.option("--sent", is_flag=True, help="The provider accepted it: retries are told so, and nothing is sent.")
@click.option("--not-sent", is_flag=True, help="The provider never had it: the key is free.")
@click.option("--id", "provider_id", default="", metavar="ID", help="With --sent: the provider's id of the mail.")
@click.option(
    "--answer", type=click.File("rb"), metavar="FILE", help="With --sent: the content that retries get (`-`: stdin)."
)
@click.option("--force", is_flag=True, help="With --not-sent: although the provider's log may still lag.")
@json_option
def resolve(
    path: str,
    admin: str,
    route: str,
    key: str,
    sent: bool,
    not_sent: bool,
    provider_id: str,
    answer: BinaryIO | None,
    force: bool,
    as_json: bool,
) -> None:
    """Settle an unknown outcome, after a look into the provider's log."""
    if sent == not_sent:
        raise click.UsageError("say either --sent or --not-sent")
    if not_sent and (provider_id or answer is not None):
        raise click.UsageError("--id and --answer go with --sent")
    config = running(path, admin)
    record = _find(config, key, route)
    given: Record = {"outcome": "sent" if sent else "not-sent", "force": force}
    if provider_id:
        given["provider_id"] = provider_id
    if answer is not None:
        given["answer"] = _answer(answer.read(), _accepted(config, record))
    _change(config, record, "resolve", given, as_json)


@keys.command()
@config_option
@admin_option
@route_option
@key_argument
@json_option
def forget(path: str, admin: str, route: str, key: str, as_json: bool) -> None:
    """Free a key, whatever is known of it: its next request is sent."""
    config = running(path, admin)
    _change(config, _find(config, key, route), "forget", {}, as_json)


# Questions to the sidecar.


def _asked(config: Config, path: str, given: Mapping[str, Any] | None = None) -> Record:
    """The document of one question.

    Raises: KeysError with the sidecar's own words; ProbeError.
    """
    from sidecar import probe

    status, found = probe.ask(config, path, given)
    if status != 200:
        raise KeysError(_plain(str(found.get("detail") or f"the sidecar answered {status}")))
    return found


def _list(config: Config, route: str, state: str, limit: int) -> tuple[list[Record], bool]:
    """Up to `limit` records, and whether there are more."""
    records: list[Record] = []
    cursor = ""
    while len(records) < limit:
        query = {"route": route, "state": state, "limit": min(PAGE, limit - len(records)), "cursor": cursor}
        found = _asked(config, f"/v1/records?{urlencode(query)}")
        records += found["records"]
        cursor = found["next"] or ""
        if not cursor:
            break
    return records, bool(cursor)


def _find(config: Config, key: str, route: str) -> Record:
    """The one record that is meant.

    Raises: KeysError where there is none, or more than one; ProbeError.
    """
    from sidecar import probe

    if ID.fullmatch(key):
        status, found = probe.ask(config, f"/v1/records/{key}?{urlencode({'route': route})}")
        if status == 200:
            return found
        if status != 404:
            raise KeysError(_plain(str(found.get("detail") or f"the sidecar answered {status}")))
    records = _asked(config, f"/v1/records?{urlencode({'key': key, 'route': route})}")["records"]
    if len(records) == 1:
        one: Record = records[0]
        return one
    if not records:
        raise KeysError(
            "there is no record of this key: it never was, it expired, or it was freed; a route with `record_key:"
            " digest` keeps no text, there name the record by its id, which is in the log"
        )
    for line in table(records):
        click.echo(line, err=True)
    raise KeysError(f"{len(records)} records have this key, of several credentials or routes: name one by its id")


def _change(config: Config, record: Record, change: str, given: Record, as_json: bool) -> None:
    named = {"by": _who(), **({"route": record["route"]} if record["route"] else {})}
    found = _asked(config, f"/v1/records/{record['id']}/{change}", {**given, **named})
    click.echo(json.dumps(found, indent=2) if as_json else _plain(f"{record['id']}: {found['message']}"))


def _who() -> str:
    """Who asks, for the sidecar's log: the name of this user, as the system knows it."""
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"uid-{os.getuid()}"
    return re.sub("[^!-~]", "?", name)[:64]


def _accepted(config: Config, record: Record) -> int:
    return next((route.accepted for route in config.routes if route.name == record["route"]), 200)


def _answer(content: bytes, status: int) -> Record:
    """An answer with this content: as JSON where it is, else as text."""
    try:
        json.loads(content)
        kind = "application/json"
    except ValueError:
        kind = "text/plain; charset=utf-8"
    text = base64.b64encode(content).decode("ascii")
    return {"status": status, "fields": [["Content-Type", kind]], "content_base64": text}


# For people: at most `WIDTH` columns.


def _plain(text: str) -> str:
    """Text without what a terminal would obey."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _short(text: str, width: int) -> str:
    text = _plain(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def age(seconds: float | None) -> str:
    """A duration in one unit: `45s`, `3h`."""
    if seconds is None:
        return "?"
    return next((f"{int(seconds // length)}{unit}" for length, unit in AGES if seconds >= length), "0s")


def _brief(record: Record) -> str:
    """What matters about a record in a word or two."""
    if record["state"] == "outstanding":
        return f"lease {age(record['lease_left_s'])}"
    if record["state"] == "completed":
        return f"status {record['status']}"
    return str(record["why"] or record["state"])


ROW = "{:40}  {:11}  {:>4}  {:12}  {}"


def table(records: list[Record]) -> Iterator[str]:
    """Records, a line each, under a line of titles; nothing where there are none."""
    if records:
        yield ROW.format("record", "what", "age", "route", "key")
    for one in records:
        route, key = _short(one["route"] or "?", 12), _short(one["key"] or "-", 25)
        yield ROW.format(one["id"], _brief(one), age(one["age_s"]), route, key)


def described(record: Record) -> Iterator[str]:
    """One record in labelled lines."""
    for label, value in _rows(record):
        text = _plain(value)
        wide = WIDTH - LABEL_WIDTH
        for begin in range(0, max(1, len(text)), wide):
            yield f"{'' if begin else label:<{LABEL_WIDTH}}{text[begin : begin + wide]}".rstrip()


def _rows(record: Record) -> Iterator[tuple[str, str]]:
    yield "record", record["id"]
    yield "route", record["route"] or "none of this configuration"
    yield "state", _state(record)
    if record["key"]:
        yield "key", record["key"]
    if record["attempt"]:
        first = f"the first at {record['first_attempt']}, {age(record['age_s'])} ago" if record["first_attempt"] else ""
        earlier = "an earlier one is unknown" if record["earlier_unknown"] else ""
        yield "attempt", "; ".join(filter(None, (str(record["attempt"]), first, earlier)))
        yield "owner", f"{record['owner']}{', in this sidecar' if record['runs_here'] else ''}"
        yield "content", f"fingerprint of algorithm {record['fingerprint_algorithm']}"
    expires = record["expires_s"]
    yield "expires", f"in {age(expires)}" if expires is not None else "never"
    yield from _answer_rows(record)
    if record["state"] in ("unknown", "unreadable"):
        yield "", ""
        yield "next", "look for the mail in the provider's log, then"
        yield "", f"sidecar keys resolve {record['id']} --sent"
        yield "", f"sidecar keys resolve {record['id']} --not-sent"


def _state(record: Record) -> str:
    state: str = record["state"]
    if state == "outstanding":
        return f"outstanding: a request runs, its lease ends in {age(record['lease_left_s'])} unless renewed"
    if state == "unknown":
        seen = f" (one of status {record['seen']} began)" if record["seen"] else ""
        return f"unknown: {WHY.get(record['why'], record['why'])}{seen}"
    if state == "unreadable":
        return "unreadable: of another version, or damaged; it counts as unknown"
    return f"completed: {'settled as sent by an operator' if record['resolved'] else 'the provider answered'}"


def _answer_rows(record: Record) -> Iterator[tuple[str, str]]:
    if record["status"]:
        kept = f"{record['content_bytes']} bytes" if record["content_kept"] else "content not kept"
        yield "answer", f"status {record['status']}, {kept}"
    if record["provider_id"]:
        yield "mail", f"{record['provider_id']}, the provider's id"
    if answer := record.get("answer"):
        for name, value in answer["fields"]:
            yield "", f"{name}: {value}"
        for line in _content(answer).splitlines():
            yield "", line


def _content(answer: Record) -> str:
    content = base64.b64decode(answer["content_base64"])
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if all(sign.isprintable() or sign in "\r\n\t" for sign in text):
        return text
    return f"({len(content)} bytes that are no text; --json has them in Base64)"
