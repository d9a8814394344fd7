"""Tables of settings: which names may stand in one, what is said about others, and its JSON Schema."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.tree import Entries, Findings, Node, Text
from sidecar.values import JsonSchema, Kind, Read, Values


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name, its kind, and a sentence about it for people."""

    name: str
    kind: Kind | Table
    about: str


class Table:
    """Settings that stand together. Inner tables are read into dotted names, so that layers merge one by one."""

    def __init__(
        self,
        *settings: Setting,
        later: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        switch: bool = False,
        required: tuple[str, ...] = (),
    ) -> None:
        """`later`: names of later versions, and what they need; `elsewhere`: names, and where they stand.

        `switch`: `off` may stand for the whole table; then `<name>.enabled` is read too. `required`: names
        that must stand in it.
        """
        self.settings = {setting.name: setting for setting in settings}
        self.later = later or {}
        self.elsewhere = elsewhere or {}
        self.switch = switch
        self.required = required

    def read(self, node: Node, name: str, findings: Findings) -> Values:
        """All settings of the table `name` (empty at the top), by dotted names."""
        if isinstance(node, Entries):
            values = self._entries(node, name, findings)
            if self.switch:
                values[f"{name}.enabled"] = Read(True, node.place)
            return values
        if self.switch and isinstance(node, Text) and node.text == "off":
            return {f"{name}.enabled": Read(False, node.place)}
        if not (isinstance(node, Text) and node.broken):
            findings.add(node.place, self._no_table(node, name))
        return {name: Read(None, node.place, failed=True)}

    def _no_table(self, node: Node, name: str) -> str:
        if isinstance(node, Text) and node.null:
            return f"`{name}` has no value: write settings under it, or leave it out"
        also = ", or `off`" if self.switch else ""
        return f"`{name}` is a table: write settings under it{also}"

    def _entries(self, node: Entries, name: str, findings: Findings) -> Values:
        values: Values = {}
        for key, child in node.pairs:
            setting = self.settings.get(key.text)
            if setting is None:
                findings.add(key.place, self.unknown(key, name))
                continue
            dotted = f"{name}.{setting.name}" if name else setting.name
            if isinstance(setting.kind, Table):
                values.update(setting.kind.read(child, dotted, findings))
            else:
                values[dotted] = setting.kind.read(child, dotted, findings)
        written = {key.text for key, _ in node.pairs}
        for lacking in self.required:
            if lacking not in written:
                findings.add(node.place, f"`{f'{name}.' if name else ''}{lacking}` is missing: write it")
        return values

    def unknown(self, key: Text, name: str) -> str:
        """What to say about a name that is not of this table."""
        if lacks := self.later.get(key.text):
            return f"`{key.shown}`: this version does not have {lacks}: leave the setting out"
        if place := self.elsewhere.get(key.text):
            return f"`{key.shown}` {place}"
        inside = f" in `{name}`" if name else ""
        known = [*self.settings, *self.elsewhere]
        # Anything is near to a name of one or two letters.
        near = difflib.get_close_matches(key.text.lower(), known, n=1) if len(key.text) > 2 else []
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"there is no setting `{key.shown}`{inside}{hint}"

    def schema(self) -> JsonSchema:
        """The table in JSON Schema 2020-12."""
        properties = {
            name: {"description": setting.about, **setting.kind.schema()} for name, setting in self.settings.items()
        }
        table: JsonSchema = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        if self.required:
            table["required"] = list(self.required)
        return {"anyOf": [{"const": "off"}, table]} if self.switch else table


class Nested(Kind):
    """A table whose settings are kept together, as one value: `Values`."""

    def __init__(self, table: Table, ref: str = "") -> None:
        """`ref`: the name under `$defs` where the schema has the table."""
        self.table, self.ref = table, ref

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`; names are told without that of the outer table."""
        if not isinstance(node, Entries):
            failed = self.table.read(node, name, findings)
            return Read({}, node.place, failed=bool(failed))
        return Read(self.table.read(node, "", findings), node.place)

    def schema(self) -> JsonSchema:
        """See `Kind.schema`."""
        return {"$ref": f"#/$defs/{self.ref}"} if self.ref else self.table.schema()


class Named(Kind):
    """A table whose names the user chooses, read as a dict from name to `Read`, with the place of the name."""

    def __init__(
        self,
        kind: Kind,
        what: str,
        pattern: str,
        *,
        empty: bool = True,
        hint: str = "use letters, digits, `-` and `_`",
    ) -> None:
        """`what`: what is named; `pattern`: a regular expression that a whole name matches; `hint`: in words."""
        self.kind, self.what, self.pattern = kind, what, pattern
        self.empty, self.hint = empty, hint

    def read(self, node: Node, name: str, findings: Findings) -> Read:
        """See `Kind.read`."""
        if not isinstance(node, Entries) or not (node.pairs or self.empty):
            if not (isinstance(node, Text) and node.broken):
                findings.add(node.place, f"`{name}` needs at least one {self.what} under it")
            return Read({}, node.place, failed=True)
        read: dict[str, Read] = {}
        for key, child in node.pairs:
            self._name(key, findings)
            value = self.kind.read(child, key.text, findings)
            read[key.text] = Read(value.value, key.place, failed=value.failed)
        return Read(read, node.place)

    def _name(self, key: Text, findings: Findings) -> None:
        if not re.fullmatch(self.pattern, key.text):
            findings.add(key.place, f"`{key.shown}` cannot name a {self.what}: {self.hint}")

    def schema(self) -> JsonSchema:
        """See `Kind.schema`."""
        schema: JsonSchema = {
            "type": "object",
            "propertyNames": {"pattern": f"^{self.pattern}$"},
            "additionalProperties": self.kind.schema(),
        }
        if not self.empty:
            schema["minProperties"] = 1
        return schema
