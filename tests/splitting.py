"""Split tables for tests: a copy of the model's table is split, and the table is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from django.db import connections

from outbox_app.sharding import ShardedTable
from tests.mysql import explain, is_mysql, plan_of


def run_operation(operation: Any, model: Any, alias: str, *, back: bool = False) -> None:
    """Run an operation as ``migrate`` does, on this model, whatever name it has."""
    state = SimpleNamespace(apps=SimpleNamespace(get_model=lambda *names: model))
    with connections[alias].schema_editor(atomic=False) as editor:
        step = operation.database_backwards if back else operation.database_forwards
        step("shop", editor, state, state)


@contextmanager
def table_of(model: Any, alias: str) -> Iterator[None]:
    """Create the table of a model, and drop it after the block."""
    connection = connections[alias]
    with connection.schema_editor(atomic=False) as editor:
        editor.create_model(model)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP TABLE {connection.ops.quote_name(model._meta.db_table)}")


@contextmanager
def split(model: Any, alias: str, *, shards: int = 4, **options: Any) -> Iterator[None]:
    table = model._meta.db_table
    postgres = connections[alias].vendor == "postgresql"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO kept")
        like = "(LIKE kept INCLUDING ALL)" if postgres else "LIKE kept"
        cursor.execute(f"CREATE TABLE {table} {like}")
    try:
        run_operation(ShardedTable("Model", shards=shards, **options), model, alias)
        yield
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE {table}")
            cursor.execute(f"ALTER TABLE kept RENAME TO {table}")


def partitions_read(rows: Any) -> int:
    """Return of how many partitions the database reads for a query."""
    sql, params = rows.query.get_compiler(rows.db).as_sql()
    return partitions_read_by(rows.db, sql, params)


def partitions_read_by(alias: str, sql: str, params: Any = None) -> int:
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
            [(plans,)] = cursor.fetchall()
            return sum(plan.get("Relation Name") is not None for plan in _nodes(plans[0]["Plan"]))
        cursor.execute(explain(sql) if is_mysql(alias) else f"EXPLAIN PARTITIONS {sql}", params)
        return len(str(plan_of(cursor)[0]["partitions"]).split(","))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from _nodes(each)
