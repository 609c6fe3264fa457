"""Rows that may be there already: updated, or left as they are, in one statement.

A conflict is no error, so it breaks no transaction. On MySQL the IGNORE of an INSERT also cuts what
is too long in silence: check lengths before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.constants import OnConflict


def upsert(
    table: QuerySet[Any],
    rows: Sequence[Model],
    *,
    update: Sequence[str],
    unique: Sequence[str],
    batch_size: int | None = None,
) -> None:
    """Insert rows; of those that are there already, by the ``unique`` fields, ``update`` some."""
    named = connections[table.db].features.supports_update_conflicts_with_target
    table.bulk_create(
        rows,
        batch_size=batch_size,
        update_conflicts=True,
        update_fields=update,
        unique_fields=unique if named else None,
    )


def insert_if_missing(model: type[Model], values: dict[str, Any], *, using: str) -> bool:
    """Insert a row; return False, and change nothing, where its key is there already.

    The INSERT waits for another transaction that holds the key: what is read after it, at
    REPEATABLE READ too, is what that one committed.
    """
    connection = connections[using]
    quote, ignore = connection.ops.quote_name, OnConflict.IGNORE
    sql = (
        f"{connection.ops.insert_statement(on_conflict=ignore)} {quote(model._meta.db_table)} "
        f"({', '.join(map(quote, values))}) VALUES ({', '.join(['%s'] * len(values))}) "
        f"{connection.ops.on_conflict_suffix_sql([], ignore, [], [])}"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, list(values.values()))
        return bool(cursor.rowcount)
