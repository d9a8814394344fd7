"""The log: one line an event, JSON or text, on standard error. It never sees keys, credentials or content."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from sidecar.config import Log as Settings
from sidecar.config import LogFormat, LogLevel

Value = str | int | float | bool | None
RANK = {LogLevel.DEBUG: 0, LogLevel.INFO: 1, LogLevel.WARNING: 2, LogLevel.ERROR: 3}


class Log:
    """Writes lines at or above a level."""

    def __init__(self, settings: Settings, stream: TextIO | None = None) -> None:
        """`stream`: standard error unless given."""
        self._stream = sys.stderr if stream is None else stream
        self._rank = RANK[settings.level]
        terminal = self._stream.isatty()
        self._json = settings.format is LogFormat.JSON or (settings.format is LogFormat.AUTO and not terminal)
        self.debugs = self._rank == 0

    def write(self, level: LogLevel, event: str, values: Mapping[str, Value]) -> None:
        """One line: time, level, event, and the values in their order; those that are None are left out."""
        if RANK[level] < self._rank:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Value] = {"time": now, "level": str(level), "event": event}
        line |= {name: value for name, value in values.items() if value is not None}
        text = json.dumps(line) if self._json else _text(line)
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads the log: no reason to fail a mail

    def debug(self, event: str, **values: Value) -> None:
        """A step of the walk, or another detail."""
        if self.debugs:
            self.write(LogLevel.DEBUG, event, values)

    def info(self, event: str, **values: Value) -> None:
        """Something that happened as it should."""
        self.write(LogLevel.INFO, event, values)

    def warning(self, event: str, **values: Value) -> None:
        """Something an operator should look at in time."""
        self.write(LogLevel.WARNING, event, values)

    def error(self, event: str, exc: BaseException | None = None, **values: Value) -> None:
        """Something broken. Of an exception only its type and places are written: its text may hold content."""
        if exc is not None:
            frames = traceback.extract_tb(exc.__traceback__)
            places = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-8:]))
            values = {"exception": type(exc).__name__, "places": places, **values}
        self.write(LogLevel.ERROR, event, values)


def _text(line: Mapping[str, Value]) -> str:
    head = f"{line['time']} {str(line['level']).upper():7} {line['event']}"
    rest = (f"{name}={_word(value)}" for name, value in line.items() if name not in ("time", "level", "event"))
    return " ".join((head, *rest))


def _word(value: Value) -> str:
    text = str(value)
    # Quoted where it could pose as another value, another line, or a command to the terminal.
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain else json.dumps(text)


class Foreign(logging.Handler):
    """Takes what the libraries log into our log: the kind of event, never its text, which may quote a request."""

    def __init__(self, log: Log) -> None:
        """`log`: where it goes."""
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """One line for one foreign record."""
        exc = record.exc_info[1] if record.exc_info else None
        self._log.error("library", exc, logger=record.name, place=f"{record.module}:{record.lineno}")
