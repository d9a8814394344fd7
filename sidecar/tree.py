"""A YAML document as a tree of texts, lists and tables, each with its place. Knows YAML, knows no setting.

Nothing here becomes a Python value: what `on`, `010` or `1e3` means is decided by the setting that reads it, so
YAML 1.1's surprises never arise. The tree is built from parser events, because only events show anchors, tags
and doubled keys. Aliases are refused: they are what makes a small file unfold into a huge one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import yaml

from sidecar.errors import ConfigError, Finding

LOADER: type[yaml.CSafeLoader] | type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# A configuration of a thousand routes is far below this; a larger file is another file given by mistake.
MAX_BYTES = 1024 * 1024
# The deepest setting there is stands seven levels down; the bound keeps `[[[[...` off Python's own stack.
MAX_DEPTH = 20

NULLS = frozenset(("", "~", "null", "Null", "NULL"))
# YAML 1.2 section 5.1, c-printable; what is not in it cannot stand in a file.
UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\})?")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something stands in the file; line and column count from 1."""

    line: int
    column: int


TOP = Place(1, 1)


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar. `shown` is what messages may quote: as written in the file, never a value of the environment.

    `null`: nothing is written there. `broken`: already reported, has no value.
    """

    place: Place
    text: str
    shown: str
    null: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    place: Place
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A table; every key once, in the order of the file."""

    place: Place
    pairs: tuple[tuple[Text, Node], ...]


Node = Text | Items | Entries


class Findings:
    """Collects the mistakes of one file."""

    def __init__(self, path: str) -> None:
        """`path`: how the file is called in every message."""
        self.path = path
        self.found: list[Finding] = []

    def finding(self, place: Place, message: str) -> Finding:
        """A sentence about a place of this file, without collecting it."""
        return Finding(place.line, place.column, message, self.path)

    def add(self, place: Place, message: str) -> None:
        """Collect one mistake; `message` says what to do and never holds a secret."""
        self.found.append(self.finding(place, message))

    def settle(self) -> None:
        """Go on if nothing was found.

        Raises: ConfigError with everything found so far, in the order of the file.
        """
        if self.found:
            raise ConfigError(sorted(set(self.found)))


class _StopError(Exception):
    """The rest of the file cannot be read in any useful way; the reason is already collected."""


def parse(data: bytes, findings: Findings, environ: Mapping[str, str]) -> Entries | None:
    """The tree of a file, or None when it has none; what is wrong is collected in `findings`.

    `${NAME}` and `${NAME:-default}` in scalars are taken from `environ`; the default also stands in for an
    empty value, as in a shell. `$${` is a literal `${`.
    """
    try:
        text = _decode(data, findings)
    except _StopError:
        return None
    try:
        return _Builder(text, findings, environ).document()
    except _StopError:
        return None
    except yaml.MarkedYAMLError as exc:
        place = _at(exc.problem_mark or exc.context_mark)
        findings.add(place, f"this is not YAML: {_reason(exc, place)}{_hint(text, place)}")
        return None


def _reason(exc: yaml.MarkedYAMLError, place: Place) -> str:
    """The parser's words, and where what it was reading began."""
    begun = _at(exc.context_mark)
    context = f"{exc.context} of line {begun.line}" if exc.context_mark and begun.line != place.line else exc.context
    return ", ".join(part for part in (context, exc.problem) if part)


def _decode(data: bytes, findings: Findings) -> str:
    if len(data) > MAX_BYTES:
        findings.add(TOP, f"the file has {len(data)} bytes; a configuration has at most {MAX_BYTES}")
        raise _StopError
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        before = data[: exc.start].decode("utf-8-sig")
        findings.add(_place_after(before), "this is not UTF-8: save the file as UTF-8")
        raise _StopError from exc
    if strange := UNPRINTABLE.search(text):
        code = f"U+{ord(strange.group()):04X}"
        place = _place_after(text[: strange.start()])
        findings.add(place, f"the character {code} cannot stand in YAML: remove it")
        raise _StopError
    return text


def _place_after(before: str) -> Place:
    lines = before.split("\n")
    return Place(len(lines), len(lines[-1]) + 1)


def _hint(text: str, place: Place) -> str:
    line = text.split("\n")[place.line - 1 : place.line]
    if line and "\t" in line[0][: place.column]:
        return "; indent with spaces, not tabs"
    if line and "${" in line[0]:
        return '; inside { } and [ ] write "${NAME}" with quotes'
    return ""


class _Mark(Protocol):
    """Both parsers have marks of their own."""

    @property
    def line(self) -> int: ...

    @property
    def column(self) -> int: ...


def _at(mark: _Mark | None) -> Place:
    return TOP if mark is None else Place(mark.line + 1, mark.column + 1)


