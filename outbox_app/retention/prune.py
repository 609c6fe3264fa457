"""Retention: inbox ids, incidents and counters go when they have been kept long enough.

Rows go oldest first, in batches found by the index on their time and deleted by primary key, each
batch in a transaction of its own: whoever is interrupted has lost nothing and begins again. Age is
judged by the database's clock. Once an id is gone, its job would be executed again: keep ids for
longer than any message can stay in the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Model, QuerySet

from ..aliases import inbox_alias, outbox_alias
from ..conf import outbox_settings
from ..exceptions import InvalidArgument
from ..models import DatabaseNow, InboxEntry, Incident, Statistic
from ..process.counter_retention import pruned
from ..process.tables import require_alias, require_tables
from ..text import get_logger

logger = get_logger("outbox_app.retention")

BATCH_SIZE = 1000
#: A batch names its rows by id, and databases take only so many parameters.
MAX_BATCH_SIZE = 10_000


def prune_inbox(
    *,
    using: str | None = None,
    older_than: int | None = None,
    batch_size: int = BATCH_SIZE,
    dry_run: bool = False,
    write: Callable[[str], Any] = logger.info,
) -> int:
    """Remove ids of executed jobs that are older than the retention.

    Args:
        using: Database alias. Default: the inbox's.
        older_than: Age in days. Default: the setting INBOX_RETENTION_DAYS.
        batch_size: Rows removed at once.
        dry_run: Remove nothing: say how many would be.
        write: Takes progress lines.

    Returns:
        How many were removed.

    Raises:
        InvalidArgument: An argument is out of bounds, or the alias is unknown.
        NotMigrated: The tables are not there.
    """
    days = outbox_settings().INBOX_RETENTION_DAYS if older_than is None else older_than
    using = using or inbox_alias()
    return _prune(
        "inbox", InboxEntry, "handled_at", using, days, batch_size, dry_run=dry_run, write=write
    )


def prune_incidents(
    *,
    using: str | None = None,
    older_than: int | None = None,
    batch_size: int = BATCH_SIZE,
    dry_run: bool = False,
    write: Callable[[str], Any] = logger.info,
) -> int:
    """Remove incidents that are older than the retention.

    Args:
        using: Database alias. Default: the outbox's.
        older_than: Age in days. Default: the setting INCIDENT_RETENTION_DAYS.
        batch_size: Rows removed at once.
        dry_run: Remove nothing: say how many would be.
        write: Takes progress lines.

    Returns:
        How many were removed.

    Raises:
        InvalidArgument: An argument is out of bounds, or the alias is unknown.
        NotMigrated: The tables are not there.
    """
    days = outbox_settings().INCIDENT_RETENTION_DAYS if older_than is None else older_than
    using = using or outbox_alias()
    return _prune(
        "incidents", Incident, "created_at", using, days, batch_size, dry_run=dry_run, write=write
    )


def prune_counters(
    *,
    using: str | None = None,
    older_than: int | None = None,
    batch_size: int = BATCH_SIZE,
    dry_run: bool = False,
    write: Callable[[str], Any] = logger.info,
) -> int:
    """Remove counters of drainers and subscriptions that are older than the retention.

    A drainer does it by itself. Where subscriptions have a database without one, nobody else does.

    Args:
        using: Database alias. Default: the outbox's.
        older_than: Age in days. Default: the setting STATISTICS_RETENTION_HOURS.
        batch_size: Rows removed at once.
        dry_run: Remove nothing: say how many would be.
        write: Takes progress lines.

    Returns:
        How many were removed.

    Raises:
        InvalidArgument: An argument is out of bounds, or the alias is unknown.
        NotMigrated: The tables are not there.
    """
    using = using or outbox_alias()
    check_arguments(using, 1 if older_than is None else older_than, batch_size)
    require_tables(using)
    hours = outbox_settings().STATISTICS_RETENTION_HOURS if older_than is None else older_than * 24
    started = time.monotonic()
    rows = Statistic.objects.using(using).annotate(now=DatabaseNow())
    now = rows.values_list("now", flat=True).first()
    removed = 0
    if now is not None:
        before = now - timedelta(hours=hours)
        removed = sum(pruned(before, using=using, batch_size=batch_size, dry_run=dry_run))
    write(
        f"{outcome('counters', removed, dry_run=dry_run)} older_than={hours}h database={using} "
        f"seconds={time.monotonic() - started:.1f}"
    )
    return removed


def _prune(
    name: str,
    model: type[Model],
    column: str,
    using: str,
    days: int,
    batch_size: int,
    *,
    dry_run: bool,
    write: Callable[[str], Any],
) -> int:
    check_arguments(using, days, batch_size)
    require_tables(using)
    rows = model._default_manager.using(using).order_by(column)
    started = told = time.monotonic()
    removed = 0
    for count, reached in _batches(rows, column, days, batch_size, dry_run=dry_run):
        removed += count
        now = time.monotonic()
        if not dry_run and 0 < outbox_settings().PROGRESS_INTERVAL <= now - told:
            told = now
            rate = removed / (now - started)
            write(f"pruning {name} removed={removed} rate={rate:.0f}/s reached={reached:%F %T}")
    write(
        f"{outcome(name, removed, dry_run=dry_run)} older_than={days}d database={using} "
        f"seconds={time.monotonic() - started:.1f}"
    )
    return removed


def _batches(
    rows: QuerySet[Any], column: str, days: int, batch_size: int, *, dry_run: bool
) -> Iterator[tuple[int, datetime]]:
    """Delete batch after batch; yield how many rows each had, and the time that it reached."""
    now = rows.annotate(now=DatabaseNow()).values_list("now", flat=True).first()
    if now is None:
        return
    old = rows.filter(**{f"{column}__lt": now - timedelta(days=days)})
    if dry_run:
        yield old.count(), now
        return
    while batch := list(old.values_list("pk", column)[:batch_size]):
        rows.filter(pk__in=[pk for pk, _ in batch]).delete()
        reached = batch[-1][1]
        yield len(batch), reached
        # PostgreSQL would walk over the index entries of all that is deleted, batch after batch.
        old = old.filter(**{f"{column}__gte": reached})


def outcome(what: str, count: int, *, dry_run: bool) -> str:
    """Return the beginning of the line that says what was removed, or would be."""
    return f"would prune {what} rows={count}" if dry_run else f"pruned {what} removed={count}"


def check_arguments(using: str, days: int, batch_size: int) -> None:
    """Raise ``InvalidArgument`` where one of them is out of bounds."""
    require_alias(using)
    if days < 1:
        raise InvalidArgument(f"--older-than must be at least 1 day; got {days}.")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InvalidArgument(f"--batch-size must be from 1 to {MAX_BATCH_SIZE}; got {batch_size}.")
