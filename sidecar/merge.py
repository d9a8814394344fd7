"""Layers of settings become routes: default < preset < `defaults:` < route < an entry of `sends`.

Later layers win setting by setting, inner tables included. What contradicts what is the business of `checks.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from sidecar.config import (
    STATUSES_2XX,
    FingerprintRules,
    KeyRules,
    Native,
    Origin,
    Policy,
    ProblemNames,
    Retry,
    Route,
    Send,
    Timeout,
    Twins,
    Unknown,
)
from sidecar.forms import origin
from sidecar.policies import SendEntry
from sidecar.presets import Preset
from sidecar.tree import Findings, Place
from sidecar.values import Read, Values

T = TypeVar("T")

LOST_5XX = frozenset(range(500, 600))


class Layers:
    """Settings of several layers, the most specific first, and where they were written."""

    def __init__(self, place: Place, *layers: Values) -> None:
        """`place`: where the whole stands, for what nobody wrote."""
        self.place = place
        self.layers = layers

    def above(self, layer: Values) -> Layers:
        """The same with one more specific layer on top."""
        return Layers(self.place, layer, *self.layers)

    def find(self, name: str) -> Read | None:
        """The setting as the most specific layer has it, unless that one could not be read."""
        for layer in self.layers:
            if name in layer:
                return None if layer[name].failed else layer[name]
        return None

    def get(self, name: str, default: T) -> T:
        """The setting's value."""
        found = self.find(name)
        return default if found is None else found.value

    def where(self, *names: str) -> Place:
        """Where the first of these settings that somebody wrote stands."""
        found = (self.find(name) for name in names)
        return next((read.place for read in found if read is not None), self.place)

    def broken(self, *names: str) -> bool:
        """Whether one of these settings, or its table, could not be read: then nothing follows from them."""
        wanted = {*names, *(name.partition(".")[0] for name in names)}
        return any(name in layer and layer[name].failed for layer in self.layers for name in wanted)

    def fill(self, kind: type[T], prefix: str = "", **given: Any) -> T:
        """A dataclass of `config.py`: its fields from the settings of these names, or `given`, or its defaults."""
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # T is one of config.py's
            name = prefix + field.name.removesuffix("_s").removesuffix("_bytes")
            found = self.find(name)
            if found is not None and field.name not in given:
                given[field.name] = found.value
        return kind(**given)


def relocate(values: Values, place: Place) -> Values:
    """The layer of a preset, which in the user's file stands where the route does."""
    return {name: Read(_relocated(read.value, place), place, read.failed) for name, read in values.items()}


def _relocated(value: Any, place: Place) -> Any:
    """The policies within `sends` have places too."""
    if isinstance(value, tuple):
        return tuple(_relocated(each, place) for each in value)
    if isinstance(value, SendEntry):
        return SendEntry(value.template, relocate(value.own, place))
    return value


def policy(layers: Layers, native: Native | None, findings: Findings) -> Policy:
    """The policy of a route or of one entry of its `sends`."""
    guarded = native is not None and native.twins is Twins.GUARDED
    unknown = layers.get("unknown", Unknown.RESEND if guarded else Unknown.HOLD)
    final, lost = _statuses(layers, unknown, findings)
    retry = layers.fill(Retry, "retry.")
    return layers.fill(Policy, unknown=unknown, final=final, lost=lost, retry=retry)


def _statuses(layers: Layers, unknown: Unknown, findings: Findings) -> tuple[frozenset[int], frozenset[int]]:
    """What is final and what is lost. What somebody wrote is taken from the default of the other."""
    wrote_final, wrote_lost = layers.find("final"), layers.find("lost")
    # Under `resend` a retry is forwarded anyway, so a 5xx is better not believed to mean "not sent".
    default_lost = LOST_5XX if unknown is Unknown.RESEND else Policy().lost
    final = STATUSES_2XX | (wrote_final.value if wrote_final else Policy().final)
    lost = wrote_lost.value if wrote_lost else default_lost - final
    if wrote_final and wrote_lost and (both := final & lost):
        listed = ", ".join(str(status) for status in sorted(both)[:3])
        more = " and others" if len(both) > 3 else ""
        findings.add(
            layers.where("lost"),
            f"`final` and `lost` both hold {listed}{more}: an answer settles a key or it does not",
        )
    return (final if wrote_final else final - lost), lost


