"""Retention of events: removes old events, but no event that a subscription has not passed.

A log is pruned from its front, up to the first event that is too new, that the cursor of some
subscription (even a paused one) has not passed, that a parked stream begins with, or that no intact
file of a given archive holds as it is. So the events that are kept have no holes, and the cost
depends only on the removed ones. Each batch is compared and deleted by id in its own transaction:
an event that commits late is not touched, and a cursor that a person moves back meanwhile holds the
rest. The batch that deletes versions of entities inserts the ids of their commands elsewhere, so
that no repeat is executed again. The newest version may be removed: the entity's row has the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import Any

import django.db
from django.db import connections
from django.db.models import F

from ..aliases import model_alias
from ..database.clock import database_time
from ..database.lock_wait import atomic_with_lock_wait
from ..database.tables import Tables
from ..exceptions import InvalidArgument, OutboxError
from ..failpoints import failpoint
from ..process.preflight import require_migrated
from ..retention.rows import BATCH_SIZE, check_arguments, deleting_by_key, remove
from ..text import Write, error_text, get_logger, one_line
from .archives import Lookup, open_archive
from .conf import event_settings
from .exceptions import ArchiveError, ReadRefused
from .log.reader import LogReader, reads_by_time
from .log.registry import all_logs, log_named, sinks
from .log.window import TOMBSTONE
from .models import Cursor, Event, EventLog, ParkedStream, Subscription
from .subscriptions.counting import drop_pruned
from .subscriptions.lag import still_read
from .subscriptions.subscriber import all_subscribers

logger = get_logger("outbox_app.retention")

#: What holds a row that is there, and cannot be locked to compare it.
_HIDDEN = "this user cannot lock: row-level security hides it from UPDATE"


@dataclass(frozen=True, slots=True)
class Hold:
    """Who still needs events of a log, in words, and the SQL condition for these events."""

    who: str
    condition: str


def prune_events(
    *,
    using: str | None = None,
    log: str | None = None,
    older_than: int | None = None,
    batch_size: int = BATCH_SIZE,
    dry_run: bool = False,
    archive: str | None = None,
    write: Write = logger.info,
) -> int:
    """Remove events that are older than the retention and that every subscription has passed.

    The ids of commands are kept, for ENTITY_COMMAND_DAYS.

    Args:
        using: Database alias. Default: the alias of each log.
        log: Table or label of one log. Default: all logs outside SINK; with an archive ``Event``.
        older_than: Age in days. Default: the setting EVENT_RETENTION_DAYS.
        batch_size: Rows removed at once.
        dry_run: Remove nothing; report how many events would be removed.
        archive: Folder of the log's archive; only events that it holds as they are are removed.
        write: Takes progress lines, and a line about what holds the rest.

    Returns:
        How many events were removed.

    Raises:
        InvalidArgument, UnknownLog: An argument is out of bounds, or names nothing.
        ReadRefused: It is unknown which events a subscription has passed. Nothing was removed from
            that log; without ``log`` the other logs were pruned.
        ArchiveRefused: There is no archive of the log, or a file of it is damaged.
    """
    chosen, days = chosen_events(log, older_than)
    table, alias = chosen._meta.db_table, using or model_alias(chosen)
    check_arguments(alias, days, batch_size, older_than=older_than)
    if not log and not archive:
        arguments: Any = {"older_than": older_than, "batch_size": batch_size, "dry_run": dry_run}
        removed, refused = 0, []
        for each in all_logs():
            table = each._meta.db_table
            if each in sinks(using):  # events that are not archived yet would be lost
                write(f"left out log={table}: OUTBOX['SINK'] decides when its events are removed")
                continue
            try:
                removed += prune_events(using=using, log=table, write=write, **arguments)
            except (OutboxError, django.db.Error) as error:  # the other logs are pruned
                write(f'not pruned log={table} error="{one_line(error_text(error), 1000)}"')
                refused.append(error)
        if refused:
            raise refused[0]
        return removed
    archived = open_archive(archive, chosen, using=alias) if archive else None
    require_migrated(alias, Subscription)
    if table not in Tables(connections[alias]):
        return 0
    if archived is not None and archived.left_out:
        write(f'not compared log={table} columns="{"; ".join(archived.left_out)}"')
    for name in _not_begun(chosen, alias):
        write(
            f"warning log={table} subscription={name}: the subscription has not run yet, and will "
            "not get the events that are removed now"
        )
    steps = prune_steps(chosen, days, batch_size, archived, using=alias, dry_run=dry_run)
    batches = _batches(steps, table, write)
    return remove(f"log={table}", batches, f"{days}d", using=alias, dry_run=dry_run, write=write)


def chosen_events(log: str | None, older_than: int | None) -> tuple[type[EventLog], int]:
    """Return the log and the age in days, or raise ``InvalidArgument`` or ``UnknownLog``."""
    days = event_settings().EVENT_RETENTION_DAYS if older_than is None else older_than
    if days is None:
        raise InvalidArgument(
            "Events are never removed: OUTBOX['EVENT_RETENTION_DAYS'] is None. Set it, or give "
            "--older-than."
        )
    return log_named(log or Event._meta.db_table), days


def holds(log: type[EventLog], *, using: str | None = None, verify: bool = True) -> list[Hold]:
    """Return who still needs events of a log: each cursor, and the oldest parked stream.

    ``using`` is a database alias, by default the log's. Raises ``ReadRefused`` if a cursor is
    damaged or, with ``verify``, is from another database or from before its log was emptied.
    """
    using = using or model_alias(log)
    readers = {by: LogReader(log, using=using, by_time=by) for by in (False, True)}
    found, names = [], set()
    cursors = Cursor.objects.using(using).filter(log=log._meta.db_table).order_by("pk")
    for cursor in still_read(cursors):
        names.add(cursor.subscription)
        reader = readers[reads_by_time(cursor.state)]
        state = reader.load(cursor.state)
        if verify:
            cursor.recall()
            reader.verify(state)
        condition = reader.window.unread(state)
        if cursor.partitions > 1:
            condition = f"(slice %% {cursor.partitions} = {cursor.partition} AND {condition})"
        found.append(Hold(f"subscription {cursor}", condition))
    parked = ParkedStream.objects.using(using).filter(log=log._meta.db_table)
    for stream in parked.filter(subscription__in=names).order_by("position")[:1]:
        who = f"parked stream {stream} in {stream.log}"
        found.append(Hold(who, f"(id >= {stream.position})"))
    return found


def needed(log: type[EventLog], *, using: str | None = None) -> str:
    """Return the SQL condition for rows of the log that a subscription still needs.

    It has no parameters, but each ``%`` in it is doubled: execute it with a list of parameters,
    which may be empty. Arguments and errors are those of ``holds``.
    """
    return " OR ".join(hold.condition for hold in holds(log, using=using)) or "(1 = 0)"


def _batches(
    steps: Iterator[tuple[int, int, str]], table: str, write: Write
) -> Iterator[tuple[int, int]]:
    """Yield the count and the position of each step; report what holds the rest."""
    removed, holder = 0, ""
    try:
        for count, reached, held in steps:
            removed, holder = removed + count, held
            yield count, reached
    except ArchiveError as error:
        raise type(error)(f"{removed} rows of {table} were removed, then: {error}") from error
    if holder:
        write(f"held log={table} by={holder}")


def prune_steps(
    log: type[EventLog],
    days: int,
    batch_size: int,
    archived: Lookup | None,
    *,
    using: str,
    dry_run: bool = False,
) -> Iterator[tuple[int, int, str]]:
    """Delete batches from the front; yield the count, the position, and who needs the next row.

    Raises ``ReadRefused``, ``ArchiveError``.
    """
    try:
        holds(log, using=using)
    except ReadRefused as error:
        raise ReadRefused(
            f"Nothing of {log._meta.db_table} was removed, because a subscription cannot tell "
            f"which events it has passed: {error}"
        ) from error
    rows = log._base_manager.using(using).order_by("pk")
    now = database_time(rows)
    if now is None:
        return
    before = now - timedelta(days=days)
    cutoff = connections[using].ops.adapt_datetimefield_value(before)
    table = connections[using].ops.quote_name(log._meta.db_table)
    reached = vanished = 0
    while True:
        # A replay locks its subscription first: either it waits for this batch, or this batch sees
        # the cursor that the replay has moved.
        opened = atomic_with_lock_wait(None, using=using, read_committed=True)
        with opened, connections[using].cursor() as cursor:
            if not dry_run:
                Subscription.objects.using(using).update(paused=F("paused"))
            too_young = Hold("", "recorded_at >= %s")  # no name: it is not reported
            kept_by = [too_young, *holds(log, using=using, verify=False)]
            cases = " ".join(f"WHEN {hold.condition} THEN {n}" for n, hold in enumerate(kept_by))
            cursor.execute(
                f"SELECT id, CASE {cases} END, type "
                f"FROM (SELECT id, txid, slice, recorded_at, type FROM {table} "
                f"WHERE id > %s ORDER BY id LIMIT {batch_size}) front ORDER BY id",
                [cutoff, reached],
            )
            front = cursor.fetchall()
            free = list(takewhile(lambda row: row[1] is None, front))
            held = kept_by[front[len(free)][1]].who if len(free) < len(front) else ""
            vanished, vanished_before = 0, vanished
            if archived is not None:
                events = [row for row in free if row[2] != TOMBSTONE]
                there, why = archived.first([id for id, *_ in events], lock=not dry_run)
                if there < len(events):
                    missing = events[there]
                    free = free[: free.index(missing)]
                    held = f"position {missing[0]}, which {why or _HIDDEN}"
                    if not why and missing[0] != vanished_before:  # another process prunes, too
                        vanished, held = missing[0], ""
                failpoint("prune_compared")
            ids = [id for id, *_ in free]
            count, reached = len(ids), max([reached, *ids])
            if ids and not dry_run:
                drop_pruned(log, ids, using=using)
                gone = rows.filter(pk__in=ids, recorded_at__lt=before)
                log.before_pruning(gone, now, is_archived=archived is not None)
                with deleting_by_key(rows):
                    count = gone._raw_delete(using)
            failpoint("prune_removed")
        yield count, reached, held
        if len(free) < batch_size and not vanished:
            return


def _not_begun(log: type[EventLog], using: str) -> list[str]:
    cursors = Cursor.objects.using(using).filter(log=log._meta.db_table)
    begun = set(cursors.values_list("subscription", flat=True))
    return [
        each.name
        for each in all_subscribers()
        if each.start == "beginning"
        and not each.fault  # reported where it is run
        and log in each.logs
        and each.using == using
        and each.name not in begun
    ]
