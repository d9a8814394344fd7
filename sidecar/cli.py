"""The command line: prints and exits, decides nothing. Every command imports only what it needs.

Exit codes: 0 fine, 2 bad configuration or usage, 1 anything else. Errors are one line each, never a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from sidecar import __version__
from sidecar.config import Config
from sidecar.errors import ConfigError, SidecarError
from sidecar.keys_cli import keys
from sidecar.options import admin_option, config_option, read, running

FINE, FAILED, BAD_USAGE = 0, 1, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sidecar", message="%(prog)s %(version)s")
def commands() -> None:
    """A local reverse proxy that gives any e-mail API idempotency."""


@commands.command()
@config_option
def serve(path: str) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    config = read(path)
    from sidecar.app import serve as serve_until_stopped

    return serve_until_stopped(config, reread=lambda: read(path))


@commands.command()
@config_option
@click.option("--connect", is_flag=True, help="Also try every upstream and the store.")
def check(path: str, connect: bool) -> int:
    """Check the configuration and print what it means."""
    from sidecar.report import configuration

    config = read(path)
    for line in configuration(config):
        click.echo(line)
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    return _try_connections(config) if connect else FINE


def _try_connections(config: Config) -> int:
    from sidecar import probe

    tried: list[tuple[str, Callable[[], object]]] = [
        (f"upstream {route.upstream} of route {route.name}", lambda route=route: probe.upstream(route))  # type: ignore[misc]
        for route in config.routes
    ]
    if config.store.url.startswith("embedded:"):
        click.echo("store: embedded, started by `serve`; not tried")
    else:
        tried.append(("store", lambda: probe.store(config)))
    code = FINE
    for what, attempt in tried:
        try:
            attempt()
        except probe.ProbeError as exc:
            click.echo(f"{what}: {exc}", err=True)
            code = FAILED
        else:
            click.echo(f"{what}: reached")
    return code


@commands.command()
@click.argument("name", required=False)
def providers(name: str | None) -> int:
    """Print the provider catalogue, or one preset of it."""
    from sidecar import presets, report

    if name is None:
        for line in report.providers():
            click.echo(line)
        return FINE
    if name not in presets.presets():
        raise click.UsageError(f"there is no preset {name}; there are {', '.join(presets.presets())}")
    click.echo(presets.shown(name), nl=False)
    return FINE


@commands.command()
def demo() -> int:
    """Show retries, a lost answer and twins ending as one mail. Needs no account and no Redis."""
    from sidecar import demo as story

    return story.run()


@commands.command("stand-in")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=8027, show_default=True, type=click.IntRange(0, 65535), help="0: any free port.")
@click.option(
    "--mode",
    default="ok",
    show_default=True,
    metavar="MODE",
    help="What a mail gets: ok, slow, fail, refuse, busy, lost, cut or reset.",
)
@click.option("--delay", default="0s", show_default=True, metavar="TIME", help="Before every answer, such as 500ms.")
@click.option("--native", is_flag=True, help="Honour Idempotency-Key, as some providers do.")
def stand_in(host: str, port: int, mode: str, delay: str, native: bool) -> int:
    """Run a provider that only counts: for tests of retry code. GET /_accepted says what it accepted."""
    from sidecar.values import Duration

    try:
        delay_s = Duration(zero=True).parse(delay)
    except ValueError as exc:
        raise click.UsageError(f"--delay: {delay} {exc}") from None
    from sidecar import stand_in as provider

    if mode not in list(provider.Mode):
        raise click.UsageError(f"--mode: there is no {mode}; there are {', '.join(provider.Mode)}")
    return provider.run(host, port, mode, delay_s, native)


@commands.command()
@config_option
@admin_option
@click.option("--json", "as_json", is_flag=True, help="Print the answer as it came.")
def stats(path: str, admin: str, as_json: bool) -> int:
    """Print what a running sidecar has counted."""
    from sidecar import probe

    found = probe.stats(running(path, admin))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return FINE
    for line in _table(found):
        click.echo(line)
    return FINE


def _table(found: dict[str, Any]) -> list[str]:
    lines = []
    for route, outcomes in sorted(found.get("outcomes", {}).items()):
        for outcome, count in sorted(outcomes.items()):
            lines.append(f"{route:<20} {outcome:<22} {count:>10}")
    for name, value in found.items():
        if isinstance(value, int | float | str):
            lines.append(f"{name:<43} {value:>10}")
    return lines


@commands.command()
@config_option
@admin_option
@click.option("--ready", is_flag=True, help="Ask /readyz: can it serve? Default: /livez, does it live?")
def healthcheck(path: str, admin: str, ready: bool) -> int:
    """Ask a running sidecar whether it is well."""
    from sidecar import probe

    probe.health(running(path, admin), ready=ready)
    return FINE


@commands.command()
def schema() -> int:
    """Print the JSON Schema of the configuration, for editors."""
    from sidecar.schema import schema as made

    click.echo(json.dumps(made(), indent=2))
    return FINE


commands.add_command(keys)


def _say(message: str) -> None:
    sys.stderr.write(f"sidecar: {message}\n")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        code = commands.main(arguments, prog_name="sidecar", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as exc:
        sys.stderr.write(f"{exc.format_message()}\n")
        return BAD_USAGE
    except click.ClickException as exc:
        _say(" ".join(exc.format_message().split()))
        return BAD_USAGE
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return BAD_USAGE
    except SidecarError as exc:
        _say(str(exc))
        return FAILED
    except (BrokenPipeError, KeyboardInterrupt, click.Abort):
        # Python writes what is left of stdout when it ends; nobody reads it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as exc:  # noqa: BLE001  # the outermost edge
        # Its text may quote a request or a secret; where it arose says enough.
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        _say(f"failed unexpectedly: {type(exc).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}")
        return FAILED
    return code if isinstance(code, int) else FINE


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())
