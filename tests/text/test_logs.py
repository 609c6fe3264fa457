"""Log lines: one record is one line, without control codes, for any text of rows and exceptions."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

import outbox_app
from outbox_app.events import log_lines as event_lines
from outbox_app.management.base import OutboxCommand
from outbox_app.monitoring import log_lines
from outbox_app.process.backoff import Backoff
from outbox_app.text import escaped, get_logger, per_second

from .conftest import HOSTILE, assert_harmless

ROOT = Path(__file__).parents[2]
SOURCES = [path.read_text() for path in Path(outbox_app.__file__).parent.rglob("*.py")]
NAMES = sorted({name for text in SOURCES for name in re.findall(r'get_logger\("(.+?)"\)', text)})


class Careless(Exception):
    """An exception whose author was not careful."""

    def __repr__(self) -> str:
        return f"Careless({self})"


class Unspeakable:
    def __str__(self) -> str:
        raise LookupError


def test_every_logger_is_known() -> None:
    assert len(NAMES) >= 10
    assert all(name == "outbox_app" or name.startswith("outbox_app.") for name in NAMES)


def test_loggers_from_before_logging_are_enabled() -> None:
    """A project's celery.py imports them, and LOGGING disables those that exist by default."""
    code = """
import logging, django, outbox_app.celery
from django.conf import settings
settings.configure(INSTALLED_APPS=["outbox_app"], LOGGING={"version": 1, "root": {"level": "INFO"}})
assert logging.getLogger("outbox_app.staging").isEnabledFor(logging.WARNING)
django.setup()
for name in ("outbox_app", "outbox_app.staging"):
    assert logging.getLogger(name).isEnabledFor(logging.INFO), name
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_one_line_without_codes(name: str, logged: StringIO) -> None:
    logger = get_logger(name)
    given = [HOSTILE, Careless(HOSTILE), SimpleNamespace(name=HOSTILE)]
    logger.warning("Said text=%s error=%r row=%s", *given)
    logger.warning("Counted jobs=%d seconds=%.1f by=%s", 3, 0.5, None)
    logger.info(f"held log=outbox_event by={HOSTILE}")  # as ``write=logger.info`` does
    lines = logged.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1] == f"WARNING {name} Counted jobs=3 seconds=0.5 by=None"
    assert_harmless(logged.getvalue(), times=3)


@pytest.mark.parametrize("name", NAMES)
def test_no_line_of_a_traceback_passes_for_a_log_line(name: str, logged: StringIO) -> None:
    error = Careless(HOSTILE)
    error.add_note(HOSTILE)
    try:
        try:
            raise ValueError(HOSTILE)
        except ValueError as cause:
            raise ExceptionGroup(HOSTILE, [error]) from cause
    except ExceptionGroup:
        get_logger(name).exception("Failed of=%s", HOSTILE)
    first, *rest = logged.getvalue().splitlines()
    assert first == f"ERROR {name} Failed of={escaped(HOSTILE)}"
    assert all(line.startswith("  ") for line in rest if line)
    assert any(re.fullmatch(r'.*File ".*test_logs.py", line \d+, in \w+', line) for line in rest)
    assert_harmless(logged.getvalue())


def test_an_error_that_counts_as_false_is_escaped_too(logged: StringIO) -> None:
    empty = type("Empty", (Exception,), {"__len__": lambda self: 0})
    try:
        raise empty(HOSTILE)
    except empty:
        get_logger("outbox_app.drain").exception("Failed")
    assert_harmless(logged.getvalue())


def test_a_record_that_another_process_sent_is_shown(logged: StringIO) -> None:
    """``logging.handlers.SocketHandler`` sends the message with nothing in ``args``."""
    sent = {"name": "outbox_app.drain", "levelno": 30, "levelname": "WARNING", "args": None}
    record = logging.makeLogRecord({**sent, "msg": f"Said {HOSTILE}"})
    get_logger("outbox_app.drain").handle(record)
    assert logged.getvalue() == f"WARNING outbox_app.drain Said {escaped(HOSTILE)}\n"


def test_the_message_stays_apart_from_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("outbox_app.drain").warning("Said text=%s count=%d", HOSTILE, 3)
    [record] = caplog.records
    assert (record.msg, record.args) == ("Said text=%s count=%d", (escaped(HOSTILE), 3))


@pytest.mark.parametrize(
    ("value", "shown", "kept"),
    [
        ("plain", "plain", "plain"),
        ("two words", '"two words"', "two words"),
        ('say "yes"', '"say \\"yes\\""', 'say "yes"'),
        ("a=b", '"a=b"', "a=b"),
        ("", '""', ""),
        (HOSTILE, escaped(HOSTILE), escaped(HOSTILE)),
        (3, "3", 3),
        (None, "None", None),
        (ValueError("x y"), '"ValueError: x y"', "ValueError: x y"),
        (TimeoutError(), "TimeoutError", "TimeoutError"),
        (ValueError("redis://u:secret@h/0"), '"ValueError: redis://u:**@h/0"', ANY),
        (Careless(HOSTILE), f'"Careless: {escaped(HOSTILE)}"', ANY),
        (Unspeakable(), '"its text cannot be had (LookupError)"', ANY),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Unspeakable) else ascii(value),
)
def test_a_field_is_quoted_for_people_and_an_attribute_for_programs(
    logged: StringIO, caplog: pytest.LogCaptureFixture, value: object, shown: str, kept: object
) -> None:
    get_logger("outbox_app.drain").warning("100%% %s by=%s jobs=%d", "said", value, 7)
    assert logged.getvalue() == f"WARNING outbox_app.drain 100% said by={shown} jobs=7\n"
    [record] = caplog.records
    assert (record.by, record.jobs) == (kept, 7)  # type: ignore[attr-defined]
    assert "" not in vars(record)


def test_each_line_is_a_constant_message_and_fields_of_text() -> None:
    """No field holds the ``repr`` of an error, and no message begins with a value."""
    assert not [text for text in SOURCES if re.search(r"\w=(%r|\{error!r\})", text)]
    messages = [
        call.args[0].value
        for text in SOURCES
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value).endswith("logger")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    ]
    assert len(messages) > 60
    sentence = re.compile(r"(?:[A-Z]|prepare|psycopg)[^%=:]*[^%=: ](?: \w+=%\S+)*")
    assert [message for message in messages if not sentence.fullmatch(message)] == []


def test_no_field_has_the_name_of_something_that_a_record_or_structlog_has() -> None:
    taken = {*vars(logging.makeLogRecord({})), "asctime", "event", "level", "logger", "timestamp"}
    fields = {name for text in SOURCES for name in re.findall(r"\b(\w+)=%[a-z.\d]", text)}
    assert len(fields) > 40
    assert not fields & taken


@pytest.mark.parametrize(
    ("count", "seconds", "shown"),
    [(42_000, 10, 4200), (125, 10, 12), (15, 10, 1.5), (1, 10, 0.1), (5, 60, 0.083), (1, 0, 1)],
)
def test_a_slow_rate_is_not_none(count: int, seconds: float, shown: float) -> None:
    assert per_second(count, seconds) == shown


class TestCommand:
    """One stream: that of the project, or where it configures none, the command's output."""

    def run(self) -> tuple[str, str]:
        out, err = StringIO(), StringIO()
        command = OutboxCommand(stdout=out, stderr=err)
        logger = get_logger("outbox_app.drain")
        command.run(lambda using: logger.info("Drainer started database=%s", using), database="b")
        return out.getvalue(), err.getvalue()

    def test_where_nothing_is_configured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logger = logging.getLogger("outbox_app")
        monkeypatch.setattr(logger, "propagate", False)
        out, err = self.run()
        line = rf"[\d-]+T[\d:]+[+-]\d+ INFO outbox_app\.drain\[{os.getpid()}\] "
        assert re.fullmatch(line + "Drainer started database=b\n", out)
        assert (err, logger.handlers, logger.level) == ("", [], logging.NOTSET)

    def test_where_the_project_says_what_is_shown(self, logged: StringIO) -> None:
        assert self.run() == ("", "")
        assert logged.getvalue() == "INFO outbox_app.drain Drainer started database=b\n"

    def test_where_the_project_hides_it(self, caplog: pytest.LogCaptureFixture) -> None:
        out, err = self.run()
        assert out == ""
        assert "Progress is not shown" in err


def test_what_the_signals_say(logged: StringIO) -> None:
    row: Any = SimpleNamespace(
        **dict.fromkeys(("task", "task_id", "error", "reason", "kind", "detail"), HOSTILE),
        **dict.fromkeys(("subscription", "log", "stream"), HOSTILE),
        **dict.fromkeys(("first_id", "last_id", "version"), 1),
        shards=[1],
    )
    of: Any = {"using": "default", "subscription": HOSTILE, "partition": 0, "log": HOSTILE}
    log_lines.log_dead(using="default", dead=row)
    log_lines.log_incident(using="default", incident=row)
    event_lines.log_page(**of, count=1, seconds=0.1)
    event_lines.log_failure(**of, error=Careless(HOSTILE), failures=2)
    event_lines.log_parked(using="default", parked=row)
    assert len(logged.getvalue().splitlines()) == 5
    Backoff(HOSTILE).failed(Careless(HOSTILE))
    assert_harmless(logged.getvalue(), times=12)
