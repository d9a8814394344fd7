"""What changes when the configuration is read again: routes and policies. The rest says that it needs a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sidecar.config import Config, Route
from sidecar.errors import ConfigError, StartError
from sidecar.logline import Log

FIXED = ("listen", "admin", "store", "workers", "limits", "drain_s", "log")
# What names a route's records, where it listens, and where it leads.
FIXED_OF_A_ROUTE = ("scope", "path", "host", "listen", "upstream")


def reload(read: Callable[[], Config], take: Callable[[Config], Config], log: Log) -> None:
    """Read the configuration and let it take effect; a file with mistakes changes nothing.

    `take` gives what is in force then; it may raise ConfigError or StartError, and then nothing has changed.
    """
    try:
        config = take(read())
    except ConfigError as exc:
        for finding in exc.findings:
            log.error("configuration", message=str(finding))
    except StartError as exc:
        log.error("configuration", message=str(exc))
    else:
        log.info("configuration", message="read again", routes=len(config.routes))
        return
    log.error("configuration", message="the configuration in force stays as it is")


def carried(now: Config, fresh: Config, warn: Callable[[str], None]) -> Config:
    """The configuration in force once `fresh` was read in place of `now`; `warn` takes what needs a restart."""
    old = {route.name: route for route in now.routes}
    routes = tuple(_carried(route, old.get(route.name), warn) for route in fresh.routes)
    for name in FIXED:
        if getattr(fresh, name) != getattr(now, name):
            warn(f"{name.removesuffix('_s')}: changed; needs a restart")
    return replace(now, routes=routes)


def _carried(route: Route, before: Route | None, warn: Callable[[str], None]) -> Route:
    if before is None:
        if route.listen:
            warn(f"routes.{route.name}.listen: needs a restart")
        return replace(route, listen=())
    for name in FIXED_OF_A_ROUTE:
        if getattr(route, name) != getattr(before, name):
            warn(f"routes.{route.name}.{name}: changed; needs a restart")
    return replace(
        route, scope=before.scope, path=before.path, host=before.host, listen=before.listen, upstream=before.upstream
    )
