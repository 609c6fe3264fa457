"""Batches of the job table: select what is ready, delete what was taken. Autocommit, no locks.

Each shard is read by its own index range of ``(app, shard, available_at, id)``, whatever the
statistics say, so the cost of a batch does not depend on what lies in other shards, on held rows,
on the length of the backlog, or on another Celery app whose broker is away. There is no floor under
the ranges: a row that commits late with a low id is the first of its shard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import Model

from ...models import DatabaseNow, StagedJob
from ...models.collation import COLLATIONS

#: Messages up to this size are read with their batch, larger ones one by one, in bytes.
SMALL_BYTES = 64 * 1024
#: A batch is cut where its messages reach this size, in bytes.
BUDGET_BYTES = 32 * 1024 * 1024
#: Rows of one DELETE.
DELETED_AT_ONCE = 2000
_NAMES = ("id", "shard", "ordering_key", "app", "task", "task_id", "queue")
_MESSAGE = ("body", "envelope")
_IS_SMALL = f"LENGTH(body) + LENGTH(envelope) <= {SMALL_BYTES}"
_COLUMNS = ", ".join([*_NAMES, *(f"CASE WHEN {_IS_SMALL} THEN {name} END" for name in _MESSAGE)])
#: PostgreSQL counts the characters of a text for its LENGTH; its size in bytes is known.
_FAST_COLUMNS = _COLUMNS.replace("LENGTH", "OCTET_LENGTH")
#: Seconds from one time to another, as a number: no driver makes a datetime of it.
_SECONDS = {
    "postgresql": "DATE_PART('epoch', {now}) - DATE_PART('epoch', {then})",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, {then}, {now}) / 1e6",
    "sqlite": "(JULIANDAY({now}) - JULIANDAY({then})) * 86400.0",
}


class Row(NamedTuple):
    """A staged job as the drain sees it: plain values, no model instance."""

    id: int
    shard: int
    ordering_key: str
    app: str
    task: str
    task_id: str
    queue: str
    body: bytes
    envelope: str
    #: Seconds for which it had been ready when it was read: since it was staged, or held until.
    waited: float = 0.0
    #: Its own process was to publish it: see ``jobs.immediate``.
    is_immediate: bool | None = None

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class BatchReader:
    """Reads batches of one Celery app's jobs, from the shards that a drainer owns.

    A sweep takes an equal share of every shard; where that leaves rows behind, the next batch is
    spent on the shards that had more, and then comes a sweep again. So one deep shard gets whole
    batches and starves no other.
    """

    def __init__(self, *, using: str, app: str, batch_size: int) -> None:
        self.using = using
        self.app = app
        self.batch_size = batch_size
        self._deep: list[int] = []

    def read(self, shards: Iterable[int]) -> list[Row]:
        """Return ready rows in id order, and due held ones after them; [] when there are none."""
        owned = sorted(shards)
        if not owned:
            return []
        deep = [shard for shard in self._deep if shard in owned]
        self._deep = []
        rows = self._select(deep, "available_at IS NULL", self._share(deep)) if deep else []
        if not rows:
            rows = self._sweep(owned)
        return rows

    def _sweep(self, shards: list[int]) -> list[Row]:
        share = self._share(shards)
        rows = self._select(shards, "available_at IS NULL", share)
        counts = Counter(row.shard for row in rows)
        self._deep = [shard for shard, count in counts.items() if count == share]
        room = self._share(shards * 4)
        return rows + self._select(shards, f"available_at <= {_now(self.using)}", room)

    def _share(self, shards: list[int]) -> int:
        return max(1, ceil(self.batch_size / len(shards)))

    def _select(self, shards: list[int], condition: str, share: int) -> list[Row]:
        connection = connections[self.using]
        sql, params = _sql(connection, self.app, shards, condition, share)
        found = self._fetch(sql, params)
        if connection.vendor == "mysql" and any(row.ordering_key for row in found):
            # MariaDB's read view is no atomic cut: it may show a job and not the one of its key
            # that was committed before it. A later look finds that one.
            while _has_earlier(again := self._fetch(sql, params), found):
                found = again
        return self._within_budget(found)

    def _fetch(self, sql: str, params: list[Any]) -> list[Row]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, params)
            return sorted(map(Row._make, cursor.fetchall()), key=lambda row: row.id)

    def _within_budget(self, rows: list[Row]) -> list[Row]:
        """Read the large messages, and leave the rest for later where they are too many at once."""
        kept: list[Row] = []
        weight = 0
        for row in rows:
            if weight > BUDGET_BYTES:
                break
            if row.body is None:
                staged = StagedJob.objects.using(self.using).filter(pk=row.id, task_id=row.task_id)
                message = staged.values_list(*_MESSAGE).first()
                if message is None:
                    continue  # gone by now
                row = row._replace(**dict(zip(_MESSAGE, message, strict=True)))
            weight += len(row.body) + len(row.envelope)
            kept.append(row)
        return kept


def _has_earlier(again: list[Row], found: list[Row]) -> bool:
    """Say whether there are new rows below the last one that was found."""
    known = {row.id for row in found}
    return any(row.id < found[-1].id and row.id not in known for row in again)


def apps_with_rows(*, using: str) -> list[str]:
    """Return the Celery apps that have rows, held ones too: one seek in the index for each."""
    found: list[str] = []
    names = StagedJob.objects.using(using).order_by("app").values_list("app", flat=True)
    while (name := (names.filter(app__gt=found[-1]) if found else names).first()) is not None:
        found.append(name)
    return found


def delete(
    published: Sequence[tuple[int, str]], *, using: str, model: type[Model] = StagedJob
) -> int:
    """Delete rows that the broker took, by id and task id, even of shards that were lost meanwhile.

    An id alone may be another job's by now: a fail-over, a restored backup, a crash that loses
    commits and TRUNCATE … RESTART IDENTITY give ids out again. Under one id *and* one task id only
    the same task can be staged again, by a caller that chooses its task ids: its message was sent.
    """
    return _each(published, "DELETE {j} FROM {rows} WHERE {found}", using=using, model=model)


def release(held: Sequence[tuple[int, str]], *, using: str) -> None:
    """Make rows ready that are held for immediate delivery, unless a drainer has done so."""
    sql = (
        "UPDATE {rows} SET available_at = NULL, is_immediate = NULL WHERE {found} AND is_immediate"
    )
    _each(held, sql, using=using, model=StagedJob)


def _each(
    rows: Sequence[tuple[int, str]], statement: str, *, using: str, model: type[Model]
) -> int:
    """Execute a statement for rows of a model. Returns how many it found."""
    count = 0
    connection: Any = connections[using]
    table = connection.ops.quote_name(model._meta.db_table)
    for start in range(0, len(rows), DELETED_AT_ONCE):
        some = rows[start : start + DELETED_AT_ONCE]
        # Integers of our own are written out, for one look-up each; no engine's limit on parameters
        # applies: MySQL's driver writes them out, too, and the others get one.
        if connection.vendor == "mysql":
            # A scan would wait for the rows of others' open transactions, and MySQL scans where the
            # ids are most of the table, or many. A forced join in this order looks up each.
            listed = " UNION ALL SELECT ".join(f"{id:d} AS id, %s AS task_id" for id, _ in some)
            compared = COLLATIONS[connection.mysql_is_mariadb]
            joined = (
                f"(SELECT {listed}) AS d "
                f"STRAIGHT_JOIN {table} AS j FORCE INDEX (PRIMARY) ON j.id = d.id "
                f"AND j.task_id = CONVERT(d.task_id USING utf8mb4) COLLATE {compared}"
            )
            sql = statement.format(j="j", rows=joined, found="TRUE")
            params: list[Any] = [task_id for _, task_id in some]
        else:
            pairs = [f"{id:d}:{task_id}" for id, task_id in some]
            ids = ",".join(f"{id:d}" for id, _ in some)
            # PostgreSQL gets arrays as text: half the time of lists, in the driver and there.
            is_sqlite = connection.vendor == "sqlite"
            is_listed = f"IN ({ids})" if is_sqlite else f"= ANY('{{{ids}}}'::bigint[])"
            one_of = "IN (SELECT value FROM json_each(%s))" if is_sqlite else "= ANY(%s::text[])"
            found = f"id {is_listed} AND id || ':' || task_id {one_of}"
            sql = statement.format(j="", rows=table, found=found)
            params = [json.dumps(pairs) if is_sqlite else _array(pairs)]
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            count += cursor.rowcount
    return count


def _array(texts: list[str]) -> str:
    """Return the text of an array of PostgreSQL. NUL, which no text has there, parts its items."""
    escaped = "\0".join(texts).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + escaped.replace("\0", '","') + '"}'


def _now(using: str) -> str:
    compiler = StagedJob.objects.using(using).all().query.get_compiler(using)
    return str(compiler.compile(DatabaseNow())[0])


def _sql(
    connection: Any, app: str, shards: list[int], condition: str, share: int
) -> tuple[str, list[Any]]:
    table = connection.ops.quote_name(StagedJob._meta.db_table)
    index = StagedJob._meta.indexes[0].name
    since = "staged_at" if condition.endswith("IS NULL") else "available_at"
    waited = _SECONDS[connection.vendor].format(now=_now(connection.alias), then=since)
    is_postgresql = connection.vendor == "postgresql"
    columns = _FAST_COLUMNS if is_postgresql else _COLUMNS
    columns = f"{columns}, {waited} AS waited, is_immediate"
    if is_postgresql:
        # LATERAL is one index scan a shard. The order names the whole index: no other index gives
        # it.
        return (
            f"SELECT j.* FROM unnest(%s::smallint[]) AS s(shard) CROSS JOIN LATERAL ("
            f"SELECT {columns} FROM {table} t "
            f"WHERE t.app = %s AND t.shard = s.shard AND {condition} "
            f"ORDER BY t.app, t.shard, t.available_at, t.id LIMIT %s) j",
            [shards, app, share],
        )
    # The order of the index from where the range begins. MariaDB sorts the shard if told all of it.
    by = "id" if condition.endswith("IS NULL") else "available_at, id"
    order = f"ORDER BY {by} LIMIT {share:d}"
    if connection.vendor == "mysql":
        # Parentheses, not derived tables: those are written to disk for the sake of the BLOBs.
        part = (
            f"(SELECT {columns} FROM {table} FORCE INDEX ({index}) "
            f"WHERE app = %s AND shard = %s AND {condition} {order})"
        )
    else:
        part = (
            f"SELECT * FROM (SELECT {columns} FROM {table} INDEXED BY {index} "
            f"WHERE app = %s AND shard = %s AND {condition} {order})"
        )
    params = [value for shard in shards for value in (app, shard)]
    return " UNION ALL ".join([part] * len(shards)), params
