"""The row of an entity, by SQL that is made once for each type.

Django makes a statement in more time than the database takes to answer it, and every command waits
for these two. The time is read with the row, also where there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from django.db import connections
from django.db.models import QuerySet
from django.db.models.expressions import Col

from ..models import DatabaseNow


@cache
def _columns(entity: Any) -> list[Col]:
    """Return the columns of a row but for its state, after the one that the time is read as."""
    meta = entity._meta
    fields = [field for field in meta.concrete_fields if field.name != "state"]
    return [Col(meta.db_table, field) for field in (meta.get_field("changed_at"), *fields)]


@cache
def _select(entity: Any, using: str, bounded: bool) -> str:
    quote = connections[using].ops.quote_name
    compiler = QuerySet(entity, using=using).query.get_compiler(using)
    now, _ = compiler.compile(DatabaseNow())
    names = (str(column.target.column) for column in _columns(entity)[1:])
    columns = ", ".join(f"entity.{quote(name)}" for name in names)
    table, pk = quote(entity._meta.db_table), quote(entity._meta.pk.column)
    one = "set_config('lock_timeout', %s, true)" if bounded else "1"
    return (
        f"SELECT entity.state, {now}, {columns}, one.one FROM (SELECT {one} AS one) AS one "
        f"LEFT JOIN {table} AS entity ON entity.{pk} = %s"
    )


def load(
    cursor: Any, entity: Any, id: str, *, lock: bool, wait: float | None
) -> tuple[datetime, dict[str, Any] | None, str | None]:
    """Return the time by the database's clock, and the values of a row; its state as JSON, apart.

    ``wait`` bounds, in seconds, how long the transaction waits for each lock; on PostgreSQL, where
    that saves a statement.
    """
    connection = cursor.db
    bounds = []
    if wait is not None and connection.vendor == "postgresql":
        bounds.append(f"{max(1, round(wait * 1000))}ms")
    sql = _select(entity, connection.alias, bool(bounds)) + (" FOR UPDATE" if lock else "")
    cursor.execute(sql, [*bounds, id])
    text, *values, _ = cursor.fetchone()
    for number, column in enumerate(_columns(entity)):
        own = column.get_db_converters(connection)
        for convert in (*connection.ops.get_db_converters(column), *own):
            values[number] = convert(values[number], column, connection)
    now, *values = values
    if text is None:
        return now, None, None
    names = (column.target.attname for column in _columns(entity)[1:])
    return now, dict(zip(names, values, strict=True)), text


def update(
    cursor: Any, entity: Any, id: str, version: int, count: int, values: Mapping[str, Any]
) -> bool:
    """Raise the version of a row by the count, and write values; say whether it was at the version.

    The state is given as JSON.
    """
    connection, meta = cursor.db, entity._meta
    quote = connection.ops.quote_name
    fields = [(meta.get_field(name), value) for name, value in values.items()]
    params = [v if f.name == "state" else f.get_db_prep_save(v, connection) for f, v in fields]
    changes = "".join(f", {quote(field.column)} = %s" for field, _ in fields)
    cursor.execute(
        f"UPDATE {quote(meta.db_table)} SET version = version + %s{changes} "
        f"WHERE {quote(meta.pk.column)} = %s AND version = %s",
        [count, *params, id, version],
    )
    return bool(cursor.rowcount == 1)


def answered(cursor: Any, log: Any, id: str, command_ids: Collection[str]) -> list[int]:
    """Return the rows of the versions that have one of the command ids: as a rule there is none."""
    connection = cursor.db
    where = f"SELECT id FROM {connection.ops.quote_name(log._meta.db_table)} WHERE stream = %s"
    params: list[Any] = [id, *command_ids]
    sql = f"{where} AND command_id IN ({', '.join(['%s'] * len(command_ids))})"
    if connection.vendor == "postgresql" and len(command_ids) > 1:
        # Where statistics are old, IN and ANY would read all versions of the entity.
        params = [[*command_ids], id]
        each = f"LATERAL ({where} AND command_id = asked.id LIMIT 1)"
        sql = f"SELECT found.id FROM unnest(%s::text[]) AS asked (id), {each} AS found"
    cursor.execute(sql, params)
    return [row for (row,) in cursor.fetchall()]
