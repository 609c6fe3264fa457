"""Fixtures for spans: a reader of the test's log, and its span."""

from __future__ import annotations

import pytest

from outbox_app.eventlog.reader import LogReader
from outbox_app.models import Event

from .sessions import truncate

SPANS = {
    "postgresql": "outbox_app.eventlog.scans.postgres.PostgresSpan",
    "mysql": "outbox_app.eventlog.scans.mysql.MysqlSpan",
    "sqlite": "outbox_app.eventlog.scans.sqlite.SqliteSpan",
}


@pytest.fixture
def reader(alias, settings, monkeypatch):
    """A reader whose window is the span. Parts are worth it however small they are."""
    settings.OUTBOX = {**settings.OUTBOX, "WINDOWS": SPANS}
    monkeypatch.setattr("outbox_app.eventlog.scan.MIN_POSITIONS", 1)
    truncate(alias)
    reader = LogReader(Event, using=alias)
    yield reader
    reader.close()


@pytest.fixture
def span(reader):
    return reader.window
