"""The kinds of values settings have: how each is read from a text, and how JSON Schema says it.

A kind knows neither the setting it belongs to nor any default. All of them read the text itself, so `on`, `010`
and `1e3` are what they look like: texts that are not a number.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sidecar.tree import Findings, Items, Node, Place, Text

JsonSchema = dict[str, Any]

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNITS_BYTES = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# Beyond ten years a duration is a slip of the finger, and Redis' expiries overflow some way above.
MAX_S = 3650 * 86400.0
MAX_BYTES = 1024**4

# RFC 9110 section 5.6.2: what a field name is made of.
TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Read:
    """A value as it was read. `failed`: something was written and reported; nothing may be concluded from it."""

    value: Any
    place: Place
    failed: bool = False


# What a table was read as: the settings that stand in it, those of inner tables by their dotted names.
Values = dict[str, Read]


class Kind(ABC):
    """One kind of value."""

    @abstractmethod
    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """The value of the setting `name`; what is wrong is collected in `findings`."""

    @abstractmethod
    def schema(self) -> JsonSchema:
        """The same in JSON Schema 2020-12."""


class Word(Kind):
    """A kind written as one text. `parse` says why a text is refused by a ValueError; `what` is its plain name.

    A `secret` is never quoted in a message.
    """

    what = "a text"
    secret = False
    empty = False

    @abstractmethod
    def parse(self, text: str) -> Any:
        """The value. Raises: ValueError with what to do instead."""

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`."""
        if not isinstance(node, Text):
            findings.add(node.place, f"`{name}` is {self.what}, not a list or a table")
            return Read(None, node.place, failed=True)
        if node.broken:
            return Read(None, node.place, failed=True)
        try:
            return Read(self.value(node), node.place)
        except ValueError as exc:
            findings.add(node.place, f"`{name}`{self.quoted(node)} {exc}")
            return Read(None, node.place, failed=True)

    def quoted(self, node: Text) -> str:
        """The value in a message, unless it is or may hold a secret: user information of a URL does."""
        hidden = self.secret or not node.shown or "@" in node.shown
        return "" if hidden else f": `{node.shown}`"

    def value(self, node: Text) -> Any:
        """The value of a text. Raises: ValueError."""
        if node.null or (not node.text and not self.empty):
            raise ValueError("has no value: write one, or leave the setting out")
        return self.parse(node.text)

    def written(self) -> JsonSchema:
        """How it is written without a variable."""
        return {"type": "string", "minLength": 1}

    def schema(self) -> JsonSchema:
        """A variable of the environment may stand for any text."""
        return {"anyOf": [self.written(), {"$ref": "#/$defs/variable"}]}


class Duration(Word):
    """A whole number and a unit; read as float seconds."""

    what = "a duration"

    def __init__(self, *, zero: bool = False) -> None:
        """`zero`: whether `0s` makes sense."""
        self.zero = zero

    def parse(self, text: str) -> float:
        """See `Word.parse`."""
        match = re.fullmatch(r"(\d{1,12})(ms|s|m|h|d)", text, re.ASCII)
        if not match:
            raise ValueError("is not a duration: write a whole number and ms, s, m, h or d, such as 15s")
        seconds = int(match.group(1)) * UNITS_S[match.group(2)]
        if seconds == 0 and not self.zero:
            raise ValueError("is no time at all: write more than zero")
        if seconds > MAX_S:
            raise ValueError("is too long: write at most 3650d")
        return seconds

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        first = "[0-9]+" if self.zero else "0*[1-9][0-9]*"
        return {"type": "string", "pattern": f"^{first}(ms|s|m|h|d)$"}


class Size(Word):
    """A whole number of bytes, or with KiB, MiB or GiB."""

    what = "a size"

    def parse(self, text: str) -> int:
        """See `Word.parse`."""
        match = re.fullmatch(r"([1-9]\d{0,14})(|B|KiB|MiB|GiB)", text, re.ASCII)
        if not match:
            raise ValueError(
                "is not a size: write a whole number above zero and KiB, MiB or GiB, such as 64MiB, or bytes alone"
            )
        size = int(match.group(1)) * UNITS_BYTES[match.group(2)]
        if size > MAX_BYTES:
            raise ValueError("is too large: write at most 1024GiB")
        return size

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        text = {"type": "string", "pattern": "^[1-9][0-9]*(B|KiB|MiB|GiB)?$"}
        return {"anyOf": [{"type": "integer", "minimum": 1}, text]}


class Whole(Word):
    """A whole number between two bounds, both allowed."""

    what = "a whole number"

    def __init__(self, least: int, most: int) -> None:
        """`least` is at least 0."""
        self.least, self.most = least, most

    def parse(self, text: str) -> int:
        """See `Word.parse`."""
        match = re.fullmatch(r"-?(0|[1-9]\d{0,17})", text, re.ASCII)
        if not match:
            raise ValueError("is not a whole number in decimal digits")
        if not self.least <= int(text) <= self.most:
            raise ValueError(f"is out of range: write a number from {self.least} to {self.most}")
        return int(text)

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


