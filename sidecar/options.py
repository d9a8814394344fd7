"""What the commands of the command line share: the option that names the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sidecar.config import Config

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


def read(path: str) -> Config:
    """The configuration in a file. Raises: ConfigError."""
    from sidecar.reader import read_file

    return read_file(path, os.environ)
