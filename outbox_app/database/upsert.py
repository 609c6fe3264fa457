"""INSERTs by hand, each in one statement: of new rows, or of rows that may exist already.

A conflict raises no error, so it does not abort the transaction. On MySQL an INSERT IGNORE also
truncates long values silently: check lengths before.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

from django.db import connections, models
from django.db.models import Model, QuerySet
from django.db.models.constants import OnConflict

from ..fields import CharField, TextField

#: Fields whose values of these types are stored as they are.
PLAIN: dict[Any, type] = {
    CharField: str,
    TextField: str,
    models.CharField: str,
    models.TextField: str,
    models.SmallIntegerField: int,
    models.IntegerField: int,
    models.BigIntegerField: int,
    models.BooleanField: bool,
}


def insert_rows(
    cursor: Any,
    model: Any,
    names: Sequence[str],
    params: Sequence[Any],
    *,
    insert: str = "INSERT INTO",
    row: str = "",
    tail: str = "",
) -> None:
    """Insert rows, whose values are all in ``params``: as SQL a ``row`` for each, then ``tail``."""
    quote = cursor.db.ops.quote_name
    row = row or f"({', '.join(['%s'] * len(names))})"
    rows = ", ".join([row] * (len(params) // len(names)))
    into = f"{quote(model._meta.db_table)} ({', '.join(map(quote, names))})"
    cursor.execute(f"{insert} {into} VALUES {rows}{tail}", params)


def last_inserted(cursor: Any, model: Any, names: Sequence[str], count: int) -> Sequence[Any]:
    """Return columns of the ``count`` rows of this session's last ``INSERT … VALUES``, in order.

    For MySQL, which has no RETURNING. InnoDB reserves the ids of a known number of rows at once, in
    each ``innodb_autoinc_lock_mode``, so they are consecutive, in steps of the increment (MySQL's
    manual, "AUTO_INCREMENT Handling in InnoDB": simple inserts). An upsert is no such statement.
    """
    quote = cursor.db.ops.quote_name
    rows = f"SELECT {', '.join(map(quote, names))} FROM {quote(model._meta.db_table)}"
    last = "LAST_INSERT_ID() + %s * @@auto_increment_increment"
    cursor.execute(f"{rows} WHERE id BETWEEN LAST_INSERT_ID() AND {last} ORDER BY id", [count - 1])
    return cursor.fetchall()  # type: ignore[no-any-return]


def upsert(
    table: QuerySet[Any],
    rows: Sequence[Model],
    *,
    update: Sequence[str],
    unique: Sequence[str],
    batch_size: int | None = None,
) -> None:
    """Insert rows; update the ``update`` fields of those that exist, by the ``unique`` fields."""
    if batch_size is None and _upsert_plain(table, rows, update, unique):
        return
    named = connections[table.db].features.supports_update_conflicts_with_target
    table.bulk_create(
        rows,
        batch_size=batch_size,
        update_conflicts=True,
        update_fields=update,
        unique_fields=unique if named else None,
    )


def _upsert_plain(
    table: QuerySet[Any], rows: Sequence[Model], update: Sequence[str], unique: Sequence[str]
) -> bool:
    """Upsert by one statement, if no value needs a conversion; return False without effect if not.

    Django converts each value by itself, which would take most of the time for a page of rows.
    """
    connection, meta = connections[table.db], table.model._meta
    if connection.vendor == "sqlite":
        return False
    fields = [field for field in meta.concrete_fields if not field.generated]
    columns: list[list[Any]] = []
    for field in fields:
        values = [getattr(row, field.attname) for row in rows]
        kind = PLAIN.get(type(field))
        if kind is None or not set(map(type, values)) <= {kind, NoneType}:
            return False
        columns.append(values)
    quote = connection.ops.quote_name
    names = [str(field.column) for field in fields]
    changed = [quote(str(meta.get_field(name).column)) for name in update]
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            params = [value for values in zip(*columns, strict=True) for value in values]
            changes = ", ".join(f"{name} = VALUES({name})" for name in changed)
            tail = f" ON DUPLICATE KEY UPDATE {changes}"
            insert_rows(cursor, table.model, names, params, tail=tail)
        else:
            keys = ", ".join(quote(str(meta.get_field(name).column)) for name in unique)
            arrays = ", ".join(f"%s::{array_type(field, table.db)}" for field in fields)
            changes = ", ".join(f"{name} = EXCLUDED.{name}" for name in changed)
            cursor.execute(
                f"INSERT INTO {quote(meta.db_table)} ({', '.join(map(quote, names))}) "
                f"SELECT * FROM UNNEST({arrays}) ON CONFLICT ({keys}) DO UPDATE SET {changes}",
                columns,
            )
    return True


def array_type(field: Any, using: str) -> str:
    """Return the array type of a ``PLAIN`` field on PostgreSQL; empty for other fields."""
    if connections[using].vendor != "postgresql" or type(field) not in PLAIN:
        return ""
    return f"{field.db_type(connections[using]).split('(')[0]}[]"


def insert_if_missing(model: type[Model], values: dict[str, Any], *, using: str) -> bool:
    """Insert a row; return False, and change nothing, if its key exists already.

    The INSERT waits for another open transaction that has inserted the key. Reads after it see what
    that transaction committed, at REPEATABLE READ too.
    """
    ops, ignore = connections[using].ops, OnConflict.IGNORE
    insert = ops.insert_statement(on_conflict=ignore)
    tail = f" {ops.on_conflict_suffix_sql([], ignore, [], [])}"
    with connections[using].cursor() as cursor:
        insert_rows(cursor, model, list(values), list(values.values()), insert=insert, tail=tail)
        return bool(cursor.rowcount)
