"""Rebase: cursors continue in a database that was restored, set back, or switched over to.

A cursor knows what it has passed by the transaction ids of the cluster that it was made in. So a
rebase marks the log's rows as written there, and each cursor keeps its old place among them: it
delivers the rows that it had not passed, then all new rows, and nothing twice. A log is rebased in
one transaction: nothing tells which rows are marked, and a second run would mark them twice. Until
the rebase, the cursors are refused, so an error stops the subscriptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import Max, Min, Value
from django.db.models.functions import Least

from ...aliases import model_alias
from ...database.tables import Tables
from ...exceptions import InvalidArgument
from ...process.preflight import require_migrated
from ...text import Write, get_logger
from ..exceptions import DamagedCursor, ReadRefused, ReplayRefused
from ..log.reader import LogReader, reads_by_time
from ..log.registry import all_logs, log_named
from ..log.state import PostgresState, WindowState
from ..log.transaction_ids import adopt, is_foreign, renumber, require_all, require_unwritten
from ..models import Cursor, EventLog, ParkedStream
from .cursors import is_stopped

logger = get_logger("outbox_app.rebase")

EXIT_OK, EXIT_DAMAGED = 0, 1


@dataclass(slots=True)
class Plan:
    reader: LogReader
    #: Highest position from before the restore.
    last: int
    #: Every cursor, as it was read.
    cursors: list[Cursor]
    damaged: list[Cursor] = field(default_factory=list)
    foreign: bool = False
    #: The cursors that move, each with its new state.
    moves: list[tuple[Cursor, str]] = field(default_factory=list)


def rebase_outbox(
    *,
    using: str | None = None,
    log: str | None = None,
    last_id: int | None = None,
    upgraded: bool = False,
    dry_run: bool = False,
    write: Write = logger.info,
) -> int:
    """Make the cursors of a restored database continue, exactly.

    Args:
        using: Database alias. Default: that of each log.
        log: Table or label of one log. Default: all on the alias.
        last_id: Highest position from before the restore. Default: the log's last. Needs ``log``.
        upgraded: The cluster was made by pg_upgrade: only its name is new.
        dry_run: Change nothing.
        write: Takes progress lines.

    Returns:
        An exit code: 0; 1 if a cursor is damaged and was left as it is.

    Raises:
        InvalidArgument, UnknownLog: An argument is out of bounds, or names nothing.
        ReadRefused: It is unknown which events a cursor has passed. Nothing was changed.
        ReplayRefused: A cursor was moved meanwhile. Nothing of its log was changed.
    """
    if last_id is not None and (not log or last_id < 0):
        raise InvalidArgument(
            f"--last-id must be a position of one log, at least 0; got {last_id}. Add --log."
        )
    if using is None:
        own = sorted({model_alias(e) for e in ([log_named(log)] if log else all_logs())})
        arguments: Any = {
            "last_id": last_id,
            "upgraded": upgraded,
            "dry_run": dry_run,
            "write": write,
        }
        return max(rebase_outbox(using=each, log=log, **arguments) for each in own)
    require_migrated(using)
    tables = Tables(connections[using])
    logs = [log_named(log)] if log else [e for e in all_logs() if e._meta.db_table in tables]
    plans = [_plan(each, last_id, upgraded, using=using) for each in logs]
    if any(plan.foreign for plan in plans):  # a log without cursors cannot tell by itself
        for plan in plans:
            plan.foreign |= not plan.cursors
    for plan in plans:
        _apply(plan, using=using, dry_run=dry_run, upgraded=upgraded, write=write)
    return EXIT_DAMAGED if any(plan.damaged for plan in plans) else EXIT_OK


def _plan(log: type[EventLog], last_id: int | None, upgraded: bool, *, using: str) -> Plan:
    reader = LogReader(log, using=using)
    cursors = _cursors(reader.table, using)
    plan = Plan(reader, reader.window.top() if last_id is None else last_id, cursors)
    states: list[tuple[Cursor, WindowState]] = []
    for cursor in cursors:
        try:
            states.append((cursor, reader.load(cursor.state)))
        except DamagedCursor:
            plan.damaged.append(cursor)
    if upgraded:
        new = [adopt(reader, state) for _, state in states]
    elif any(cursor.was_set_back for cursor, _ in states) or is_foreign(
        reader, [state for _, state in states], last_id
    ):
        new = _rebased(plan, states, last_id)
    else:
        return plan
    pairs = zip(states, new, strict=True)
    plan.moves = [
        (cursor, after.dump())
        for (cursor, before), after in pairs
        if after != before or cursor.was_set_back
    ]
    plan.foreign = bool(plan.moves) or not states
    return plan


def _rebased(
    plan: Plan, states: list[tuple[Cursor, WindowState]], last_id: int | None
) -> list[WindowState]:
    reader = plan.reader
    clusters = {state.cluster for _, state in states if isinstance(state, PostgresState)}
    if len(clusters) > 1:
        names = sorted({f"{c.subscription} ({c.state[:80]})" for c in plan.cursors})
        raise ReadRefused(
            f"The cursors of {reader.table} were made in different clusters: {', '.join(names)}. "
            "Reset the cursors that began after the restore, then rebase, then replay these."
        )
    if last_id is None:
        require_unwritten(reader, plan.last)
    else:
        require_all(reader, plan.last)
    new = []
    for cursor, state in states:
        try:
            new.append(reader.window.rebase(state, last_id))
        except ReadRefused as error:
            raise ReadRefused(f"{cursor}: {error}") from error
        if last_id is None and reader.vendor != "postgresql":
            _require_older(reader, cursor, new[-1])
        elif new[-1] != state and not cursor.was_set_back:
            _require_unhandled(reader, cursor, state, plan.last)
    return new


def _require_older(reader: LogReader, cursor: Cursor, state: WindowState) -> None:
    """Check that the rows that a state has passed were recorded before the cursor last moved."""
    since = cursor.moved_at + timedelta(milliseconds=1)  # SQLite's times end at milliseconds
    rows = reader.log._base_manager.using(reader.using).filter(recorded_at__gt=since)
    passed = rows.extra(where=[f"NOT ({reader.window.unread(state)})"])
    if first := passed.aggregate(Min("id"))["id__min"]:
        raise ReadRefused(
            f"Position {first} of {reader.table} was recorded after the last move of {cursor}, so "
            "it seems to have been published after the restore. If so, name the last position from "
            f"before the restore: --log {reader.table} --last-id {first - 1}."
        )


def _require_unhandled(reader: LogReader, cursor: Cursor, state: WindowState, last: int) -> None:
    """Check that a state has not passed rows since the restore, as after a first rebase."""
    if reader.vendor == "postgresql":  # whose states say where they were made
        return
    rows = reader.log._base_manager.using(reader.using).filter(pk__gt=last)
    passed = rows.extra(where=[f"NOT ({reader.window.unread(state)})"])
    newest = passed.aggregate(Max("recorded_at"))["recorded_at__max"]
    if newest is not None and newest <= cursor.moved_at:
        raise ReadRefused(
            f"{cursor} seems to have handled events after position {last} since the restore: the "
            "newest is older than its last move. If it ran before the first rebase, or a clock was "
            "set back, it may have passed over some; then move it: outbox_subscriptions replay "
            f"{cursor.subscription} --log {reader.table} --from {last}. Nothing was changed."
        )


def _apply(plan: Plan, *, using: str, dry_run: bool, upgraded: bool, write: Write) -> None:
    table = plan.reader.table
    for cursor in plan.damaged:
        write(f"damaged log={table} cursor={cursor} state={cursor.state[:100]!r}: reset or replay")
    if not plan.foreign:
        write(f"unchanged log={table} cursors={len(plan.cursors)}: they belong to this database")
        return
    if dry_run:
        write(f"would rebase log={table} last_id={plan.last} cursors={len(plan.moves)}")
        return
    with transaction.atomic(using=using):
        _lock(plan, using=using)
        if not upgraded:
            for reached in renumber(plan.reader, plan.last):
                write(f"rebasing log={table} reached={reached} last_id={plan.last}")
        for cursor, state in plan.moves:
            Cursor.objects.using(using).filter(pk=cursor.pk).move(
                state=state,
                position=Least("position", Value(plan.last)),
                counted=None,
                error=cursor.error if is_stopped(cursor) else "",
            )
        # These positions are gone: the streams' next events get lower ones, after ``last``.
        parked = ParkedStream.objects.using(using).filter(log=table, position__gt=plan.last)
        parked.update(position=plan.last + 1)
    write(f"rebased log={table} last_id={plan.last} cursors={len(plan.moves)}")


def _lock(plan: Plan, *, using: str) -> None:
    """Keep other processes from making or moving cursors; check that none has meanwhile."""
    table = plan.reader.table
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute("LOCK TABLE outbox_cursor IN EXCLUSIVE MODE")
    now = {(c.pk, c.state) for c in _cursors(table, using, lock=True)}
    if now != {(c.pk, c.state) for c in plan.cursors}:
        raise ReplayRefused(
            f"A cursor of {table} was moved meanwhile; nothing was changed. Stop "
            "run_subscriptions, and run this again."
        )


def _cursors(table: str, using: str, *, lock: bool = False) -> list[Cursor]:
    rows = Cursor.objects.using(using).filter(log=table).order_by("pk")
    found = rows.select_for_update() if lock else rows
    return [cursor for cursor in found if not reads_by_time(cursor.state)]
