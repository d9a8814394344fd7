"""The provider catalogue: `presets.yaml`, read by the same strict reader as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from sidecar.settings import PRESETS
from sidecar.tree import Findings, Place, parse
from sidecar.values import Values

FILE = "presets.yaml"


@dataclass(frozen=True, slots=True)
class Preset:
    """One provider. `values`: settings of a route; `hosts`: origins by region, see `settings.PRESET`."""

    name: str
    title: str
    source: str
    sdk: tuple[str, ...]
    hosts: Mapping[str, str]
    values: Values
    place: Place


def text() -> str:
    """The catalogue as it is shipped."""
    return files("sidecar").joinpath(FILE).read_text(encoding="utf-8")


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name.

    Raises: ConfigError when the shipped file is damaged.
    """
    return read(text())


def read(catalogue: str) -> Mapping[str, Preset]:
    """The presets of a catalogue.

    Raises: ConfigError with every mistake in it.
    """
    findings = Findings(FILE)
    tree = parse(catalogue.encode(), findings, {})
    findings.settle()
    assert tree is not None
    found = PRESETS.read(tree, "presets", findings)
    findings.settle()
    return {name: _preset(name, read.value, read.place) for name, read in found.value.items()}


def _preset(name: str, values: Values, place: Place) -> Preset:
    own = dict(values)
    sdk = own.pop("sdk", None)
    hosts = own.pop("hosts", None)
    return Preset(
        name=name,
        title=own.pop("title").value,
        source=own.pop("source").value,
        sdk=sdk.value if sdk else (),
        hosts={region: each.value for region, each in hosts.value.items()} if hosts else {},
        values=own,
        place=place,
    )


def shown(name: str) -> str:
    """One preset as it stands in the catalogue, comments included.

    Raises: KeyError without such a preset.
    """
    lines = text().splitlines()
    first = presets()[name].place.line - 1
    later = [each.place.line - 1 for each in presets().values() if each.place.line - 1 > first]
    return "\n".join(lines[first : min(later, default=len(lines))]).rstrip() + "\n"
