"""A configuration file becomes a `Config`, or an error that names all of its mistakes with line and column.

`tree.py` knows YAML, `values.py` and `forms.py` the kinds of values, `settings.py` which settings there are,
`merge.py` how layers become a route, `checks.py` what contradicts what.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from sidecar.checks import Judged, check
from sidecar.config import Admin, Config, Limits, Log, Store
from sidecar.errors import ConfigError, Finding
from sidecar.merge import Layers, relocate, route
from sidecar.presets import Preset, presets
from sidecar.settings import ROOT
from sidecar.tree import TOP, Findings, Place, parse
from sidecar.values import Read, Values

GENERIC = "generic"


def read_file(path: str, environ: Mapping[str, str]) -> Config:
    """The configuration in a file.

    Raises: ConfigError with every mistake; a file that cannot be read is one.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as exc:
        reason = (exc.strerror or "it cannot be read").lower()
        raise ConfigError([Finding(1, 1, f"cannot read the file: {reason}", path)]) from exc
    return _read(data, path, environ)


def read_text(text: str, path: str, environ: Mapping[str, str]) -> Config:
    """The configuration in a text; `path` is what messages call it.

    Raises: ConfigError with every mistake.
    """
    return _read(text.encode("utf-8", "surrogatepass"), path, environ)


def _read(data: bytes, path: str, environ: Mapping[str, str]) -> Config:
    findings = Findings(path)
    tree = parse(data, findings, environ)
    if tree is None:
        raise ConfigError(sorted(findings.found))
    values = ROOT.read(tree, "", findings)
    top = Layers(TOP, values)
    judged = _routes(top, findings)
    config = top.fill(
        Config,
        routes=tuple(each.route for each in judged),
        admin=top.fill(Admin, "admin."),
        store=top.fill(Store, "store."),
        log=top.fill(Log, "log."),
        limits=top.fill(Limits, "limits."),
        source=path,
    )
    _certificates(top, findings, "store.ca")
    warnings = check(config, judged, top, findings)
    findings.settle()
    return dataclasses.replace(config, warnings=tuple(warnings))


def _routes(top: Layers, findings: Findings) -> list[Judged]:
    defaults: Values = top.get("defaults", {})
    routes: Mapping[str, Read] = top.get("routes", {})
    judged = []
    for name, read in routes.items():
        if read.failed:
            continue
        layers = Layers(read.place, read.value, defaults)
        preset = _preset(layers, findings)
        layers = Layers(read.place, read.value, defaults, relocate(preset.values, read.place))
        _certificates(layers, findings)
        judged.append(Judged(route(name, layers, preset, findings), layers))
    return judged


def _preset(layers: Layers, findings: Findings) -> Preset:
    name = layers.get("provider", GENERIC)
    known = presets()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else f"; there are {', '.join(known)}"
    findings.add(layers.where("provider"), f"`provider`: this version has no such preset{hint}")
    # Marked as unread, so that nothing is said to be lacking which the right preset may bring.
    failed = {"provider": Read(None, layers.where("provider"), failed=True)}
    return Preset(name, name, "", (), {}, failed, Place(1, 1))


def _certificates(layers: Layers, findings: Findings, name: str = "ca") -> None:
    path = layers.get(name, "")
    if not path:
        return
    import ssl  # late: `healthcheck` reads the configuration every few seconds, and most have no `ca`

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        findings.add(layers.where(name), f"`{name}`: the file holds no certificates in PEM form")
    except OSError:
        findings.add(layers.where(name), f"`{name}`: the file cannot be read")
