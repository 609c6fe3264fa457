"""Batches of the job table: select ready rows, delete published ones. Autocommit, no locks.

A look (one query for ids) scans one range of the index ``(app, shard, available_at, id)`` for each
shard, even if statistics are stale. So its cost does not depend on other shards, on held rows, on
the length of the backlog, or on another Celery app whose broker is unreachable. The ranges have no
lower bound: a row that commits late with a low id is the first of its shard at the next look.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import Model

from ...database.clock import later_sql, now_sql
from ...fields import exact_collation
from ...models import StagedJob

#: Messages up to this many bytes are read with their batch, larger ones one by one.
SMALL_BYTES = 64 * 1024
#: A batch ends when its messages reach this many bytes.
BUDGET_BYTES = 32 * 1024 * 1024
#: Ids that a look takes from each shard: FEW at first, doubled up to MOST while all get used.
FEW, MOST = 250, 1000
#: How long the ids of a look may be used, as a multiple of the time that the look took.
SERVES = 20
#: Rows of one SELECT by ids. MariaDB turns a list of a thousand ids into a join.
READ_AT_ONCE = 900
#: Rows of one DELETE.
DELETED_AT_ONCE = 2000
#: How often the limit of a receipt is doubled, at most.
DOUBLINGS = 5
_NAMES = ("id", "shard", "ordering_key", "app", "task", "task_id", "queue")
_MESSAGE = ("body", "envelope")
_IS_SMALL = f"LENGTH(body) + LENGTH(envelope) <= {SMALL_BYTES}"
_COLUMNS = ", ".join([*_NAMES, *(f"CASE WHEN {_IS_SMALL} THEN {name} END" for name in _MESSAGE)])
#: On PostgreSQL LENGTH counts the characters of a text; OCTET_LENGTH need not read them.
_FAST_COLUMNS = _COLUMNS.replace("LENGTH", "OCTET_LENGTH")
#: SQL for the seconds between two times, as a number: no driver has to make a datetime.
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
    #: For how many seconds the row had been ready when it was read: since it was staged, or since
    #: its hold ended. 0 if that time was edited by hand into nonsense.
    waited: float = 0.0
    #: Whether the process that staged it was to publish it: see ``jobs.immediate``.
    is_immediate: bool | None = None
    #: The limit of its receipt in seconds, or None; and how often the broker took it before.
    receipt: int | None = None
    publishes: int | None = None

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class BatchReader:
    """Reads batches of one Celery app's jobs, from the shards that a drainer owns.

    One look takes the ids of many batches, an equal share from every shard; each batch is then read
    by its ids. So deleted rows that an open snapshot keeps are scanned once for many batches, and
    one deep shard starves no other.
    """

    def __init__(self, *, using: str, app: str, batch_size: int) -> None:
        self.using = using
        self.app = app
        self.batch_size = batch_size
        #: The ids of the last look that no batch has used yet, and until when they may be used.
        self._ids: list[int] = []
        self._until = 0.0
        self._owned: set[int] = set()
        self._but: Mapping[int, int] = {}
        self._share, self._found = FEW, 0
        #: Whether the ids are complete: with a job of a key, all its earlier jobs were found, too.
        self._is_cut = False

    def read(
        self, shards: Iterable[int], *, go_on: bool = False, but: Mapping[int, int] | None = None
    ) -> list[Row]:
        """Return the next rows, in id order; [] when none is ready.

        ``go_on``: every row of the last batch has left, so the ids of the last look may be used. If
        a row stayed, a new look finds it before the later jobs of its ordering key. ``but``: ids of
        rows to leave out, with their shards.
        """
        owned, self._but = set(shards), but or {}
        # For a shard that was given up and is back, the look may have skipped earlier jobs.
        go_on, self._owned = go_on and owned <= self._owned, owned
        rows = self._next(owned) if go_on and time.monotonic() < self._until else []
        if not rows:
            self._look_anew(owned)
            rows = self._next(owned)
        if not self._is_cut and any(row.ordering_key for row in rows):
            # MariaDB's read view is no atomic cut: it may show a job, but not a job of the same
            # key that was committed before. A later look finds that job.
            found = [*(row.id for row in rows), *self._ids]
            while _has_earlier(again := self._look(owned), found):
                found = again
            self._ids, self._is_cut = found, True
            rows = self._next(owned)
        return rows

    def _look_anew(self, shards: set[int]) -> None:
        began = time.monotonic()
        is_used_up = not self._ids and self._found >= self._share
        self._share = min(2 * self._share, MOST) if is_used_up else FEW
        self._ids = self._look(shards)
        self._found = len(self._ids)
        ended = time.monotonic()
        self._until = ended + SERVES * (ended - began)
        self._is_cut = connections[self.using].vendor != "mysql"

    def _look(self, shards: set[int]) -> list[int]:
        connection = connections[self.using]
        found: list[int] = []
        # Rows to leave out may be the first of their shard: there a look takes so many more.
        left_out = Counter(self._but.values())
        fuller = shards & left_out.keys()
        most = max(left_out.values(), default=0)
        with connection.cursor() as cursor:
            for some, more in ((shards - fuller, 0), (fuller, most)):
                if some:
                    share = self._share + more
                    cursor.execute(*_ids(connection, self.app, sorted(some), share))
                    found += [id for (id,) in cursor.fetchall() if id not in self._but]
        return sorted(found)

    def _next(self, shards: set[int]) -> list[Row]:
        rows: list[Row] = []
        while self._ids and not rows:
            some = self._ids[: self.batch_size]
            # The id may belong to another job by now: see ``delete``.
            found = [row for row in self._fetch(some) if row.app == self.app]
            rows = self._within_budget([row for row in found if row.shard in shards])
            last = rows[-1].id if rows else some[-1]
            self._ids = self._ids[bisect_right(some, last) :]
        return rows

    def _fetch(self, ids: list[int]) -> list[Row]:
        connection = connections[self.using]
        rows: list[Row] = []
        with connection.cursor() as cursor:
            for start in range(0, len(ids), READ_AT_ONCE):
                # Pass parameters, though empty: the SQL of the time has doubled percent signs.
                cursor.execute(_rows(connection, ids[start : start + READ_AT_ONCE]), [])
                rows += map(Row._make, cursor.fetchall())
        return sorted(rows, key=attrgetter("id"))

    def _within_budget(self, rows: list[Row]) -> list[Row]:
        """Read the large messages, and leave the rest for later when the budget is used up."""
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


def _has_earlier(again: list[int], found: list[int]) -> bool:
    """Return whether ``again`` has new ids below the last id of ``found``."""
    known, last = set(found), found[-1]
    return any(id < last and id not in known for id in again)


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

    The id may belong to another job by now: after a fail-over, a restored backup, a crash that
    loses commits or TRUNCATE … RESTART IDENTITY, ids are given out again. The same id *and* task id
    can only be the same task, staged again by a caller that chooses its ids: it was sent.
    """
    return _each(published, "DELETE {j} FROM {rows} WHERE {found}", using=using, model=model)


