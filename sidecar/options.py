"""What the commands of the command line share: where the configuration is, and where a running sidecar is asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sidecar.config import Admin, Config

Command = TypeVar("Command", bound=Callable[..., Any])


def config_option(command: Command) -> Command:
    """`-c`, else $SIDECAR_CONFIG, else ./config.yaml."""
    return click.option(
        "-c",
        "--config",
        "path",
        metavar="FILE",
        envvar="SIDECAR_CONFIG",
        default="config.yaml",
        help="Configuration. Default: $SIDECAR_CONFIG, else ./config.yaml.",
    )(command)


def admin_option(command: Command) -> Command:
    """`--admin`, else $SIDECAR_ADMIN: where a running sidecar is asked, whatever its file says by now."""
    return click.option(
        "--admin",
        metavar="ADDRESS",
        envvar="SIDECAR_ADMIN",
        default="",
        help="Ask here (host:port or unix:/path) and read no configuration; the token is $SIDECAR_ADMIN_TOKEN.",
    )(command)


def running(path: str, admin: str) -> Config:
    """The configuration that says where a running sidecar is asked: a file's, or of `--admin` alone.

    Raises: ConfigError; click.UsageError for an address that is none.
    """
    if not admin:
        return read(path)
    from sidecar.forms import address

    try:
        where = address(admin)
    except ValueError as exc:
        raise click.UsageError(f"--admin {exc}") from exc
    return Config(routes=(), admin=Admin(listen=(where,), token=os.environ.get("SIDECAR_ADMIN_TOKEN", "")))


def read(path: str) -> Config:
    """The configuration in a file. Raises: ConfigError."""
    from sidecar.reader import read_file

    return read_file(path, os.environ)
