"""A table of 128 partitions beside a plain table with the same rows: insert, and look-up by key.

The tables take turns on one connection. A round inserts rows, each in its own transaction, looks up
rows by id, each with its own statement, and, for comparison, inserts a hundred per transaction.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

ASKED = {"sharded_vs_plain": "at least 0.8"}
#: Rows of each table before the first round; ``--scale 10`` makes it ten million.
ROWS, QUICK_ROWS = 1_000_000, 20_000
SHARDS = 128


def compare(*, scale: float, quick: bool) -> dict[str, Any]:
    """Run the rounds in the database of ``default``; returns ``ratios`` and ``rounds``."""
    from django.db import connection

    rows = round(ROWS * scale) if not quick else QUICK_ROWS
    tables = {"plain": "benchmark_plain", "sharded": "benchmark_sharded"}
    try:
        _make(tables, rows)
        count, rounds = (200, 5) if quick else (500, 25)
        measured = []
        for number in range(rounds + 1):
            turn: dict[str, float] = {}
            for name in sorted(tables, reverse=number % 2 == 1):
                table = tables[name]
                for kind, work in {
                    "inserts": partial(_insert, table, count, 1),
                    "look_ups": partial(_look_up, table, rows, count),
                    "inserts_by_hundreds": partial(_insert, table, count, 100),
                }.items():
                    begin = time.perf_counter()
                    work()
                    turn[f"{name}_{kind}"] = count / (time.perf_counter() - begin)
            if number:  # round 0 warms up
                measured.append(turn)
    finally:
        with connection.cursor() as cursor:
            for table in tables.values():
                cursor.execute(f"DROP TABLE IF EXISTS {table}")

    def ratio(*kinds: str) -> float:
        """Return the plain table's time for these kinds, divided by the sharded table's."""
        each = [
            sum(1 / turn[f"plain_{kind}"] for kind in kinds)
            / sum(1 / turn[f"sharded_{kind}"] for kind in kinds)
            for turn in measured
        ]
        return round(statistics.median(each), 4)

    return {
        "ratios": {
            "sharded_vs_plain": ratio("inserts", "look_ups"),
            "sharded_vs_plain_inserts": ratio("inserts"),
            "sharded_vs_plain_look_ups": ratio("look_ups"),
            "sharded_vs_plain_inserts_by_hundreds": ratio("inserts_by_hundreds"),
        },
        "rows": rows,
        "rounds": measured,
    }


def _make(tables: dict[str, str], rows: int) -> None:
    from django.apps.registry import Apps
    from django.db import connection, models

    from outbox_app.sharding import ShardedTable

    for name, table in tables.items():
        options = {"apps": Apps(), "app_label": "benchmarks", "db_table": table}
        body = {
            "id": models.BigIntegerField(primary_key=True),
            "note": models.CharField(max_length=100),
            "Meta": type("Meta", (), options),
            "__module__": __name__,
        }
        model: Any = type(name, (models.Model,), body)
        state = SimpleNamespace(apps=SimpleNamespace(get_model=lambda *names, model=model: model))
        with connection.schema_editor(atomic=False) as editor:
            editor.create_model(model)
            if name == "sharded":
                operation = ShardedTable(name, by="id", shards=SHARDS)
                operation.database_forwards("benchmarks", editor, state, state)
        there = min(rows, 1000)
        with connection.cursor() as cursor:
            values = ", ".join(f"({n}, 'note {n}')" for n in range(1, there + 1))
            cursor.execute(f"INSERT INTO {table} (id, note) VALUES {values}")
            while there < rows:
                more = min(there, rows - there, 200_000)
                cursor.execute(
                    f"INSERT INTO {table} (id, note) SELECT id + {there}, note FROM {table} "
                    f"WHERE id <= {more}"
                )
                there += more
            analyze = "ANALYZE TABLE" if connection.vendor == "mysql" else "VACUUM ANALYZE"
            cursor.execute(f"{analyze} {table}")


def _insert(table: str, count: int, batch: int) -> None:
    from django.db import connection, transaction

    from outbox_app.ids import snowflakes

    ids = snowflakes(count)
    sql = f"INSERT INTO {table} (id, note) VALUES (%s, %s)"
    for first in range(0, count, batch):
        with transaction.atomic(), connection.cursor() as cursor:
            for id in ids[first : first + batch]:
                cursor.execute(sql, [id, "a note of some length"])


def _look_up(table: str, rows: int, count: int) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        for _ in range(count):
            cursor.execute(f"SELECT note FROM {table} WHERE id = %s", [random.randint(1, rows)])
            assert cursor.fetchone()
