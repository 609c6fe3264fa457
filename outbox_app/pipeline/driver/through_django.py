"""Reads a log over Django's own connection, into the columns of Arrow that the archiver reads.

So what is read is what the open transaction sees, and its rows can be locked until its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from django.db import connections

from ...events.models import EventLog
from ..database import Database, batches_of, database_class
from ..options import Options
from .pipeline import log_options

#: PostgreSQL's times as numbers: Python has no years before Christ, and a session has a zone.
_NUMBERS = {
    "timestamp": "(extract(epoch FROM {0}) * 1000000)::bigint",
    "date": "{0} - DATE '1970-01-01'",
}


class LogThroughDjango:
    """A log on an alias. It opens no connection of its own."""

    def __init__(self, log: type[EventLog], *, using: str) -> None:
        options = log_options(log, using=using)
        self.database = _class_of(database_class(options), using)(options)
        self._connection = connections[using]

    def rows(
        self, ids: Sequence[int], schema: pa.Schema, *, lock: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows with these positions that are there, in order.

        ``lock`` locks them until the end of the transaction. SQLite's transaction has locked all.
        """
        database, log = self.database, self.database.options.log
        columns = ", ".join(map(database.column, schema.names))
        sql = f"SELECT {columns} FROM {database.quoted(log)}"
        if self._connection.vendor == "mysql":
            # A scan would wait for a row in flight. With keys as the only condition, MariaDB would
            # scan a small table all the same.
            sql += " FORCE INDEX (PRIMARY)"
        sql += f" WHERE id IN ({', '.join(map(str, ids))}) AND version IS NOT NULL ORDER BY id"
        if lock and self._connection.features.has_select_for_update:
            sql += " FOR UPDATE"
        return database.batches(sql, schema)


def _class_of(vendor: Any, using: str) -> type[Database]:
    connection = connections[using]

    class ThroughDjango(vendor):  # type: ignore[misc]
        def __init__(self, options: Options) -> None:
            Database.__init__(self, options)
            self._kinds = self.schema()

        def run(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            with connection.cursor() as cursor:
                cursor.execute(sql, params or None)
                return list(cursor.fetchall())

        def batches(self, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
            with connection.cursor() as cursor:
                cursor.execute(sql)
                yield from batches_of(cursor, schema, self.options.time_zone)

        def column(self, name: str) -> str:
            sql = str(super().column(name))
            form = _NUMBERS.get(self._kinds[name]) if connection.vendor == "postgresql" else None
            return form.format(sql) if form else sql

        def close(self) -> None:
            """Leave the connection to Django."""

    return ThroughDjango
