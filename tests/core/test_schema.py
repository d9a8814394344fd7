"""The JSON Schema, the example and the reader speak of the same settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from sidecar import tree
from sidecar.config import Config
from sidecar.policies import SENDS
from sidecar.reader import read_file
from sidecar.schema import schema
from sidecar.settings import PROBLEM_NAME, ROOT, ROUTE
from sidecar.tables import Nested, Table

ROOT_DIRECTORY = Path(__file__).parents[2]
EXAMPLE = ROOT_DIRECTORY / "config.example.yaml"


def settings(table: Table, prefix: str = "") -> Iterator[str]:
    for name, setting in table.settings.items():
        yield f"{prefix}{name}"
        kind = setting.kind
        if isinstance(kind, Table):
            yield from settings(kind, f"{prefix}{name}.")
        elif isinstance(kind, Nested) and not kind.ref:
            yield from settings(kind.table, f"{prefix}{name}.")


def plain(node: tree.Node) -> Any:
    """As YAML 1.2's core schema has it, which is what editors use."""
    if isinstance(node, tree.Entries):
        return {key.text: plain(value) for key, value in node.pairs}
    if isinstance(node, tree.Items):
        return [plain(each) for each in node.nodes]
    if node.text in ("true", "false"):
        return node.text == "true"
    for number in (int, float):
        try:
            return number(node.text)
        except ValueError:
            continue
    return node.text


def example() -> Any:
    findings = tree.Findings("example")
    parsed = tree.parse(EXAMPLE.read_bytes(), findings, {})
    assert parsed is not None
    return plain(parsed)


def written(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from written(value, f"{prefix}{name}.")


def test_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(schema())


def test_example_validates() -> None:
    Draft202012Validator(schema()).validate(example())


def test_example_is_read_without_a_warning_and_without_an_environment() -> None:
    config = read_file(str(EXAMPLE), {})
    assert config.warnings == ()
    assert config.store.url == "embedded:./data"


def test_example_tells_editors_of_its_schema() -> None:
    first = EXAMPLE.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")


def test_example_shows_the_defaults() -> None:
    config = read_file(str(EXAMPLE), {})
    wanted = Config(routes=config.routes, source=config.source)
    assert config == wanted
    mail = config.routes[1]
    bare = type(mail)(name="mail", path="/mail", upstream=mail.upstream, sends=mail.sends)
    shown_otherwise = {"host", "listen", "native", "fingerprint", "names", "price_per_1000"}
    differing = {name for name in type(mail).__slots__ if getattr(mail, name) != getattr(bare, name)}
    assert differing == shown_otherwise


def test_every_setting_is_in_the_example() -> None:
    document = example()
    assert set(settings(ROOT)) - {"routes"} <= set(written(document))
    assert set(settings(ROUTE)) <= set(written(document["routes"]["mail"]))
    name = next(iter(document["routes"]["mail"]["names"].values()))
    assert set(settings(PROBLEM_NAME)) == set(name)


def described(found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for part in (found, *found.get("anyOf", [])):
        for name, inner in part.get("properties", {}).items():
            assert inner["description"], f"{prefix}{name}"
            yield f"{prefix}{name}"
            yield from described(inner, f"{prefix}{name}.")


def test_every_setting_is_in_the_schema_with_a_description() -> None:
    made = schema()
    assert set(described(made)) == set(settings(ROOT))
    assert set(described(made["$defs"]["route"])) >= set(settings(ROUTE))
    entries = made["$defs"]["route"]["properties"]["sends"]["items"]
    assert set(described(entries)) == set(settings(SENDS.table))


ROUTES = {"mail": {"upstream": "https://a.test", "sends": ["POST /x"]}}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"routes": {}},
        {"routes": {"my mail": {}}},
        {"routes": ROUTES, "lisen": "x:1"},
        {"routes": ROUTES, "listen": "localhost"},
        {"routes": ROUTES, "workers": 65},
        {"routes": ROUTES, "drain": "15"},
        {"routes": ROUTES, "limits": {"request": "64MB"}},
        {"routes": ROUTES, "log": {"level": "loud"}},
        {"routes": ROUTES, "store": {"strict": "yes"}},
        {"routes": ROUTES, "defaults": {"ttl": "0s"}},
        {"routes": ROUTES, "defaults": {"final": [99]}},
        {"routes": ROUTES, "defaults": {"sends": ["/x"]}},
        {"routes": ROUTES, "defaults": {"sign": "aws"}},
        {"routes": ROUTES, "defaults": {"names": {"nothing": {"status": 409, "name": "x"}}}},
    ],
)
def test_schema_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(schema()).validate(wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"drain": "${DRAIN:-5s}"},
        {"limits": {"outstanding": "${N}", "request": 1000}},
        {"admin": {"listen": "off"}},
        {"defaults": {"fingerprint": "off", "native": "off", "replay_field": "off", "scope": "route"}},
        {"defaults": {"final": ["2xx", 400, "422"], "credential": ["A", "B"]}},
    ],
)
def test_schema_takes(right: dict[str, Any]) -> None:
    Draft202012Validator(schema()).validate({"routes": ROUTES, **right})
