"""A copy of the package for one run, as it is or deliberately broken by patches of its text.

A run goes on with the files it began with, whatever is written into the working tree meanwhile.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import sidecar

PACKAGE = Path(sidecar.__file__).parent
VERSION = '__version__ = "'


@dataclass(frozen=True, slots=True)
class Patch:
    """In `file` of the package, `old` (which stands there exactly once) becomes `new`."""

    file: str
    old: str
    new: str


@contextmanager
def build(name: str = "", patches: Sequence[Patch] = ()) -> Iterator[Mapping[str, str]]:
    """The environment in which this build is the package `sidecar`; `name` goes into its version, for the log to tell.

    Raises: AssertionError where a patch does not fit any more.
    """
    directory = Path(mkdtemp(prefix="build-"))
    try:
        copy = directory / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        marks = [Patch("__init__.py", VERSION, f"{VERSION}{name}+")] if name else []
        for patch in (*patches, *marks):
            _apply(copy / patch.file, patch)
        yield {"PYTHONPATH": str(directory)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _apply(file: Path, patch: Patch) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(patch.old) == 1, f"{patch.file}: {text.count(patch.old)} places like {patch.old!r}"
    file.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
