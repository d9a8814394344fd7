"""README, docs, example and code say the same: every setting, problem, metric and command of one is in the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidecar import __version__, metrics
from sidecar.admin import problems_page
from sidecar.cli import commands
from sidecar.errors import PROBLEMS, Outcome
from sidecar.schema import schema

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / ".github").glob("*.md"))]
CASES = ROOT / "tests" / "README.md"


def section(title: str) -> str:
    """The text of one section of the README."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the body rows of a table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code(text: str) -> set[str]:
    """What stands in back-quotes."""
    return set(re.findall(r"`([^`]+)`", text))


def settings() -> tuple[set[str], set[str]]:
    """The names of the settings of the whole configuration, dotted, and those of a route."""
    whole = schema()
    top: set[str] = set()
    for name, part in whole["properties"].items():
        below = part.get("properties") if name not in ("routes", "defaults") else None
        top |= {f"{name}.{inner}" for inner in below} if below else {name}
    return top, _route(whole)


def _route(whole: dict[str, object]) -> set[str]:
    found: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            properties = node.get("properties")
            if isinstance(properties, dict) and "upstream_host" in properties:
                found.update(properties)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(whole)
    return found


def test_every_setting_is_in_the_readme_and_the_reverse() -> None:
    top, route = settings()
    named = set().union(*(code(row[0]) for row in rows(section("Settings"))))
    assert named - top - route == set(), "the README names settings that do not exist"
    assert (top | route) - named - {"routes"} == set(), "the README lacks settings"


def test_every_problem_is_in_the_readme_with_its_statuses() -> None:
    table = {row[0].strip("`"): row for row in rows(section("Problems"))}
    assert set(table) == set(PROBLEMS)
    for slug, problem in PROBLEMS.items():
        assert [int(number) for number in re.findall(r"\d{3}", table[slug][1])] == list(problem.statuses), slug
        if problem.sent is not None:
            assert table[slug][2].startswith(problem.sent), slug


def test_every_problem_has_a_section_on_the_page_our_link_leads_to() -> None:
    page = problems_page()
    assert all(f'id="{slug}"' in page for slug in PROBLEMS)


def test_every_metric_is_in_the_readme_and_the_reverse() -> None:
    named = {name for row in rows(section("Metrics, log, health")) for name in code(row[0])}
    declared = {f"{name}_total" for name in metrics.COUNTERS} | set(metrics.HISTOGRAMS) | set(metrics.GAUGES)
    assert named == declared


def test_every_outcome_is_in_the_readme() -> None:
    named = code(section("Metrics, log, health")) | code(section("Problems"))
    assert set(Outcome) <= named


def test_every_command_is_in_the_readme_and_the_reverse() -> None:
    words = re.findall(r"`sidecar ([a-z-]+)", README) + re.findall(r"`([a-z-]+)`", section("Run it"))
    assert set(commands.commands) <= set(words)
    named = {word for text in code(README) for word in re.findall(r"^sidecar ([a-z-]+)", text)}
    assert named <= set(commands.commands)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_between_documents_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text("utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_every_case_has_a_sentence_and_every_sentence_a_test() -> None:
    told = {row[0]: row for row in rows(CASES.read_text("utf-8")) if re.fullmatch(r"C\d+", row[0])}
    marked: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for ids in re.findall(r"mark\.case\(([^)]*)\)", path.read_text("utf-8")):
            for case in re.findall(r"C\d+", ids):
                marked.setdefault(case, set()).add(path.name)
    assert set(told) == set(marked)
    for case, row in told.items():
        assert len(row[1]) > 20, case
        assert any(name in row[2] for name in marked[case]), case


def test_every_test_that_the_cases_and_traps_name_exists() -> None:
    for place, name in re.findall(r"([\w/]+\.py)::(\w+)", CASES.read_text("utf-8")):
        assert f"def {name}(" in (ROOT / "tests" / place).read_text("utf-8"), f"{place}::{name}"


def test_version_of_the_program_has_its_place_in_the_changelog() -> None:
    changes = (ROOT / ".github" / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{__version__}]" in changes
