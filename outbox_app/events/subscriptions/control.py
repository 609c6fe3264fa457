"""What a person does with a subscription: pause, resume, replay, release, repartition, delete.

Each call locks the subscription's row, then its cursors, and commits once. It waits for a page that
is being handled; a page that was only read fails its compare and set. So after ``pause`` has
returned, no event is handled, and after ``replay`` has returned, events are handled from the new
place only. A running process sees the change within a fifth of its lease. A replay undoes nothing
that the handler has done: the handler gets the events again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple
from itertools import islice
from typing import Any

import django.db
from django.db import transaction
from django.db.models import Exists, OuterRef

from ...aliases import model_alias
from ...database.clock import DatabaseNow
from ...database.lock_wait import atomic_with_lock_wait, is_conflict
from ...database.transactions import own_connection
from ...exceptions import TransactionEnded
from ...models import Lease, counting
from ...text import get_logger
from ..exceptions import ReplayRefused, UnknownSubscription
from ..log.filter import EventFilter
from ..log.reader import LogReader
from ..log.registry import log_named
from ..log.window import TOMBSTONE
from ..log.windows.time import TimeState
from ..models import Cursor, DeliveredVersion, Event, EventLog, Gap, ParkedStream, Subscription
from .lag import served
from .repartition import adopt_partitions, lock_cursors, replace_cursors, states_of
from .start_point import Move, StartPoint, position_of
from .subscriber import Subscriber, all_subscribers, subscriber_named

logger = get_logger("outbox_app.events.subscriptions")

#: Longest wait for a page that is being handled, in seconds.
LOCK_SECONDS = 50


def pause(name: str, *, using: str | None = None) -> None:
    """Pause a subscription, even one that has never run: after this call it handles no event.

    Raises ``ReplayRefused`` if a page that is being handled does not end.
    """
    _set_paused(name, True, using)


def resume(name: str, *, using: str | None = None) -> None:
    """Let a paused or stopped subscription run again. Raises what ``pause`` raises."""
    _set_paused(name, False, using)


def _set_paused(name: str, paused: bool, using: str | None) -> None:
    using = using or alias_of(name)
    with locked(name, using) as (row, _):
        row.paused = paused
        row.save(using=using, update_fields=["paused"])
        cursors = Cursor.objects.using(using).filter(subscription=name)
        cursors.bump_revision()
        if not paused:  # also resume cursors that stopped by themselves (cursors.is_stopped)
            cursors.filter(error__startswith=TransactionEnded.__name__).update(**Cursor.WELL)


def plan(
    name: str, place: StartPoint, *, log: str | None = None, using: str | None = None
) -> list[Move]:
    """Return the moves that ``replay`` would make. Arguments and errors are the same."""
    using = using or alias_of(name)
    row = Subscription.objects.using(using).filter(pk=name).first()
    row = row or Subscription(name=name, partitions=_declared_partitions(name, using))
    cursors = list(Cursor.objects.using(using).filter(subscription=name))
    return _plan(row, cursors, place, log=log, using=using)


def replay(
    name: str,
    place: StartPoint,
    *,
    log: str | None = None,
    skip_ahead: bool = False,
    by: str = "",
    reason: str = "",
    using: str | None = None,
) -> list[Move]:
    """Move the cursors of a subscription to a place; paused or running, healthy or damaged.

    ``log``, a table or label, restricts the move to one log. Parked streams whose events all come
    again are deleted; the others stay parked, as their events would not come. Events in flight are
    handled when they commit, at any position; by time, if they were recorded after the place. A
    move that passes over unhandled events is refused, unless ``skip_ahead`` is true. Then a row in
    ``Gap`` records the events, who decided (``by``) and why, and no cursor returns to them.

    If it raises ``ReplayRefused`` or ``ReadRefused``, nothing was changed.
    """
    using = using or alias_of(name)
    with locked(name, using) as (row, cursors):
        moves = _plan(row, cursors, place, log=log, using=using)
        for move in moves:
            if move.passed and not skip_ahead:
                raise ReplayRefused(
                    f"Nothing was changed: {name!r} would pass over {move.passes} in {move.table}. "
                    "Let the subscription handle them first, or skip them: --skip-ahead, "
                    "skip_ahead=True."
                )
            if move.passed:
                record_skip(
                    subscription=name,
                    log=move.table,
                    first=move.passed[0][0],
                    last=move.after or move.last,
                    by=by,
                    reason=f"Moved ahead over {move.passes}. {reason}".strip(),
                    using=using,
                )
            _move(row, move, using)
    return moves


def _plan(
    row: Subscription, cursors: list[Cursor], place: StartPoint, *, log: str | None, using: str
) -> list[Move]:
    name, subscriber = row.name, _declared(row.name)
    tables = sorted({cursor.log for cursor in cursors})
    logs = subscriber.logs if subscriber else [log_named(table) for table in tables]
    if log is not None:
        wanted = log_named(log)
        if wanted not in logs:
            raise ReplayRefused(
                f"Subscription {name!r} does not read the log {wanted._meta.db_table}."
            )
        logs = [wanted]
    if isinstance(place, int) and len(logs) > 1:
        raise ReplayRefused(
            f"Subscription {name!r} reads several logs "
            f"({', '.join(each._meta.db_table for each in logs)}), but position {place} belongs to "
            "one log. Name that log, or give a time."
        )
    positions = [(each, position_of(each, place, using=using)) for each in logs]
    only = EventFilter(**reads_of(name, using))
    return [_plan_log(row, cursors, *each, only, using=using) for each in positions]


def _plan_log(
    row: Subscription,
    cursors: list[Cursor],
    log: type[EventLog],
    after: int | None,
    only: EventFilter,
    *,
    using: str,
) -> Move:
    """Return where the cursors of a log go, and which unhandled events they would pass over.

    The log is read on a connection of its own, in autocommit: the caller holds locks, and a
    transaction that has written cannot tell what is committed.
    """
    name, subscriber, table = row.name, _declared(row.name), log._meta.db_table
    begins = subscriber is not None and subscriber.start == "beginning"
    by_part = {each.partition: each for each in cursors if each.log == table}
    make = subscriber.reader if subscriber else LogReader
    reader = make(log, using=using)
    held = ParkedStream.objects.using(using).filter(subscription=name, log=table)
    parked = set(held.values_list("stream", flat=True))
    passed: list[tuple[int, str, str]] = []
    with own_connection(reader.using, seconds=LOCK_SECONDS), closing(reader):
        states = states_of(reader, by_part.values())
        state = reader.window.move(after, list(states.values()))
        last = reader.window.top()
        wanted, params = EventFilter(only.topics, only.types).sql()
        if wanted and subscriber and subscriber.on_gap != "off":
            # A version after a gap holds its stream. If this was passed, the reader would drop a
            # wanted version that fills the gap later.
            source = reader.window.source
            below = f"b.stream = {source}.stream AND b.version < {source}.version"
            below = f"(SELECT MAX(b.version) FROM {source} b WHERE {below})"
            wanted = f"({wanted} OR {below} < {source}.version - 1)"
        # The log may have been left out when the number of partitions was changed.
        number = max((each.partitions for each in by_part.values()), default=row.partitions)
        for part in range(number):
            cursor = by_part.get(part)
            if cursor is None and not begins:
                continue  # the partition would begin after all present events
            if part in states:
                unread = reader.window.unread(states[part])
            else:  # of a damaged cursor only the position is left; none if the log was emptied
                handled = 0 if cursor is None or cursor.was_set_back else cursor.position
                unread = f"(id > {handled if handled <= last else 0})"
            conditions = [unread, f"NOT {reader.window.unread(state)}", wanted]
            conditions.append(EventFilter(parts=number, part=part).sql()[0])
            rows = _events(reader, " AND ".join(filter(None, conditions)), params)
            # Those of parked streams are not lost: they are handled when the stream is released.
            passed += islice((row for row in rows if row[2] not in parked), counting.MANY + 1)
    before = max((each.position for each in by_part.values()), default=None)
    passed = sorted(passed)[: counting.MANY + 1]
    refused = sorted(set(range(number)) - states.keys())
    return Move(log, before, after, state.dump(), last, passed, refused)


def _events(
    reader: LogReader, condition: str, params: Sequence[Any]
) -> Iterator[tuple[int, str, str]]:
    """Yield position, type and stream of each event that meets a condition, in order."""
    after, limit = 0, counting.MANY + 1
    while True:
        rows: list[Any] = reader.run(
            f"SELECT id, type, stream FROM {reader.window.source} WHERE {condition} "
            f"AND type <> '{TOMBSTONE}' AND id > %s ORDER BY id LIMIT {limit}",
            [*params, after],
        )
        yield from rows
        if len(rows) < limit:
            return
        after = rows[-1][0]


def _move(row: Subscription, move: Move, using: str) -> None:
    """Write the cursors of one log, in the open transaction that holds the locks."""
    values: dict[str, Any] = {
        "state": move.state,
        "position": move.last if move.after is None else move.after,
        "partitions": row.partitions,
        "moved_at": DatabaseNow(),
        "failed_event": None,
        "counted": None,
    }
    cursors = Cursor.objects.using(using).filter(subscription=row.name, log=move.table)
    if other := list(cursors.exclude(partitions=row.partitions).order_by("partition")):
        replace_cursors(other, [(move.state, values["position"])] * row.partitions)
    cursors.move(**values)
    begun = set(cursors.values_list("partition", flat=True))
    Cursor.objects.using(using).bulk_create(
        Cursor(subscription=row.name, partition=part, log=move.table, **values)
        for part in set(range(row.partitions)) - begun
    )
    if move.after is not None:
        _delete_parked(row.name, move.table, move.after, using)


def _delete_parked(name: str, table: str, after: int, using: str) -> None:
    """Delete the parked streams whose events all come again, and close the gaps they wait for."""
    parked = ParkedStream.objects.using(using).filter(subscription=name, log=table)
    parked.filter(position__gt=after).delete()
    gaps = Gap.objects.using(using).filter(subscription=name, log=table, kind=Gap.Kind.VERSION)
    gaps.filter(~Exists(parked.filter(stream=OuterRef("stream")))).settle(
        Gap.State.CLOSED,
        reason="The subscription was replayed. Versions still missing are recorded again.",
    )


def release(name: str, streams: Sequence[str] | None = None, *, using: str | None = None) -> int:
    """Release parked streams, these or all: each is handled from the event at which it was parked.

    Returns how many were parked. A stream whose handler fails again stays parked, with the error.
    """
    rows = ParkedStream.objects.using(using or alias_of(name)).filter(subscription=name)
    if streams is not None:
        rows = rows.filter(stream__in=list(streams))
    return rows.update(released=True)


def repartition(name: str, *, using: str | None = None) -> tuple[int, int]:
    """Change to the number of partitions that the code declares, even if it is no multiple.

    Returns the numbers before and after. If it is no multiple, all partitions go on from the end of
    the log; raises ``ReplayRefused`` if one of them has not handled all that is committed.
    """
    subscriber = subscriber_named(name)
    using, wanted = using or subscriber.using, subscriber.partitions
    if not Subscription.objects.using(using).filter(pk=name).exists():
        # It has never run, and will begin with the declared number.
        return (_declared_partitions(name, using),) * 2
    ends = {}
    with locked(name, using) as (row, cursors):
        for log in subscriber.logs:
            table = log._meta.db_table
            old = [each for each in cursors if each.log == table and wanted % each.partitions]
            if old and subscriber.by_time:
                # Handled versions are recorded by stream: begin at the place furthest behind.
                least = min(old, key=lambda each: astuple(TimeState.load(each.state)))
                ends[table] = least.state, least.position
            elif old:
                move = _plan_log(row, old, log, None, subscriber.only(0), using=using)
                if move.refused:
                    raise ReplayRefused(
                        f"Nothing was changed: {table} refuses the cursor of partition "
                        f"{move.refused[0]} of {name!r}. Replay or reset the subscription."
                    )
                if move.passed:
                    raise ReplayRefused(
                        f"Nothing was changed: {name!r} would pass over {move.passes} in {table}. "
                        f"Let all {old[0].partitions} partitions catch up, and try again."
                    )
                ends[table] = move.state, move.before or 0
        adopt_partitions(subscriber, using=using, ends=ends)
    return row.partitions, wanted


def delete_subscription(name: str, *, using: str | None = None) -> None:
    """Delete the rows of a subscription that the code no longer declares.

    Its cursors would keep ``outbox_prune`` from removing events. The effects of its handler stay.
    Raises ``ReplayRefused`` if the subscription is declared, or if a process runs it.
    """
    using = using or model_alias(Event)
    if any(each.name == name and (each.fault or each.using == using) for each in all_subscribers()):
        raise ReplayRefused(
            f"Subscription {name!r} is still declared, so it would begin again. First remove it "
            "from the code, and from every process; or pause it."
        )
    if served([name], using):
        raise ReplayRefused(f"A process runs subscription {name!r}. Stop it, or deploy, first.")
    with transaction.atomic(using=using):
        rows = Subscription.objects.using(using).select_for_update().filter(pk=name)
        if not rows.exists():
            raise UnknownSubscription(f"There is no subscription {name!r} on {using!r}.")
        for model in (Cursor, ParkedStream, Gap, DeliveredVersion):
            model._default_manager.using(using).filter(subscription=name).delete()
        Lease.objects.using(using).filter(resource=f"subscription:{name}").delete()
        rows.delete()


def reads_of(name: str, using: str) -> dict[str, Any]:
    """Return which topics and types a subscription reads: as declared here, or as it last ran."""
    subscriber = _declared(name)
    rows = Subscription.objects.using(using).filter(pk=name).values_list("reads", flat=True)
    reads = (subscriber.reads if subscriber else rows.first()) or {}
    return {key: reads.get(key) for key in ("topics", "types")}


def alias_of(name: str) -> str:
    """Return the alias of a subscription; if it is not declared, the alias of ``Event``."""
    subscriber = _declared(name)
    return subscriber.using if subscriber else model_alias(Event)


def _declared_partitions(name: str, using: str) -> int:
    """Return how many a subscription without a row is to have. Raises ``UnknownSubscription``."""
    subscriber = subscriber_named(name)
    if subscriber.using != using:
        raise UnknownSubscription(
            f"There is no subscription {name!r} on {using!r}: its logs are on {subscriber.using!r}."
        )
    return subscriber.partitions


def _declared(name: str) -> Subscriber | None:
    return next((each for each in all_subscribers() if each.name == name), None)


def record_skip(*, by: str, using: str, **columns: Any) -> Gap:
    """Record, in the open transaction, that a person made a subscription skip events of a log."""
    gap = Gap.objects.using(using).record_skip(by=by, **columns)
    logger.warning("Events skipped subscription=%s gap=%s by=%s", gap.subscription, gap, by)
    return gap


@contextmanager
def locked(name: str, using: str) -> Iterator[tuple[Subscription, list[Cursor]]]:
    """Lock the rows of a subscription, in the same order as ``subscriptions.cursors``."""
    rows = Subscription.objects.using(using)
    partitions = {"partitions": lambda: _declared_partitions(name, using)}
    try:
        # A snapshot from before the locks would not show streams that the awaited page has parked.
        with atomic_with_lock_wait(LOCK_SECONDS, using=using, read_committed=True):
            row, _ = rows.select_for_update().get_or_create(name=name, defaults=partitions)
            yield row, lock_cursors(name, using=using)
    except django.db.OperationalError as error:
        if not is_conflict(error):  # the database is away
            raise
        raise ReplayRefused(
            f"Nothing was changed: the rows of subscription {name!r} could not be locked "
            f"({error}). A page that is being handled has to end first. Try again."
        ) from error