class _Builder:
    """Reads events once, from the first to the last."""

    def __init__(self, text: str, findings: Findings, environ: Mapping[str, str]) -> None:
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=LOADER)
        self.findings = findings
        self.environ = environ

    def document(self) -> Entries | None:
        next(self.events)  # the stream's start
        if isinstance(next(self.events), yaml.StreamEndEvent):
            self.nothing()
            return None
        root = self.node(next(self.events), 0)
        next(self.events)  # the document's end
        following = next(self.events)
        if isinstance(following, yaml.DocumentStartEvent):
            self.findings.add(_at(following.start_mark), "a second document begins here: keep one, remove this `---`")
        if isinstance(root, Text) and root.null:
            self.nothing()
            return None
        if not isinstance(root, Entries):
            self.findings.add(root.place, "settings are written as `name: value`")
            return None
        return root

    def nothing(self) -> None:
        self.findings.add(TOP, "the file is empty: it needs at least `routes:` with one route")

    def node(self, event: yaml.Event, depth: int) -> Node:
        place = _at(event.start_mark)
        if depth > MAX_DEPTH:
            self.findings.add(place, f"this is nested more than {MAX_DEPTH} levels deep; no setting is")
            raise _StopError
        self.refuse_references(event, place)
        node = self.content(event, place, depth)
        # What a tag would make of it is unknown, so nothing more is said about it.
        return Text(place, "", "", broken=True) if getattr(event, "tag", None) else node

    def content(self, event: yaml.Event, place: Place, depth: int) -> Node:
        if isinstance(event, yaml.MappingStartEvent):
            return Entries(place, tuple(self.pairs(depth)))
        if isinstance(event, yaml.SequenceStartEvent):
            return Items(place, tuple(self.items(depth)))
        if isinstance(event, yaml.ScalarEvent):
            return self.text(event, place)
        return Text(place, "", "", broken=True)  # an alias

    def refuse_references(self, event: yaml.Event, place: Place) -> None:
        if isinstance(event, yaml.AliasEvent):
            message = "aliases (`*name`) are not read here: write the value, or set it once under `defaults:`"
            self.findings.add(place, message)
        elif getattr(event, "anchor", None):
            message = "anchors (`&name`) are not read here: remove it, or set the value once under `defaults:`"
            self.findings.add(place, message)
        elif getattr(event, "tag", None):
            self.findings.add(place, "tags (`!name`) are not read here: remove it")

    def items(self, depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            yield self.node(event, depth + 1)

    def pairs(self, depth: int) -> Iterator[tuple[Text, Node]]:
        seen: dict[str, Place] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            name = self.name(event, depth)
            value = self.node(next(self.events), depth + 1)
            if name is None:
                continue
            if first := seen.get(name.text):
                message = f"`{name.text}` stands here a second time; the first is in line {first.line}"
                self.findings.add(name.place, message)
                continue
            seen[name.text] = name.place
            yield name, value

    def name(self, event: yaml.Event, depth: int) -> Text | None:
        """The name of a setting, as written: no variable is looked up in it."""
        if isinstance(event, yaml.ScalarEvent):
            place = _at(event.start_mark)
            self.refuse_references(event, place)
            if event.value == "<<":
                message = "merge keys (`<<`) are not read here: set the values once under `defaults:`"
                self.findings.add(place, message)
                return None
            return Text(place, event.value, shorten(event.value))
        node = self.node(event, depth + 1)
        if not (isinstance(node, Text) and node.broken):
            self.findings.add(node.place, "a setting's name is a plain word")
        return None

    def text(self, event: yaml.ScalarEvent, place: Place) -> Text:
        written = event.value
        if "${" not in written:
            null = not event.style and written in NULLS
            return Text(place, written, shorten(written), null=null)
        text, problems = expand(written, self.environ)
        for problem in problems:
            self.findings.add(place, problem)
        return Text(place, text, shorten(written), broken=bool(problems))


def expand(written: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """`written` with its variables replaced, and what is wrong with them; no value is in any message."""
    problems: list[str] = []

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if match.group() == "$${":
            return "${"
        if name is None:
            problems.append("`${` begins a variable: write ${NAME} or ${NAME:-default}, or $${ for itself")
            return ""
        found = environ.get(name)
        if found is None and default is None:
            problems.append(f"the environment has no variable {name}: set it, or write ${{{name}:-default}}")
        return found or default or ""

    return VARIABLE.sub(value, written), problems


def shorten(written: str) -> str:
    """What a message quotes of a value: one line, at most 60 characters."""
    line = " ".join(written.split())
    return line if len(line) <= 60 else line[:57] + "..."
