"""Retention: removes rows that are old: inbox ids, incidents, counters, and those of capabilities.

Old rows are removed in batches, the oldest first, each in its own transaction: an interrupted run
is just started again. The database's clock measures the age. After an inbox id is removed, its job
would be executed again: keep ids for longer than any message can stay in the broker.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Model

from ..capability import all_doors, setting
from ..conf import MAX_DAYS
from ..database.clock import database_time
from ..exceptions import InvalidArgument
from ..process.foreground import throttled
from ..process.preflight import require_alias, require_migrated
from ..text import Write, get_logger, per_second

logger = get_logger("outbox_app.retention")

BATCH_SIZE = 1000
#: A DELETE names its rows by id, and databases limit the number of parameters.
MAX_BATCH_SIZE = 10_000

#: How many rows each batch had, and the place that it reached.
Batches = Iterable[tuple[int, Any]]


def _same(moment: datetime) -> datetime:
    return moment


def _whole(rows: Any, before: datetime, *, dry_run: bool) -> Iterable[Any]:
    return [rows]


@dataclass(frozen=True, slots=True)
class Kept:
    """A kind of rows that are removed when they are old."""

    model: type[Model]
    #: The time by which a row is old. Rows without one are kept.
    column: str
    alias: Callable[[], str]
    #: The retention in days, or the setting that has it.
    days: str | int
    #: What the option of ``outbox_prune`` removes, in words.
    help: str
    #: ``parts(rows, before, dry_run=…)``: the rows in parts, each to be removed in its own order.
    parts: Callable[..., Iterable[Any]] = _whole
    #: ``bound(time)``: the least value of the column that is not old at a time.
    bound: Callable[[datetime], Any] = _same


def all_kept() -> dict[str, Kept]:
    """Return the kinds of rows of the core and of all capabilities, by name."""
    return {name: kept for doors in all_doors() for name, kept in doors.kept().items()}


def prune(
    kind: str,
    using: str | None = None,
    older_than: int | None = None,
    batch_size: int = BATCH_SIZE,
    *,
    dry_run: bool = False,
    write: Write = logger.info,
) -> int:
    """Remove rows of one kind that are older than its retention.

    Args:
        kind: ``inbox``, ``incidents``, ``counters``, and those of capabilities: ``results``,
            ``prepared``, ``commands``, ``fences``.
        using: Database alias. Default: that of the inbox, or of the outbox; fences need one.
        older_than: Age in days. Default: the kind's setting, such as INBOX_RETENTION_DAYS.
        batch_size: Rows removed at once.
        dry_run: Remove nothing; report how many rows would be removed.
        write: Takes progress lines.

    Returns:
        How many rows were removed.

    Raises:
        InvalidArgument: An argument is out of bounds, or the kind or the alias is unknown.
        NotMigrated: The tables do not exist.
    """
    known = all_kept()
    if kind not in known:
        raise InvalidArgument(f"Rows of what kind? One of {', '.join(known)}; got {kind!r}.")
    kept = known[kind]
    using = using or kept.alias()
    age = kept_for(kind, older_than)
    check_arguments(using, age, batch_size, older_than=older_than)
    require_migrated(using, kept.model)
    rows: Any = kept.model._default_manager.using(using).order_by(kept.column)
    batches: Batches = ()
    if now := database_time(rows):
        before = now - timedelta(days=age)
        parts = kept.parts(rows, before, dry_run=dry_run)
        bound = kept.bound(before)
        batches = _batches(parts, kept.column, bound, batch_size, dry_run=dry_run)
    return remove(kind, batches, f"{age}d", using=using, dry_run=dry_run, write=write)


def kept_for(kind: str, older_than: int | None) -> int:
    """Return the age from which on rows of a kind are removed. Raises ``InvalidArgument``."""
    name = all_kept()[kind].days
    if older_than is not None:
        return older_than
    age: int | None = name if isinstance(name, int) else setting(name)
    if age is None:
        raise InvalidArgument(
            f"Rows of the kind {kind!r} are never removed: OUTBOX[{name!r}] is None. Set it, or "
            "give --older-than."
        )
    return age


def remove(
    what: str, batches: Batches, age: str, *, using: str, dry_run: bool, write: Write
) -> int:
    """Go through the batches, and report progress; return how many rows were removed."""
    started, tell = time.monotonic(), throttled(write)
    removed = 0
    for count, reached in batches:
        removed += count
        if not dry_run:
            rate = per_second(removed, time.monotonic() - started)
            at = f"{reached:%F %T}" if isinstance(reached, datetime) else reached
            tell(f"pruning {what} removed={removed} rate={rate}/s reached={at}")
    done = f"would prune {what} rows={removed}" if dry_run else f"pruned {what} removed={removed}"
    seconds = time.monotonic() - started
    write(f"{done} older_than={age} database={using} seconds={seconds:.1f}")
    return removed


def _batches(
    parts: Iterable[Any], column: str, before: datetime, batch_size: int, *, dry_run: bool
) -> Iterator[tuple[int, datetime]]:
    """Delete batch after batch; yield how many rows each had, and the time that it reached."""
    is_old = {f"{column}__lt": before}
    for rows in parts:
        # Not "pk" and its tuples: with a composite key Django orders by a wrong column, and writes
        # an OR for each row, whose depth databases limit.
        *first, last = (field.attname for field in rows.model._meta.pk_fields)
        old = front = rows.filter(**is_old)
        if dry_run:
            yield old.count(), before
            continue
        # Not ``old``: MySQL would lock the staged jobs that ``settled`` reads, and wait for them.
        table = rows.model._default_manager.using(rows.db).filter(**is_old)
        while batch := list(front.values_list(*first, last, column)[:batch_size]):
            keys: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
            for *same, key, _ in batch:
                keys[(*same,)].append(key)
            count, reached = 0, batch[-1][-1]
            with deleting_by_key(rows):
                # Those that are still old, and that no other process has removed.
                for same, among in keys.items():
                    named = {**dict(zip(first, same, strict=True)), f"{last}__in": among}
                    count += table.filter(**named).delete()[0]
            yield count, reached
            if connections[rows.db].vendor != "sqlite":  # which compares times as texts
                # Otherwise each batch would walk over the rows of other parts, and on PostgreSQL
                # over the index entries of all deleted rows.
                front = old.filter(**{f"{column}__gte": reached})


def deleting_by_key(rows: Any) -> AbstractContextManager[None]:
    """Let DELETEs of old rows look these up by key: a scan, on MySQL, waits for rows in flight.

    With the keys as the only condition, MariaDB would scan a small table all the same.
    """
    connection = connections[rows.db]
    table = connection.ops.quote_name(rows.model._meta.db_table)
    forced = f"DELETE {table} FROM {table} FORCE INDEX (PRIMARY) "

    def force(execute: Any, sql: str, *args: Any) -> Any:
        return execute(sql.replace(f"DELETE FROM {table} ", forced), *args)

    return connection.execute_wrapper(force) if connection.vendor == "mysql" else nullcontext()


def check_arguments(using: str, age: int, batch_size: int, *, older_than: int | None) -> None:
    """Raise ``InvalidArgument`` if one is invalid. ``age``: in days, of the option or a setting."""
    require_alias(using)
    if age < 1:
        raise InvalidArgument(f"--older-than must be at least 1 day; got {age}.")
    if older_than is not None and older_than > MAX_DAYS:
        raise InvalidArgument(f"--older-than must be at most {MAX_DAYS} days.")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InvalidArgument(f"--batch-size must be from 1 to {MAX_BATCH_SIZE}; got {batch_size}.")
