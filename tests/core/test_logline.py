"""Lines of the log: their two forms, levels, and what of an exception or a library never gets into one."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import config
from sidecar.config import LogFormat, LogLevel
from sidecar.logline import Foreign, Log, Value


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def log_to(stream: io.StringIO, form: LogFormat = LogFormat.JSON, level: LogLevel = LogLevel.INFO) -> Log:
    return Log(config.Log(level=level, format=form), stream)


def one_line(stream: io.StringIO) -> str:
    text = stream.getvalue()
    assert text.endswith("\n")
    (line,) = text.splitlines()
    return line


def failing(text: str) -> Exception:
    """An exception that was raised, with its traceback."""
    try:
        raise ValueError(text)
    except ValueError as exc:
        return exc


def test_json_line_has_time_level_event_and_values_in_order() -> None:
    stream = io.StringIO()
    log_to(stream).info("request", route="mail", status=200, ms=1.5, ready=True, reason=None, note="caf\xe9 \u2028\n")
    line = json.loads(one_line(stream))
    assert list(line) == ["time", "level", "event", "route", "status", "ms", "ready", "note"]
    assert line["time"].endswith("Z")
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    del line["time"]
    assert line == {
        "level": "info",
        "event": "request",
        "route": "mail",
        "status": 200,
        "ms": 1.5,
        "ready": True,
        "note": "caf\xe9 \u2028\n",
    }


def test_text_line_is_for_eyes_and_quotes_what_needs_it() -> None:
    stream = io.StringIO()
    log_to(stream, LogFormat.TEXT).warning("store", reason="no reply in time", n=3, sign='a="b"', plain="x", none=None)
    _time, rest = one_line(stream).split(" ", 1)
    assert rest == 'WARNING store reason="no reply in time" n=3 sign="a=\\"b\\"" plain=x'


@pytest.mark.parametrize(
    ("form", "stream", "as_json"),
    [
        (LogFormat.AUTO, io.StringIO(), True),
        (LogFormat.AUTO, Terminal(), False),
        (LogFormat.JSON, Terminal(), True),
        (LogFormat.TEXT, io.StringIO(), False),
    ],
    ids=["auto-file", "auto-terminal", "json", "text"],
)
def test_form_is_text_on_a_terminal_and_json_elsewhere(form: LogFormat, stream: io.StringIO, as_json: bool) -> None:
    log_to(stream, form).info("start")
    assert one_line(stream).startswith("{") is as_json


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        (LogLevel.DEBUG, ["debug", "info", "warning", "error"]),
        (LogLevel.INFO, ["info", "warning", "error"]),
        (LogLevel.WARNING, ["warning", "error"]),
        (LogLevel.ERROR, ["error"]),
    ],
)
def test_lines_below_the_level_are_left_out(level: LogLevel, seen: list[str]) -> None:
    stream = io.StringIO()
    log = log_to(stream, level=level)
    log.debug("a")
    log.info("a")
    log.warning("a")
    log.error("a")
    assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == seen
    assert log.debugs is (level is LogLevel.DEBUG)


@given(
    st.dictionaries(
        st.sampled_from(["route", "note", "reason"]),
        st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    ),
    st.sampled_from([LogFormat.JSON, LogFormat.TEXT]),
)
def test_any_value_stays_within_one_line_without_control_bytes(values: dict[str, Value], form: LogFormat) -> None:
    stream = io.StringIO()
    log_to(stream, form).write(LogLevel.INFO, "request", values)
    line = one_line(stream)
    # A value can neither begin a line of its own nor steer the terminal of who reads it.
    assert not any(unicodedata.category(sign) in ("Cc", "Zl", "Zp") for sign in line if sign != "\x7f")
    if form is LogFormat.JSON:
        read = json.loads(line)
        assert {name: read.get(name) for name in values} == values


def test_exception_gives_type_and_places_and_never_its_text() -> None:
    for form in (LogFormat.JSON, LogFormat.TEXT):
        stream = io.StringIO()
        log_to(stream, form).error("exchange-failed", failing("K1 ada@example.test"), route="mail")
        line = one_line(stream)
        assert "ValueError" in line
        assert "failing:" in line
        assert "mail" in line
        assert "ada" not in line
        assert "K1" not in line


def test_exception_of_a_chain_tells_no_text_of_any_link() -> None:
    try:
        try:
            raise KeyError("ada@example.test")
        except KeyError as exc:
            raise RuntimeError("K1") from exc
    except RuntimeError as exc:
        stream = io.StringIO()
        log_to(stream).error("exchange-failed", exc)
    assert "ada" not in stream.getvalue()
    assert "K1" not in stream.getvalue()


def test_error_without_an_exception_has_no_places() -> None:
    stream = io.StringIO()
    log_to(stream).error("end", message="2 left")
    assert "exception" not in json.loads(one_line(stream))


@pytest.mark.parametrize("end", ["closed", "broken"])
def test_log_that_nobody_reads_fails_no_mail(end: str) -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    stream = Broken() if end == "broken" else io.StringIO()
    log = log_to(stream)
    if end == "closed":
        stream.close()
    log.info("request")


def foreign(log: Log) -> logging.Logger:
    """A library's logger that ends in ours."""
    logger = logging.getLogger("library.test")
    logger.handlers = [Foreign(log)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    return logger


def test_library_line_tells_where_and_never_its_text() -> None:
    stream = io.StringIO()
    foreign(log_to(stream)).warning("Invalid header: %s", "Authorization: hush-hush")
    line = json.loads(one_line(stream))
    assert (line["event"], line["logger"]) == ("library", "library.test")
    assert line["place"].startswith("test_logline:")
    assert "hush" not in stream.getvalue()
    assert "Invalid" not in stream.getvalue()


def test_library_exception_tells_its_type_and_never_its_text() -> None:
    stream = io.StringIO()
    foreign(log_to(stream)).error("hush-hush", exc_info=failing("ada@example.test"))
    line = json.loads(one_line(stream))
    assert (line["level"], line["exception"]) == ("error", "ValueError")
    assert "hush" not in stream.getvalue()
    assert "ada" not in stream.getvalue()


def test_library_chatter_below_warning_is_left_out() -> None:
    stream = io.StringIO()
    logger = foreign(log_to(stream, level=LogLevel.DEBUG))
    logger.info("a")
    logger.debug("b")
    assert stream.getvalue() == ""