def _native(layers: Layers, findings: Findings) -> Native | None:
    if not layers.get("native.enabled", default=False):
        return None
    lacking = [
        f"`{name}`"
        for name in ("field", "window")
        if not layers.find(f"native.{name}") and not layers.broken(f"native.{name}")
    ]
    if lacking:
        findings.add(layers.where("native.enabled"), f"`native` needs {' and '.join(lacking)}")
        return None
    if layers.broken("native.field", "native.window"):
        return None
    return layers.fill(Native, "native.")


def _upstream(layers: Layers, preset: Preset, findings: Findings) -> Origin:
    given = layers.find("upstream")
    if given is not None:
        return given.value  # type: ignore[no-any-return]  # an Origin, by settings.py
    nothing = Origin("https", "invalid", 443)
    if layers.broken("upstream", "region", "provider"):
        return nothing
    region = layers.get("region", "")
    text = preset.hosts.get(region or "default") or preset.hosts.get("*" if region else "", "")
    if text:
        return origin(text.replace("{region}", region))
    if region:
        message = f"the preset {preset.name} has no host for this region: leave it out, or write `upstream`"
    elif preset.hosts:
        message = f"the preset {preset.name} needs a `region`, or write `upstream`"
    else:
        message = "the route needs `upstream: https://...`, the provider it stands for"
    findings.add(layers.where("region"), message)
    return nothing


def _names(layers: Layers, mismatch: int) -> ProblemNames:
    """The provider's words for our problems, merged slug by slug."""
    merged: dict[str, tuple[int, str]] = {}
    for layer in reversed(layers.layers):
        names: Mapping[str, Read] = layer["names"].value if "names" in layer else {}
        for slug, read in names.items():
            if not read.failed and all(name in read.value for name in ("status", "name")):
                merged[slug] = (read.value["status"].value, read.value["name"].value)
    if "key-reused" in merged:  # one setting decides, so that the two never disagree
        merged["key-reused"] = (mismatch, merged["key-reused"][1])
    return ProblemNames(tuple((slug, *rest) for slug, rest in sorted(merged.items())))


def _price(layers: Layers) -> tuple[float, str] | None:
    found: Values = layers.get("price_per_1000", {})
    amount, currency = found.get("amount"), found.get("currency")
    if not amount or not currency or amount.failed or currency.failed:
        return None
    return amount.value, currency.value


def sends_of(layers: Layers) -> tuple[tuple[Layers, SendEntry], ...]:
    """The entries of `sends`, each with its own policies on top of the route's."""
    found = layers.find("sends")
    entries: tuple[SendEntry, ...] = () if found is None else found.value
    return tuple((layers.above(entry.own), entry) for entry in entries)


def route(name: str, layers: Layers, preset: Preset, findings: Findings) -> Route:
    """The route `name` with all its layers merged; what is wrong is collected in `findings`."""
    native = _native(layers, findings)
    sends = sends_of(layers)
    if not sends and not layers.broken("sends", "provider"):
        message = "the route needs `sends`: what sends mail, such as [POST /v1/send]"
        findings.add(layers.place, message)
    mismatch = layers.get("fingerprint.mismatch", FingerprintRules().mismatch)
    return layers.fill(
        Route,
        name=name,
        provider=preset.name,
        path=layers.get("path", f"/{name}"),
        upstream=_upstream(layers, preset, findings),
        sends=tuple(
            Send(
                text=entry.template.text,
                method=entry.template.method,
                segments=entry.template.segments,
                discriminator=entry.template.discriminator,
                policy=policy(above, native, findings),
            )
            for above, entry in sends
        ),
        native=native,
        key=layers.fill(KeyRules, "key."),
        fingerprint=layers.fill(FingerprintRules, "fingerprint."),
        policy=policy(layers, native, findings),
        timeout=layers.fill(Timeout, "timeout."),
        names=_names(layers, mismatch),
        price_per_1000=_price(layers),
    )
