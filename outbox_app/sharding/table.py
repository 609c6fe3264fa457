"""A model's table as an operation of this room changes it: its statements, and the lock.

On PostgreSQL a change is one transaction that begins with a lock on the table. MySQL and MariaDB
commit each statement. A lock is waited for only for seconds, because writers wait behind the
request; then ``OperationalError`` is raised, and the table is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

from ..database.lock_wait import atomic_with_lock_wait
from ..exceptions import OutboxError

#: Seconds to wait for a lock.
LOCK_WAIT = 5
#: Rows may have the number 0, and dates like 0000-00-00. What does not fit is refused, not cut.
SQL_MODE = "NO_AUTO_VALUE_ON_ZERO,STRICT_ALL_TABLES,ALLOW_INVALID_DATES"


class Table:
    def __init__(self, model: Any, connection: Any) -> None:
        self.connection, self.quote = connection, connection.ops.quote_name
        self.table = model._meta.db_table
        self.t = self.quote(self.table)

    def run(self, sql: str, params: Any = None) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def names(self, columns: list[str], of: str = "") -> str:
        return ", ".join(of + self.quote(column) for column in columns)


class PostgresTable(Table):
    @contextmanager
    def locked(self, mode: str) -> Iterator[None]:
        using = self.connection.alias
        # An older snapshot, at REPEATABLE READ, would lack the rows committed before the lock.
        with atomic_with_lock_wait(LOCK_WAIT, using=using, read_committed=True):
            self.run(f"LOCK TABLE {self.t} IN {mode} MODE")
            yield


class MysqlTable(Table):
    @contextmanager
    def session(self) -> Iterator[None]:
        """Set the session up for the block, and end it after that. One run at a time has a table.

        Otherwise a run could drop the index table to which the triggers of another one write.
        """
        try:
            self.run(f"SET SESSION lock_wait_timeout = {LOCK_WAIT}, sql_mode = '{SQL_MODE}'")
            number = crc32(f"{self.connection.settings_dict['NAME']}.{self.table}".encode())
            [(taken,)] = self.run("SELECT GET_LOCK(%s, %s)", [f"outbox_table_{number}", LOCK_WAIT])
            if not taken:
                raise OutboxError(
                    f"{self.table} is being split, or gets an index, in another session. Wait "
                    "until that has ended, and migrate again."
                )
            yield
        finally:
            self.connection.close()

    @contextmanager
    def locked(self, *others: str) -> Iterator[None]:
        self.run("LOCK TABLES " + ", ".join(f"{table} WRITE" for table in (self.t, *others)))
        try:
            yield
        finally:
            self.run("UNLOCK TABLES")
