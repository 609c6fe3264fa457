"""Compares the live table with the shadow table, by SQL: the changes that a rebuild would make.

Both tables are read in one snapshot. Rows with events that one table has not applied yet are
counted as *unsettled* and not compared, so each reported difference is real, even while writers
continue. Columns with the time of writing (``auto_now``) are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, NamedTuple

from django.db import connections, models, transaction

#: How many rows of each kind are shown.
EXAMPLES = 3
#: Keys looked up by one statement.
CHUNK = 500
#: The kinds of rows that differ.
DIFFERING = ("changed", "added", "gone")


class Comparison(NamedTuple):
    #: Rows of each kind, by ``DIFFERING``, and those that are the "same".
    counts: dict[str, int]
    #: Rows that differ, perhaps only because one side has not applied an event yet.
    unsettled: int
    #: Lines for people.
    examples: list[str]


def compare(
    live: type[models.Model],
    shadow: type[models.Model],
    *,
    using: str,
    unsettled: Callable[[], Collection[Any]],
) -> Comparison:
    """Compare two tables with the same columns.

    ``unsettled`` is called inside the snapshot. It returns the keys of all events that one table
    may not have applied when the comparison began.
    """
    tables = _Tables(live, shadow, using)
    with transaction.atomic(using=using):
        if connections[using].vendor != "sqlite":
            with connections[using].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        counts = tables.counts()
        keys = set(unsettled())
        moving = tables.counts_of(keys)
        settled = {kind: counts[kind] - moving[kind] for kind in DIFFERING}
        examples = list(tables.examples(keys)) if any(settled.values()) else []
    settled["same"] = counts["both"] - counts["changed"]
    return Comparison(settled, sum(moving[kind] for kind in DIFFERING), examples)


class _Tables:
    def __init__(self, live: type[models.Model], shadow: type[models.Model], using: str) -> None:
        self.live, self.shadow, self.using = live, shadow, using
        self.connection = connections[using]
        quote = self.connection.ops.quote_name
        meta = live._meta
        assert meta.pk is not None
        self.pk = meta.pk
        self.key = quote(str(meta.pk.column))
        self.fields = [field for field in meta.concrete_fields if _is_compared(field)]
        columns = [quote(str(field.column)) for field in self.fields]
        differ = " OR ".join(f"NOT ({self._equal(column)})" for column in columns) or "1 = 0"
        new, old = quote(shadow._meta.db_table), quote(meta.db_table)
        on = f"new.{self.key} = old.{self.key}"
        self.sources = {
            "both": f"{old} old JOIN {new} new ON {on} WHERE 1 = 1",
            "changed": f"{old} old JOIN {new} new ON {on} WHERE ({differ})",
            "added": f"{new} new LEFT JOIN {old} old ON {on} WHERE old.{self.key} IS NULL",
            "gone": f"{old} old LEFT JOIN {new} new ON {on} WHERE new.{self.key} IS NULL",
        }

    def counts(self, keys: list[Any] | None = None) -> dict[str, int]:
        """Count all rows, or the rows with these keys, by one statement."""
        params: list[Any] = []
        selects = []
        for kind, source in self.sources.items():
            where = ""
            if keys is not None:
                side = "new" if kind == "added" else "old"
                where = f" AND {side}.{self.key} IN ({', '.join(['%s'] * len(keys))})"
                params += keys
            selects.append(f"(SELECT COUNT(*) FROM {source}{where})")
        with self.connection.cursor() as cursor:
            cursor.execute(f"SELECT {', '.join(selects)}", params)
            return dict(zip(self.sources, map(int, cursor.fetchone()), strict=True))

    def counts_of(self, keys: Collection[Any]) -> Counter[str]:
        total: Counter[str] = Counter()
        left = (self.pk.get_db_prep_value(key, self.connection) for key in keys)
        while chunk := list(islice(left, CHUNK)):
            total.update(self.counts(chunk))
        return total

    def examples(self, without: Collection[Any]) -> Iterator[str]:
        for kind in DIFFERING:
            side, model = ("new", self.shadow) if kind == "added" else ("old", self.live)
            sql = (
                f"SELECT {side}.* FROM {self.sources[kind]} ORDER BY {side}.{self.key} "
                f"LIMIT {EXAMPLES + len(without)}"
            )
            rows: Iterator[Any] = iter(model._base_manager.using(self.using).raw(sql))
            for row in islice((row for row in rows if row.pk not in without), EXAMPLES):
                yield f"{kind} {self.pk.name}={row.pk!r:.80}{self._change(kind, row)}"

    def _change(self, kind: str, row: Any) -> str:
        if kind != "changed":
            return ""
        new = self.shadow._base_manager.using(self.using).get(pk=row.pk)
        change = ""
        for field in self.fields:
            before, after = getattr(row, field.attname), getattr(new, field.attname)
            if before != after:
                change += f" {field.name}={before!r:.80} -> {after!r:.80}"
        return change

    def _equal(self, column: str) -> str:
        old, new = f"old.{column}", f"new.{column}"
        if self.connection.vendor == "mysql":  # its collations treat different bytes as equal
            return f"CAST({old} AS BINARY) <=> CAST({new} AS BINARY)"
        if self.connection.vendor == "postgresql":
            return f"{old} IS NOT DISTINCT FROM {new}"
        return f"{old} IS {new}"


def _is_compared(field: Any) -> bool:
    written = getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False)
    return not (field.primary_key or field.generated or written)
