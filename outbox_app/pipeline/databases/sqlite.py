"""SQLite through the standard library: all readers run on the machine that has the file.

The file is opened read-only. Times and ids get the same Arrow types as on the other databases.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...events.log.scans.sqlite import SqliteScan
from ..database import Database, batches_of
from ..exceptions import Unreachable
from ..options import Options


class Sqlite(Database):
    scan = SqliteScan
    errors = (sqlite3.Error,)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        path = Path(options.parameters["dbname"]).absolute()
        try:
            self._connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)
            self._connection.execute("SELECT 1 FROM sqlite_master LIMIT 1")
        except sqlite3.Error as error:
            raise Unreachable(f"{options.url} cannot be opened: {error}") from error

    def run(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql.replace("%s", "?"), tuple(params)).fetchall()

    def batches(self, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return batches_of(self._connection.execute(sql), schema, self.options.time_zone)

    def literal(self, text: str) -> str:
        return "'{}'".format(text.replace("'", "''"))

    def columns(self, table: str) -> dict[str, str]:
        return dict(self.run("SELECT name, type FROM pragma_table_info(%s)", [table]))

    def close(self) -> None:
        self._connection.close()
