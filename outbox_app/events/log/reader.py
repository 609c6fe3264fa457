"""Reads a log through Django: chooses its database's window, and makes records of the rows.

A reader holds no cursor. Its statements run in autocommit: reading inside a transaction that has
written is refused. On MySQL the readers of a thread share a second connection, for dirty reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet

from django.conf import settings
from django.db import connections
from django.db.models import JSONField, QuerySet
from django.db.models.expressions import Col

from ..conf import event_settings
from ..exceptions import LogSetBack
from ..models import EventLog
from .filter import EventFilter
from .insert import own_values
from .record import COLUMNS, NO_ANSWER, RecordedEvent, columns_of, lazy_record
from .state import WindowState
from .window import TOMBSTONE, Page, Window
from .windows.mysql import MysqlWindow
from .windows.postgres import SERVER, PostgresWindow
from .windows.sqlite import SqliteWindow
from .windows.time import time_window

#: The window of each database vendor.
WINDOWS: dict[str, type[Window[Any]]] = {
    "postgresql": PostgresWindow,
    "mysql": MysqlWindow,
    "sqlite": SqliteWindow,
}

_TYPE = COLUMNS.index("type")
#: Object ids of PostgreSQL's types.
_TEXT, _TIMESTAMPTZ, _UUID = 25, 1184, 2950
_raw_decode = json.JSONDecoder().raw_decode


def reads_by_time(state: str) -> bool:
    """Return whether a stored state belongs to a reader by time."""
    return state.startswith('{"window":"time"')


class Events(NamedTuple):
    events: list[RecordedEvent]
    page: Page[Any]


class LogReader:
    """Reads one log on one alias. On its own, a reader by time loses rows (``windows.time``)."""

    def __init__(
        self,
        log: type[EventLog],
        *,
        using: str,
        only: EventFilter | None = None,
        by_time: bool = False,
    ) -> None:
        self.log = log
        self.using = using
        self.only = only or EventFilter()
        self.by_time = by_time
        self.table = log._meta.db_table
        #: The columns of the rows that ``records`` takes.
        self.columns = columns_of(log)
        #: The thread's own connection of the alias, once there is a dirty one beside it.
        self._beside: Any = None
        self._server = ""
        self._load_time: Any = None
        #: Position and message id of a row that was seen: once the log is emptied, it is gone.
        self._known: tuple[Any, ...] | None = None
        self.vendor = connections[using].vendor
        decoders = _decoders(log, using)
        if self.vendor == "postgresql":
            decoders |= {"message_id": _uuid, "recorded_at": self._time}
        self._record = lazy_record(decoders)
        #: The values that follow those of ``COLUMNS`` in a record.
        self._rest = (self.table,) if len(self.columns) > len(COLUMNS) else (self.table, *NO_ANSWER)
        conf = event_settings()
        window = WINDOWS[self.vendor]
        if by_time:
            window = time_window(self.vendor, local=not settings.USE_TZ)
        self.window = window(
            self.table,
            self.run,
            dirty=self._run_dirty if window.needs_dirty else None,
            settle=conf.SETTLE_SECONDS,
            tombstones=conf.TOMBSTONES,
        )
        self.window.own_values = partial(own_values, log, using=using)

    def load(self, state: str) -> WindowState:
        loaded: WindowState = self.window.state.load(state)
        return loaded

    def verify(self, state: WindowState) -> None:
        """Check the log's requirements, and that the state is the log's. Raises ``ReadRefused``."""
        if isinstance(self.window, PostgresWindow):
            [(self._server,)] = self.run(f"SELECT {SERVER}", [])
        self.window.verify(state)
        self._known = self._last_row(self.window.reached(state))

    def if_server_unchanged(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return these rows, or none if the server may have forgotten commits since ``verify``.

        The server would give out their transaction ids again, and an older state has passed these.
        """
        if not self._server:
            return rows
        return rows.extra(where=[f"{SERVER} = %s"], params=[self._server])

    def adopt_verification(self, other: LogReader) -> None:
        """Accept that another reader has verified a state of this log."""
        self._known, self._server = other._known, other._server

    def read(self, state: WindowState, limit: int) -> Events:
        """Return the next events, about ``limit`` at most. Raises ``ReadRefused``."""
        page = self.page(state, limit, columns=self.columns, only=self.only)
        return Events(self.records(page.rows), page)

    def page(
        self, state: WindowState, limit: int, *, columns: Sequence[str], only: EventFilter
    ) -> Page[Any]:
        """Return the next rows, with these columns and this filter. Raises ``ReadRefused``."""
        page = self.window.read(state, columns=columns, limit=limit, only=only)
        self._require_known(state)
        return page

    def records(self, rows: Sequence[tuple[Any, ...]]) -> list[RecordedEvent]:
        """Return rows of ``columns``, and perhaps more, as records, without tombstones."""
        make, record, n, rest = tuple.__new__, self._record, len(COLUMNS), self._rest
        end = len(self.columns)
        records: list[Any] = [
            make(record, row[:n] + rest + row[n:end]) for row in rows if row[_TYPE] != TOMBSTONE
        ]
        if self.vendor != "postgresql":
            # A row edited by hand may hold invalid JSON here. Find it now: no handler is at fault.
            for each in records:
                _ = each.data, each.metadata, each.response, each.state
        return records

    def _require_known(self, state: WindowState) -> None:
        """Check that the log was not emptied, and its positions given out again, meanwhile.

        Called after a page is read, whose rows may be those of a new log. It looks at the primary
        key only, and does nothing on PostgreSQL. If the known row is gone, it may have been pruned:
        then the state is verified again, and the highest row up to it becomes the known one.
        """
        reached, known = self.window.reached(state), self._known
        if not reached:
            return
        there = self._last_row(known[0]) if known else None
        if known and there == known:
            return
        if known and there and there[0] == known[0]:
            raise LogSetBack(
                f"Positions of {self.table} that were read hold other events now: the log was "
                "emptied and gave out positions again, or it was restored. Replay the subscription "
                "from the beginning, or run manage.py outbox_rebase --log "
                f"{self.table} --last-id N, where N is the last position from before that."
            )
        self.window.verify(state)
        self._known = self._last_row(reached)

    def _last_row(self, reached: int | None) -> tuple[Any, ...] | None:
        if reached is None:
            return None
        rows = self.run(
            f"SELECT id, message_id FROM {self.window.source} WHERE id <= %s "
            "ORDER BY id DESC LIMIT 1",
            [reached],
        )
        return tuple(rows[0]) if rows else None

    def close(self) -> None:
        main, self._beside = self._beside, None
        dirty = main and _dirty.get(main)
        if dirty:
            dirty.readers.discard(self)
            if not dirty.readers:
                del _dirty[main]
                dirty.connection.close()

    def run(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        with connections[self.using].cursor() as cursor:
            self._leave_text(cursor)
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    def _leave_text(self, cursor: Any) -> None:
        """Make psycopg return UUIDs and times as text; keep its loader, which has the time zone."""
        adapters = getattr(cursor, "adapters", None)
        if adapters is None:  # another driver
            return
        loader = adapters.get_loader(_TIMESTAMPTZ, 0)
        self._load_time = loader(_TIMESTAMPTZ, cursor.connection).load
        text = adapters.get_loader(_TEXT, 0)
        adapters.register_loader(_TIMESTAMPTZ, text)
        adapters.register_loader(_UUID, text)

    def _time(self, text: Any) -> Any:
        return self._load_time(text.encode()) if isinstance(text, str) else text

    def _run_dirty(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        # The dirty connection is kept only once its isolation level is set: at another level it
        # would show no row in flight, and gaps would be closed. It is replaced with the main one:
        # after a switch-over, a connection to the old primary would show no row in flight, either.
        self._beside = main = connections[self.using]
        dirty = _dirty.get(main)
        if dirty is not None and dirty.beside is not main.connection:
            _dirty.pop(main).connection.close()
            dirty = None
        connection = dirty.connection if dirty else connections.create_connection(self.using)
        connection.settings_dict = main.settings_dict  # with its timeouts
        try:
            with connection.cursor() as cursor:
                if dirty is None:
                    cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
                    dirty = _dirty[main] = _Dirty(connection, main.connection, WeakSet())
                dirty.readers.add(self)
                cursor.execute(sql, params)
                return list(cursor.fetchall())
        except BaseException:
            _dirty.pop(main, None)
            connection.close()
            raise


class _Dirty(NamedTuple):
    """A connection at READ UNCOMMITTED, for all readers of an alias in one thread.

    A process may have a reader for each log of a hundred subscriptions. If each had a connection,
    they would take all that the server has.
    """

    connection: Any
    #: The driver's connection that the alias had when this one was opened.
    beside: Any
    #: The readers that use this connection.
    readers: WeakSet[LogReader]


#: The dirty connections, by the thread's own connection of the alias.
_dirty: WeakKeyDictionary[Any, _Dirty] = WeakKeyDictionary()


def _decoders(log: type[EventLog], using: str) -> dict[str, Callable[[Any], Any]]:
    """Return a decoder for each column that needs one: Django's converters for this database."""
    connection, table = connections[using], log._meta.db_table
    found: dict[str, Callable[[Any], Any]] = {}
    for name in columns_of(log):
        field = log._meta.get_field(name)
        column = Col(table, field)  # type: ignore[arg-type]
        if isinstance(field, JSONField):
            found[name] = _json
        elif converters := connection.ops.get_db_converters(column):
            found[name] = partial(_converted, converters, column, connection)
    return found


def _converted(converters: Any, column: Any, connection: Any, value: Any) -> Any:
    for convert in converters:
        value = convert(value, column, connection)
    return value


def _uuid(text: Any) -> Any:
    return UUID(text) if isinstance(text, str) else text


def _json(text: str | None) -> Any:
    if not text:
        return text  # NULL stays None
    try:
        return _raw_decode(text)[0]  # the column holds valid JSON: nothing but space follows it
    except ValueError:
        return json.loads(text)
