"""MySQL and MariaDB through mysqlclient: rows are streamed, and become columns of bytes.

The values of a row become Python objects only as bytes. Arrow converts them to numbers, times and
text, a column at a time. Statements run at READ COMMITTED, in autocommit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import MySQLdb
import MySQLdb.cursors
import pyarrow as pa

from ...events.log.scans.mysql import MysqlScan
from ..database import Database, batches_of, connected
from ..options import Options

#: libpq's names of parameters that mysqlclient names otherwise.
_NAMES = {"dbname": "database", "sslrootcert": "ssl_ca", "sslcert": "ssl_cert", "sslkey": "ssl_key"}
#: The most connections that count rows at once: there may be many more partitions than cores.
COUNTERS = 8
#: Errors that waiting does not solve: no access to the server or database; no such database.
_REFUSED = {1044, 1045, 1049, 1698}


class Mysql(Database):
    """Opens a connection for statements, one for dirty reads, and one for rows, when needed."""

    scan = MysqlScan
    errors = (MySQLdb.Error,)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._open: dict[str, Any] = {}
        self._connection("READ COMMITTED")

    def run(
        self, sql: str, params: Sequence[Any] = (), level: str = "READ COMMITTED"
    ) -> list[tuple[Any, ...]]:
        with self._connection(level).cursor() as cursor:
            cursor.execute(sql, tuple(params))
            return list(cursor.fetchall())

    def dirty(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self.run(sql, params, "READ UNCOMMITTED")

    def log(self) -> Any:
        scan = super().log()
        scan.readers, scan.run_all = min(self.options.partitions, COUNTERS), self._run_all
        return scan

    def _run_all(self, statements: Sequence[str]) -> list[list[tuple[Any, ...]]]:
        """Run statements at the same time, each over its own connection."""

        def alone(sql: str) -> list[tuple[Any, ...]]:
            with closing(Mysql(self.options)) as database:
                return database.run(sql)

        with ThreadPoolExecutor(len(statements)) as threads:
            return list(threads.map(alone, statements))

    def batches(self, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with closing(_connect(self.options, "READ COMMITTED", conv={}, use_unicode=False)) as rows:
            cursor = rows.cursor(MySQLdb.cursors.SSCursor)
            cursor.execute(sql)
            yield from batches_of(cursor, schema, self.options.time_zone, pa.binary())

    def literal(self, text: str) -> str:
        return str(self._connection("READ COMMITTED").literal(text), "utf-8")

    def columns(self, table: str) -> dict[str, str]:
        sql = (
            "SELECT column_name, column_type FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = %s "
            "AND COALESCE(generation_expression, '') = '' ORDER BY ordinal_position"
        )
        return dict(self.run(sql, [table]))

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def _connection(self, level: str) -> Any:
        if level not in self._open:
            self._open[level] = _connect(self.options, level)
        return self._open[level]


def _connect(options: Options, level: str, **settings: Any) -> Any:
    parameters: dict[str, Any] = {"charset": "utf8mb4", "connect_timeout": 10, "autocommit": True}
    for name, value in options.parameters.items():
        parameters[_NAMES.get(name, name)] = value
    if "port" in parameters:
        parameters["port"] = int(parameters["port"])
    ssl = {name.removeprefix("ssl_"): parameters.pop(name) for name in list(parameters)
           if name.startswith("ssl_") and name != "ssl_mode"}  # fmt: skip
    if ssl:
        parameters["ssl"] = ssl
    secret = options.secret()
    if secret is not None:
        parameters["password"] = secret
    connection = connected(
        options,
        lambda: MySQLdb.connect(**parameters, **settings),
        (MySQLdb.OperationalError,),
        lambda error: error.args[0] in _REFUSED,
    )
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        # Spark may pause for long between two batches. A limit on rows would cut the result.
        cursor.execute(
            "SET SESSION net_write_timeout = 3600, wait_timeout = 86400, "
            f"sql_select_limit = {2**64 - 1}"
        )
        if options.statement_timeout:
            seconds = options.statement_timeout
            cursor.execute(
                f"SET SESSION max_statement_time = {seconds}"
                if "mariadb" in connection.get_server_info().lower()
                else f"SET SESSION max_execution_time = {int(seconds * 1000)}"
            )
    return connection
