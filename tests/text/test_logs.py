"""Log lines: whatever is in a row or an exception, one record is one line, without codes."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outbox_app
from outbox_app.monitoring import log_lines
from outbox_app.process.backoff import Backoff
from outbox_app.text import escaped, get_logger

from .conftest import HOSTILE, assert_harmless

SOURCES = [path.read_text() for path in Path(outbox_app.__file__).parent.rglob("*.py")]
NAMES = sorted({name for text in SOURCES for name in re.findall(r'get_logger\("(.+?)"\)', text)})


class Careless(Exception):
    """An exception whose author was not careful."""

    def __repr__(self) -> str:
        return f"Careless({self})"


def test_every_logger_is_known() -> None:
    assert len(NAMES) >= 10
    assert all(name.startswith("outbox_app.") for name in NAMES)


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
    assert any("test_logs.py" in line for line in rest)
    assert_harmless(logged.getvalue())


def test_the_message_stays_apart_from_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("outbox_app.drain").warning("Said text=%s count=%d", HOSTILE, 3)
    [record] = caplog.records
    assert (record.msg, record.args) == ("Said text=%s count=%d", (escaped(HOSTILE), 3))


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
    log_lines.log_page(**of, count=1, seconds=0.1)
    log_lines.log_failure(**of, error=Careless(HOSTILE), failures=2)
    log_lines.log_parked(using="default", parked=row)
    assert len(logged.getvalue().splitlines()) == 5
    Backoff(HOSTILE).failed(Careless(HOSTILE))
    assert_harmless(logged.getvalue(), times=12)