class Amount(Word):
    """A decimal number that is not negative."""

    what = "a number"

    def parse(self, text: str) -> float:
        """See `Word.parse`."""
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
            raise ValueError("is not a decimal number, such as 0.90")
        return float(text)

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        return {"type": "number", "minimum": 0}


class Boolean(Word):
    """`true` or `false`."""

    what = "true or false"

    def parse(self, text: str) -> bool:
        """See `Word.parse`."""
        if text not in ("true", "false"):
            raise ValueError("is neither `true` nor `false`")
        return text == "true"

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        return {"type": "boolean"}


class Choice(Word):
    """One word of a closed set."""

    what = "one word"

    def __init__(self, words: type[StrEnum], later: Mapping[str, str] | None = None) -> None:
        """`words`: the set, in the order messages list it; `later`: words of later versions, and their need."""
        self.words = words
        self.later = later or {}

    def parse(self, text: str) -> StrEnum:
        """See `Word.parse`."""
        try:
            return self.words(text)
        except ValueError:
            lacks = self.later.get(text)
            reason = f"is refused, this version does not have {lacks}" if lacks else "is not known here"
            raise ValueError(f"{reason}: write {alternatives(self.words)}") from None

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        return {"enum": [str(word) for word in self.words]}


class Only(Word):
    """A setting of which this version knows a single value."""

    what = "one word"

    def __init__(self, value: int | str, lacks: str) -> None:
        """`value`: the one there is; `lacks`: what the others would need."""
        self.only, self.lacks = value, lacks

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`; a table here is of a later version too."""
        if isinstance(node, Text):
            return super().read(node, name, findings)
        findings.add(node.place, f"`{name}`: {self.refusal()}")
        return Read(None, node.place, failed=True)

    def refusal(self) -> str:
        """Says so honestly."""
        return f"this version does not have {self.lacks}: write {self.only}, or leave the setting out"

    def parse(self, text: str) -> int | str:
        """See `Word.parse`."""
        if text != str(self.only):
            raise ValueError(f"is refused, {self.refusal()}")
        return self.only

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        return {"const": self.only}


class Matching(Word):
    """A text in one form, read by a function."""

    def __init__(
        self,
        what: str,
        parse: Callable[[str], Any],
        *,
        pattern: str = "",
        secret: bool = False,
        empty: bool = False,
    ) -> None:
        """`parse` raises ValueError; `pattern`: what the schema can say of it; `empty`: may be empty."""
        self.what, self.read_text, self.pattern = what, parse, pattern
        self.secret, self.empty = secret, empty

    def parse(self, text: str) -> Any:
        """See `Word.parse`."""
        return self.read_text(text) if text else ""

    def written(self) -> JsonSchema:
        """See `Word.written`."""
        if self.pattern:
            return {"type": "string", "pattern": self.pattern}
        return {"type": "string"} if self.empty else {"type": "string", "minLength": 1}


class Off(Kind):
    """`off`, read as a value of its own, or another kind."""

    def __init__(self, kind: Kind, value: Any) -> None:
        """`value`: what `off` is read as."""
        self.kind, self.value = kind, value

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`."""
        if isinstance(node, Text) and node.text == "off" and not node.broken:
            return Read(self.value, node.place)
        return self.kind.read(node, name, findings)

    def schema(self) -> JsonSchema:
        """See `Kind.schema`."""
        return {"anyOf": [{"const": "off"}, self.kind.schema()]}


class ListOf(Kind):
    """A list of one kind, read as a tuple; a single one may stand without brackets where `single`."""

    def __init__(self, kind: Kind, *, single: bool = False, empty: bool = True) -> None:
        """`empty`: whether `[]` makes sense."""
        self.kind, self.single, self.empty = kind, single, empty

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`."""
        nodes = self.nodes(node)
        if nodes is None:
            findings.add(node.place, f"`{name}` is a list: write [ ] around it, or `- ` before each")
            return Read(None, node.place, failed=True)
        if not nodes and not self.empty:
            findings.add(node.place, f"`{name}` is empty: it needs at least one entry")
            return Read(None, node.place, failed=True)
        read = [self.kind.read(each, name, findings) for each in nodes]
        failed = any(each.failed for each in read)
        return Read(tuple(each.value for each in read), node.place, failed=failed)

    def nodes(self, node: Node) -> tuple[Node, ...] | None:
        """What is to be read, one by one."""
        if isinstance(node, Items):
            return node.nodes
        broken = isinstance(node, Text) and node.broken
        return (node,) if self.single or broken else None

    def schema(self) -> JsonSchema:
        """See `Kind.schema`."""
        each = self.kind.schema()
        listed: JsonSchema = {"type": "array", "items": each}
        if not self.empty:
            listed["minItems"] = 1
        return {"anyOf": [each, listed]} if self.single else listed


def alternatives(words: Mapping[str, Any] | type[StrEnum]) -> str:
    """`a`, `b` or `c`."""
    *most, last = (f"`{word}`" for word in words)
    return f"{', '.join(most)} or {last}" if most else last