def mark_sent(published: Sequence[tuple[int, str]], *, using: str) -> int:
    """Keep rows with a receipt that the broker took, and set when to look whether one was started.

    That is after once, twice, four times … the limit. A row that another drainer has marked
    meanwhile is left as it is: returns how many were marked.
    """
    now, least = now_sql(using), "MIN" if connections[using].vendor == "sqlite" else "LEAST"
    # ``available_at`` first: MySQL assigns from left to right.
    next_look = later_sql(f"receipt * (1 << {least}(COALESCE(publishes, 0), {DOUBLINGS}))", using)
    sql = (
        f"UPDATE {{rows}} SET available_at = {next_look}, sent_at = {now}, "
        "publishes = COALESCE(publishes, 0) + 1, is_immediate = NULL "
        f"WHERE {{found}} AND (sent_at IS NULL OR COALESCE(available_at <= {now}, TRUE))"
    )
    return _each(published, sql, using=using, model=StagedJob, changes_key=False)


def look_later(sent: Sequence[tuple[int, str]], *, using: str) -> None:
    """Look at sent rows again after their limit, without sending them.

    A row that a worker has held meanwhile, until its retry, is left as it is.
    """
    sql = (
        f"UPDATE {{rows}} SET available_at = {later_sql('receipt', using)} WHERE {{found}} "
        f"AND sent_at IS NOT NULL AND COALESCE(available_at <= {now_sql(using)}, TRUE)"
    )
    _each(sent, sql, using=using, model=StagedJob, changes_key=False)


def release(held: Sequence[tuple[int, str]], *, using: str) -> None:
    """End the hold of rows for immediate delivery, unless a drainer has ended it."""
    sql = (
        "UPDATE {rows} SET available_at = NULL, is_immediate = NULL WHERE {found} AND is_immediate"
    )
    _each(held, sql, using=using, model=StagedJob)


