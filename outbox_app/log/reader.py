"""Reads a log through Django: the window of its database, and records of its rows.

A reader holds no cursor. Its statements run in autocommit: whoever reads inside a transaction that
has written is refused. On MySQL it holds a second connection, for dirty reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import JSONField
from django.db.models.expressions import Col
from django.utils.module_loading import import_string

from ..conf import settings
from ..models import EventLog
from .cursor import State
from .record import COLUMNS, RecordedEvent
from .sql import Filter
from .window import TOMBSTONE, Page, Window

WINDOWS = {
    "postgresql": "outbox_app.log.windows.postgres.PostgresWindow",
    "mysql": "outbox_app.log.windows.mysql.MysqlWindow",
    "sqlite": "outbox_app.log.windows.sqlite.SqliteWindow",
}

_TYPE = COLUMNS.index("type")


class Events(NamedTuple):
    """A page of events, and what the window said of it."""

    events: list[RecordedEvent]
    page: Page[Any]


class LogReader:
    """Reads one log on one alias.

    Args:
        log: The log.
        using: Database alias.
        only: Which rows. Default: all.
    """

    def __init__(self, log: type[EventLog], *, using: str, only: Filter | None = None) -> None:
        self.log = log
        self.using = using
        self.only = only or Filter()
        self.table = log._meta.db_table
        self._dirty: Any = None
        self._decode = _decoder(log, using)
        conf = settings()
        vendor = connections[using].vendor
        window: type[Window[Any]] = import_string({**WINDOWS, **conf.WINDOWS}[vendor])
        self.window = window(
            self.table,
            self._run,
            dirty=self._run_dirty if window.needs_dirty else None,
            settle=conf.SETTLE_SECONDS,
            tombstones=conf.TOMBSTONES,
        )

    def load(self, state: str) -> State:
        """Return the state of a text. Raises ``DamagedCursor``."""
        loaded: State = self.window.state.load(state)
        return loaded

    def read(self, state: State, limit: int) -> Events:
        """Return at most about ``limit`` events that come next. Raises ``ReadRefused``."""
        page = self.window.read(state, columns=COLUMNS, limit=limit, only=self.only)
        return Events(self.records(page.rows), page)

    def records(self, rows: Sequence[tuple[Any, ...]]) -> list[RecordedEvent]:
        """Return rows of ``COLUMNS`` as records, without tombstones."""
        decode = self._decode
        return [decode(row) for row in rows if row[_TYPE] != TOMBSTONE]

    def close(self) -> None:
        """Close the connection for dirty reads."""
        if self._dirty is not None:
            self._dirty.close()
            self._dirty = None

    def _run(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    def _run_dirty(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self._dirty is None:
            self._dirty = connections.create_connection(self.using)
            with self._dirty.cursor() as cursor:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        try:
            with self._dirty.cursor() as cursor:
                cursor.execute(sql, params)
                return list(cursor.fetchall())
        except Exception:
            self.close()
            raise


def _converted(convert: Any, column: Any, connection: Any, value: Any) -> Any:
    return convert(value, column, connection)


def _decoder(log: type[EventLog], using: str) -> Callable[[tuple[Any, ...]], RecordedEvent]:
    """Return what makes a record of a row, with the converters of Django for this database."""
    connection, table = connections[using], log._meta.db_table
    steps: list[tuple[int, Callable[[Any], Any]]] = []
    for index, name in enumerate(COLUMNS):
        field = log._meta.get_field(name)
        if isinstance(field, JSONField):
            steps.append((index, json.loads))
            continue
        column = Col(table, field)  # type: ignore[arg-type]
        for convert in connection.ops.get_db_converters(column):
            steps.append((index, partial(_converted, convert, column, connection)))
    make = RecordedEvent._make

    def decode(row: tuple[Any, ...]) -> RecordedEvent:
        values = [*row, table]
        for index, step in steps:
            values[index] = step(values[index])
        return make(values)

    return decode
