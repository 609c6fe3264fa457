"""Fixtures for scans: a reader of the test's log, and its scan."""

from __future__ import annotations

import pytest

from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.scans.mysql import MysqlScan
from outbox_app.events.log.scans.postgres import PostgresScan
from outbox_app.events.log.scans.sqlite import SqliteScan
from outbox_app.events.models import Event

from .sessions import truncate

SCANS = {"postgresql": PostgresScan, "mysql": MysqlScan, "sqlite": SqliteScan}


@pytest.fixture
def reader(alias, monkeypatch):
    """A reader that uses scans as its window, and that splits even the smallest scan into parts."""
    monkeypatch.setattr("outbox_app.events.log.reader.WINDOWS", SCANS)
    monkeypatch.setattr("outbox_app.events.log.scan.MIN_POSITIONS", 1)
    truncate(alias)
    reader = LogReader(Event, using=alias)
    yield reader
    reader.close()


@pytest.fixture
def scan(reader):
    return reader.window
