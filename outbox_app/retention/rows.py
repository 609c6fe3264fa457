"""Retention: ids of jobs and commands, incidents, counters, results, decided events and fences.

Old rows are removed in batches, the oldest first, each in its own transaction: an interrupted run
is just started again. The database's clock measures the age. After an inbox id is removed, its job
would be executed again: keep ids for longer than any message can stay in the broker. Ids of
commands are kept without limit by default, for the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Model

from ..aliases import inbox_alias, log_alias, outbox_alias
from ..conf import MAX_DAYS, outbox_settings
from ..eventlog.registry import all_logs
from ..exceptions import InvalidArgument
from ..models import (
    EntityVersion,
    Fence,
    InboxEntry,
    Incident,
    PreparedEvent,
    PrunedCommand,
    Statistic,
    TaskResult,
)
from ..models.clock import database_time
from ..prepared.fences import mark_pruned
from ..process.counters import by_name
from ..process.foreground import throttled
from ..process.preflight import require_alias, require_migrated
from ..text import Write, get_logger, per_second
from .commands import day_of

logger = get_logger("outbox_app.retention")

BATCH_SIZE = 1000
#: A DELETE names its rows by id, and databases limit the number of parameters.
MAX_BATCH_SIZE = 10_000

#: How many rows each batch had, and the place that it reached.
Batches = Iterable[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Kept:
    model: type[Model]
    column: str
    alias: Callable[[], str]
    #: The setting that has the retention, and its unit.
    setting: str
    unit: str = "days"


def _senders_alias() -> str:
    raise InvalidArgument(
        "Fences are in the databases of senders. Run this with --database ALIAS for each of them."
    )


def _versions_alias() -> str:
    aliases = {log_alias(log) for log in all_logs() if issubclass(log, EntityVersion)}
    if len(aliases) > 1:
        raise InvalidArgument(
            "The versions of entities are in several databases: "
            f"{', '.join(sorted(aliases))}. Run this with --database ALIAS for each of them."
        )
    return aliases.pop() if aliases else outbox_alias()


KEPT = {
    "inbox": Kept(InboxEntry, "handled_at", inbox_alias, "INBOX_RETENTION_DAYS"),
    "incidents": Kept(Incident, "created_at", outbox_alias, "INCIDENT_RETENTION_DAYS"),
    # A drainer removes the counters of its own database by itself.
    "counters": Kept(Statistic, "minute", outbox_alias, "STATISTICS_RETENTION_HOURS", "hours"),
    "results": Kept(TaskResult, "kept_from", outbox_alias, "TASK_RESULT_RETENTION_DAYS"),
    # Events that are open have no such time.
    "prepared": Kept(PreparedEvent, "decided_at", outbox_alias, "PREPARED_RETENTION_DAYS"),
    "commands": Kept(PrunedCommand, "executed_on", _versions_alias, "ENTITY_COMMAND_DAYS"),
    "fences": Kept(Fence, "written_at", _senders_alias, "FENCE_RETENTION_DAYS"),
}


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
        kind: ``inbox``, ``incidents``, ``counters``, ``results``, ``prepared``, ``commands`` or
            ``fences``.
        using: Database alias. Default: that of the inbox, the versions of entities, or the outbox;
            fences need one.
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
    if kind not in KEPT:
        raise InvalidArgument(f"Rows of what kind? One of {', '.join(KEPT)}; got {kind!r}.")
    kept = KEPT[kind]
    using = using or kept.alias()
    age = kept_for(kind, older_than)
    check_arguments(using, age, batch_size, given=older_than)
    require_migrated(using, kept.model)
    if older_than is not None and kept.unit == "hours":
        age *= 24
    rows: Any = kept.model._default_manager.using(using).order_by(kept.column)
    batches: Batches = ()
    if now := database_time(rows):
        before: Any = now - timedelta(**{kept.unit: age})
        if kept.model is Fence:
            rows = rows.exclude(pk=Fence.MARK)
            if not dry_run:
                mark_pruned(before, using=using)
        parts = [rows]
        if kept.model is PrunedCommand:
            before = day_of(before)
        if kept.model is Statistic:
            parts = by_name(rows)
        elif kept.model is TaskResult:  # in one query PostgreSQL would scan the jobs for each row
            ready = rows.filter(status=TaskResult.Status.READY)
            parts = [rows.exclude(status=TaskResult.Status.READY), ready.settled()]
        batches = _batches(parts, kept.column, before, batch_size, dry_run=dry_run)
    return remove(kind, batches, f"{age}{kept.unit[0]}", using=using, dry_run=dry_run, write=write)


def kept_for(kind: str, older_than: int | None) -> int:
    """Return the age from which on rows of a kind are removed. Raises ``InvalidArgument``."""
    setting = KEPT[kind].setting
    age: int | None = getattr(outbox_settings(), setting) if older_than is None else older_than
    if age is None:
        raise InvalidArgument(
            f"The {kind} are never removed: OUTBOX[{setting!r}] is None. Set it, or give "
            "--older-than."
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
    parts: Iterable[Any], column: str, before: date, batch_size: int, *, dry_run: bool
) -> Iterator[tuple[int, date]]:
    """Delete batch after batch; yield how many rows each had, and the time that it reached."""
    is_old = {f"{column}__lt": before}
    for rows in parts:
        old = front = rows.filter(**is_old)
        if dry_run:
            yield old.count(), before
            continue
        # Not ``old``: MySQL would lock the staged jobs that ``settled`` reads, and wait for them.
        table = rows.model._default_manager.using(rows.db).filter(**is_old)
        while batch := list(front.values_list("pk", column)[:batch_size]):
            with deleting_by_key(rows):
                # Those that are still old, and that no other process has removed.
                count, _ = table.filter(pk__in=[pk for pk, _ in batch]).delete()
            reached = batch[-1][1]
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


def check_arguments(using: str, age: int, batch_size: int, *, given: int | None) -> None:
    """Raise ``InvalidArgument`` if one is invalid. ``age`` is ``given``, in days, or a setting."""
    require_alias(using)
    if age < 1:
        raise InvalidArgument(f"--older-than must be at least 1 day; got {age}.")
    if given is not None and given > MAX_DAYS:
        raise InvalidArgument(f"--older-than must be at most {MAX_DAYS} days.")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InvalidArgument(f"--batch-size must be from 1 to {MAX_BATCH_SIZE}; got {batch_size}.")
