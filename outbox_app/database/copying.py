"""COPY: PostgreSQL takes new rows in a fraction of the time of an INSERT.

Django knows COPY only as a method of psycopg's cursor, which its own instrumentation and tracers
would not see. Here it is one ``execute`` of Django's cursor: the query log, ``assertNumQueries``,
``execute_wrapper`` and what tools wrap see one statement, without its rows. It returns no ids.

Rows are not copied by psycopg 2, in a pipeline of psycopg, by a cursor whose ``execute`` is a
tracer's, and into a table for which COPY does something else than INSERT: one with row-level
security or rules, or a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any


def copies(connection: Any, model: Any) -> bool:
    """Return whether rows of a model can be copied, and all that watch the statements see it."""
    if connection.vendor != "postgresql":
        return False
    connection.ensure_connection()
    driver = connection.connection
    if not hasattr(driver, "pgconn") or driver.pgconn.pipeline_status:  # psycopg 2, or a pipeline
        return False
    table = connection.ops.quote_name(model._meta.db_table)
    known = getattr(connection, "outbox_copies", None)
    if known is None or known[:2] != (driver, table):
        connection.validate_no_broken_transaction()
        with connection.wrap_database_errors:
            known = connection.outbox_copies = driver, table, _copies(driver, table)
    return bool(known[2])


def _copies(driver: Any, table: str) -> bool:
    """Ask once a connection, below Django: this is no statement of the caller's."""
    with driver.cursor() as cursor:
        execute = getattr(cursor.execute, "__func__", None)
        if type(execute) is not FunctionType:
            return False
        if not execute.__globals__["__name__"].startswith("psycopg."):
            return False
        cursor.execute(
            "SELECT relkind IN ('r', 'p') AND NOT relrowsecurity"
            " AND NOT EXISTS (SELECT FROM pg_rewrite WHERE ev_class = c.oid)"  # relhasrules is late
            " FROM pg_class c WHERE oid = %s::regclass",
            [table],
        )
        return bool(cursor.fetchone()[0])


def copy_rows(cursor: Any, model: Any, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Insert rows by one COPY, if ``copies`` says that it can. The cursor is Django's."""
    quote = cursor.db.ops.quote_name
    columns = ", ".join(map(quote, names))
    cursor.cursor = _Copy(cursor.cursor, rows)
    cursor.execute(f"COPY {quote(model._meta.db_table)} ({columns}) FROM STDIN")


class _Copy:
    """A cursor of psycopg whose ``execute`` copies rows."""

    def __init__(self, cursor: Any, rows: Iterable[Sequence[Any]]) -> None:
        self._cursor, self._rows = cursor, rows

    def execute(self, sql: str) -> None:
        with self._cursor.copy(sql) as copy:
            for row in self._rows:
                copy.write_row(row)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
