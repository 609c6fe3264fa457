"""PostgreSQL through ADBC: rows arrive in COPY's binary format and become Arrow, not Python.

Each statement is its own transaction: it reads what was committed when it began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa

from ...events.log.scans.postgres import PostgresScan
from .. import database
from ..database import Database, conformed, connected
from ..options import Options
from ..schema import COLUMNS

_BYTES = "adbc.postgresql.batch_size_hint_bytes"

_CASTS = {name: f"{name}::text" for name in ("data", "metadata", "message_id")}

#: Arrow has no infinite times: the first and the last moment of Spark and Python replace them.
_FINITE = """CASE {0} WHEN 'infinity' THEN '9999-12-31 23:59:59.999999Z'
    WHEN '-infinity' THEN '0001-01-01 00:00:00Z' ELSE {0} END"""

#: Words in libpq's errors about a wrong password, role, database or parameter.
_REFUSED = re.compile("password|does not exist|pg_hba|URI")


class Postgres(Database):
    scan = PostgresScan
    errors = (adbc_driver_manager.Error,)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        parameters = {"application_name": "outbox_pipeline", "connect_timeout": "10"}
        # Arrow's text is UTF-8. Text in the database's own encoding would be wrong, unnoticed.
        parameters |= options.parameters | {"client_encoding": "UTF8"}
        if options.statement_timeout:
            flags = parameters.get("options", "")
            timeout = int(options.statement_timeout * 1000)
            parameters["options"] = f"{flags} -c statement_timeout={timeout}".strip()
        secret = options.secret()
        if secret is not None:
            parameters["password"] = secret
        # All parameters go into the query: a host may be a folder of sockets.
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
        self._connection: Any = connected(
            options,
            lambda: adbc.connect(f"postgresql://?{query}", autocommit=True),
            (adbc_driver_manager.Error,),
            lambda error: _REFUSED.search(str(error)),
        )
        self.run("SET idle_session_timeout = 0")  # Spark may pause for long

    def run(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """See ``Database``. On PostgreSQL no statement of ours has parameters."""
        assert not params
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def batches(self, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{_BYTES: str(database.BYTES)})
            cursor.execute(sql)
            for batch in cursor.fetch_record_batch():
                if batch.num_rows:
                    yield conformed(batch, schema)

    def literal(self, text: str) -> str:
        escaped = text.replace("'", "''").replace("\\", "\\\\")
        return f" E'{escaped}'"

    def columns(self, table: str) -> dict[str, str]:
        sql = (
            "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute "
            f"WHERE attrelid = to_regclass({self.literal(self.quoted(table))}) AND attnum > 0 "
            "AND NOT attisdropped AND attgenerated = '' ORDER BY attnum"
        )
        return dict(self.run(sql))

    def identity(self) -> str:
        """See ``Database``. The cursor names the cluster; this is the database in the cluster."""
        sql = "SELECT oid::text FROM pg_database WHERE datname = current_database()"
        return str(self.run(sql)[0][0])

    @cached_property
    def _types(self) -> dict[str, str]:
        return self.schema() if self.options.read == "events" else {}

    def column(self, name: str) -> str:
        if name in _CASTS:
            return _CASTS[name]
        kind = "" if name in COLUMNS else self._types.get(name, "")
        template = {"string": "{0}::text", "date": _FINITE, "timestamp": _FINITE}.get(kind, "{0}")
        return template.format(super().column(name))

    def close(self) -> None:
        self._connection.close()