def _each(
    rows: Sequence[tuple[int, str]],
    statement: str,
    *,
    using: str,
    model: type[Model],
    changes_key: bool = True,
) -> int:
    """Execute a statement for rows of a model. Returns how many rows it found.

    Rows that another transaction has locked (to cancel them, for example) count as not found, as
    that transaction may stay open for long. Without ``changes_key`` PostgreSQL does not count a row
    as locked that a worker is beginning to execute.
    """
    count = 0
    connection: Any = connections[using]
    table = connection.ops.quote_name(model._meta.db_table)
    skips = connection.features.has_select_for_update_skip_locked
    no_key = not changes_key and connection.features.has_select_for_no_key_update
    kind = connection.ops.for_update_sql(skip_locked=True, no_key=no_key) if skips else ""
    lock = f" {kind}" if kind else ""
    for start in range(0, len(rows), DELETED_AT_ONCE):
        some = rows[start : start + DELETED_AT_ONCE]
        # The ids, integers of our own, are written into the SQL, so that each is one look-up. No
        # limit on parameters applies: MySQL's driver writes them out, too, and others get one.
        if connection.vendor == "mysql":
            # MySQL would scan if there are many ids, or most of the table's; a scan waits for rows
            # that other transactions have locked. A forced join in this order looks up each row.
            # Without LIMIT MySQL would merge the two joins, and skip no locked rows.
            listed = " UNION ALL SELECT ".join(f"{id:d} AS id, %s AS task_id" for id, _ in some)
            compared = exact_collation(connection)
            forced = f"STRAIGHT_JOIN {table} AS {{0}} FORCE INDEX (PRIMARY) ON {{0}}.id = {{1}}.id"
            free = (
                f"SELECT l.id FROM (SELECT {listed}) AS d {forced.format('l', 'd')} "
                f"AND l.task_id = CONVERT(d.task_id USING utf8mb4) COLLATE {compared} "
                f"LIMIT {len(some)}{lock}"
            )
            joined = f"({free}) AS f {forced.format('j', 'f')}"
            sql = statement.format(j="j", rows=joined, found="TRUE")
            params: list[Any] = [task_id for _, task_id in some]
        else:
            pairs = [f"{id:d}:{task_id}" for id, task_id in some]
            ids = ",".join(f"{id:d}" for id, _ in some)
            # PostgreSQL gets arrays as text: driver and server take half the time of lists.
            is_sqlite = connection.vendor == "sqlite"
            is_listed = f"IN ({ids})" if is_sqlite else f"= ANY('{{{ids}}}'::bigint[])"
            one_of = "IN (SELECT value FROM json_each(%s))" if is_sqlite else "= ANY(%s::text[])"
            found = f"id {is_listed} AND id || ':' || task_id {one_of}"
            if not is_sqlite:
                found = f"id = ANY(ARRAY(SELECT id FROM {table} WHERE {found}{lock}))"
            sql = statement.format(j="", rows=table, found=found)
            params = [json.dumps(pairs) if is_sqlite else _array(pairs)]
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            count += cursor.rowcount
    return count


def _array(texts: list[str]) -> str:
    """Return the text of a PostgreSQL array. Joins with NUL, which no text there contains."""
    escaped = "\0".join(texts).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + escaped.replace("\0", '","') + '"}'


def _ids(connection: Any, app: str, shards: list[int], share: int) -> tuple[str, list[Any]]:
    """Return a statement that selects the ids of ready jobs and of due jobs of each shard."""
    table = connection.ops.quote_name(StagedJob._meta.db_table)
    index = StagedJob._meta.indexes[0].name
    conditions = ("available_at IS NULL", f"available_at <= {now_sql(connection.alias)}")
    if connection.vendor == "postgresql":
        # LATERAL makes one index scan per shard. The order names the whole index, so that the
        # planner can use no other.
        each = (
            f"(SELECT id FROM {table} t WHERE t.app = %s AND t.shard = s.shard AND {{}} "
            f"ORDER BY t.app, t.shard, t.available_at, t.id LIMIT {share:d})"
        )
        ranges = " UNION ALL ".join(map(each.format, conditions))
        return (
            f"SELECT j.id FROM unnest(%s::smallint[]) AS s(shard) CROSS JOIN LATERAL ({ranges}) j",
            [shards, app, app],
        )
    is_mysql = connection.vendor == "mysql"
    hint = f"FORCE INDEX ({index})" if is_mysql else f"INDEXED BY {index}"
    parts: list[str] = []
    # Order by the columns after the fixed ones: with all columns MariaDB would sort the shard.
    for condition, order in zip(conditions, ("id", "available_at, id"), strict=True):
        part = (
            f"(SELECT id FROM {table} {hint} "
            f"WHERE app = %s AND shard = %s AND {condition} ORDER BY {order} LIMIT {share:d})"
        )
        parts += [part if is_mysql else f"SELECT * FROM {part}"] * len(shards)
    params = [value for shard in shards for value in (app, shard)]
    return " UNION ALL ".join(parts), params * len(conditions)


def _rows(connection: Any, ids: list[int]) -> str:
    """Return a statement that selects the rows with these ids that are ready or due."""
    table = connection.ops.quote_name(StagedJob._meta.db_table)
    now = now_sql(connection.alias)
    since = "COALESCE(available_at, staged_at)"
    waited = _SECONDS[connection.vendor].format(now=now, then=since)
    listed = ",".join(f"{id:d}" for id in ids)
    columns, hint, one_of = _COLUMNS, "", f"IN ({listed})"
    if connection.vendor == "postgresql":
        columns, one_of = _FAST_COLUMNS, f"= ANY('{{{listed}}}'::bigint[])"
    elif connection.vendor == "mysql":
        hint = "FORCE INDEX (PRIMARY) "
    # Python checks app and shard: as conditions they could make the planner choose their index.
    return (
        f"SELECT {columns}, COALESCE({waited}, 0), is_immediate, receipt, publishes "
        f"FROM {table} {hint}"
        f"WHERE id {one_of} AND COALESCE(available_at <= {now}, TRUE)"
    )
