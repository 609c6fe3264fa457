"""What a person does with a subscription: pause, resume, replay, release, repartition.

Each locks the subscription's row, then its cursors, and commits once. A page that is being handled
is waited for; one that was only read fails its compare and set: when ``pause`` has returned nothing
more is handled, and when ``replay`` has returned whatever is handled comes from the new place. A
running process notices by itself, at the latest after a fifth of its lease. What a subscription has
done to its database is not undone by a replay: its handler gets the events again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import django.db
from django.db import connections, transaction
from django.db.models import F, Max

from ..aliases import log_alias
from ..eventlog.filter import EventFilter
from ..eventlog.reader import LogReader
from ..eventlog.registry import log_named
from ..exceptions import ReplayRefused, TransactionEnded
from ..models import Cursor, DatabaseNow, Event, EventLog, Gap, ParkedStream, Subscription
from .gaps import record_skip
from .places import Landing, Place, landing, position_of
from .repartition import adopt_partitions
from .subscriber import Subscriber, all_subscribers, subscriber_named

#: Longest wait for a page that is being handled, on PostgreSQL; elsewhere as the server has it.
LOCK_SECONDS = 50
#: Parked streams forgotten by one statement.
CHUNK = 500


@dataclass(frozen=True, slots=True)
class Move:
    """Where the cursors of one log go."""

    log: type[EventLog]
    #: Highest position that any of its partitions has passed; None: they have never run.
    before: int | None
    #: Behind which position; None: behind all that is committed at that moment.
    after: int | None
    #: What it passes over, for people; empty: nothing.
    passes: str = ""

    def __str__(self) -> str:
        here = "never run" if self.before is None else f"at {self.before}"
        if self.after is None:
            there = "to now"
        elif self.after == 0:
            there = "to the beginning: every event that is kept is handled again"
        else:
            there = (
                f"to {self.after}: the events behind it are handled, again or for the first time"
            )
        passes = self.passes and f"; passes over {self.passes}"
        return f"{self.log._meta.db_table}: from where it is ({here}) {there}{passes}"


def pause(name: str, *, using: str | None = None) -> None:
    """Have nothing of a subscription handled, from the return of this call on.

    Args:
        name: The subscription. It may never have run.
        using: Database alias. Default: that of its logs.

    Raises:
        UnknownSubscription: There is none of this name.
        ReplayRefused: A page that is being handled does not end. Nothing was changed.
    """
    _set_paused(name, True, using)


def resume(name: str, *, using: str | None = None) -> None:
    """Have a subscription go on that is paused or has stopped. Arguments, errors: as ``pause``."""
    _set_paused(name, False, using)


def plan(
    name: str, place: Place, *, log: str | None = None, using: str | None = None
) -> list[Move]:
    """Return what ``replay`` would do; it has the same arguments and errors."""
    using = using or alias_of(name)
    cursors = Cursor.objects.using(using).filter(subscription=name)
    at = dict(cursors.values_list("log").annotate(Max("position")))
    logs = _logs_of(name, sorted(at))
    if log is not None:
        wanted = log_named(log)
        if wanted not in logs:
            raise ReplayRefused(
                f"Subscription {name!r} does not read the log {wanted._meta.db_table}."
            )
        logs = [wanted]
    if isinstance(place, int) and len(logs) > 1:
        tables = ", ".join(each._meta.db_table for each in logs)
        raise ReplayRefused(
            f"Subscription {name!r} reads several logs ({tables}), and position {place} belongs to "
            "one of them. Name that log, or give a time."
        )
    moves = [
        Move(each, at.get(each._meta.db_table), position_of(each, place, using=using))
        for each in logs
    ]
    row = Subscription.objects.using(using).filter(pk=name).first()
    partitions = row.partitions if row else subscriber_named(name).partitions
    return [
        replace(move, passes=str(_landing(name, partitions, move, list(cursors), using)))
        for move in moves
    ]


def replay(
    name: str,
    place: Place,
    *,
    log: str | None = None,
    skip_ahead: bool = False,
    by: str = "",
    reason: str = "",
    using: str | None = None,
) -> list[Move]:
    """Put the cursors of a subscription to a place; paused or running, healthy or damaged.

    Parked streams whose events all come again are forgotten; the others stay parked, as their
    events would not come. What is in flight now comes when it commits, whatever its position.

    Args:
        name: The subscription. It may never have run.
        place: "beginning", "now", a position (what is behind it comes; of several logs name one) or
            a time (what was recorded from then on comes, and what was recorded up to a second
            before).
        log: Only in this log, by table or label. Default: in all that it reads.
        skip_ahead: Pass over events that it has not handled: no cursor comes back to them. Without
            it such a move is refused. A row in ``Gap`` says which, who decided (``by``), and why
            (``reason``).
        using: Database alias. Default: that of its logs.

    Returns:
        What was done.

    Raises:
        UnknownSubscription: There is none of this name.
        UnknownLog: There is no such log.
        ReplayRefused: The place is none of the log, events would be passed over, or a page that is
            being handled does not end. Nothing was changed.
        ReadRefused: The server cannot tell what has been committed.
    """
    using = using or alias_of(name)
    moves = plan(name, place, log=log, using=using)
    with locked(name, using) as (row, cursors):
        for number, move in enumerate(moves):
            # Anew, under the locks: a page may have been handled since, and events published.
            there = _landing(name, row.partitions, move, cursors, using)
            moves[number] = replace(move, passes=str(there))
            if there.passed and not skip_ahead:
                raise ReplayRefused(
                    f"Nothing was changed: {name!r} would pass over {there} in "
                    f"{move.log._meta.db_table}. Let it handle them first, or say that they are to "
                    "be skipped: --skip-ahead, skip_ahead=True."
                )
            if there.passed:
                ends = there.passed[0][0], move.after or there.last
                why = f"Moved ahead over {there}. {reason}".strip()
                record_skip(name, move.log._meta.db_table, *ends, by=by, reason=why, using=using)
            _move(row, move, there, using)
    return moves


def reset(name: str, *, using: str | None = None) -> list[Move]:
    """Put a subscription to the beginning of its logs: see ``replay``."""
    return replay(name, "beginning", using=using)


def release(name: str, streams: Sequence[str] | None = None, *, using: str | None = None) -> int:
    """Have parked streams handled from where they were set aside.

    Args:
        name: The subscription.
        streams: Which. Default: all of its parked ones.
        using: Database alias. Default: that of its logs.

    Returns:
        How many were parked. One whose handler fails again stays parked, with the new error.
    """
    using = using or alias_of(name)
    rows = ParkedStream.objects.using(using).filter(subscription=name)
    if streams is not None:
        rows = rows.filter(stream__in=list(streams))
    return rows.update(released=True)


def repartition(name: str, *, using: str | None = None) -> tuple[int, int]:
    """Go to the number of partitions that the code declares, also where it is no multiple.

    Returns:
        Partitions before and after.

    Raises:
        UnknownSubscription: The code declares none of this name.
        PartitionsDiffer: The partitions have not arrived at one place yet.
    """
    subscriber = subscriber_named(name)
    using = using or subscriber.using
    row = Subscription.objects.using(using).filter(pk=name).first()
    if row is None:  # never run: it will begin with them
        return subscriber.partitions, subscriber.partitions
    with _patient(name):
        adopt_partitions(subscriber, using=using, merge=True)
    return row.partitions, subscriber.partitions


def reads_of(name: str, using: str) -> dict[str, Any]:
    """Return which topics and types a subscription reads: as declared, else as it last was."""
    subscriber = _declared(name)
    rows = Subscription.objects.using(using).filter(pk=name).values_list("reads", flat=True)
    return (subscriber.reads if subscriber else rows.first()) or {}


def alias_of(name: str) -> str:
    """Return the alias that a subscription is on; one that is not declared any more: Event's."""
    subscriber = _declared(name)
    return subscriber.using if subscriber else log_alias(Event)


def _set_paused(name: str, paused: bool, using: str | None) -> None:
    using = using or alias_of(name)
    with locked(name, using) as (row, _):
        row.paused = paused
        row.save(using=using, update_fields=["paused"])
        cursors = Cursor.objects.using(using).filter(subscription=name)
        cursors.update(revision=F("revision") + 1)
        if not paused:  # also what has stopped by itself (subscriptions.cursors.is_stopped)
            stopped = cursors.filter(error__startswith=TransactionEnded.__name__)
            stopped.update(error="", failures=0, retry_at=None)


def _logs_of(name: str, tables: list[str]) -> list[type[EventLog]]:
    subscriber = _declared(name)
    return subscriber.logs if subscriber else [log_named(table) for table in tables]


def _declared(name: str) -> Subscriber | None:
    return next((each for each in all_subscribers() if each.name == name), None)


def _landing(name: str, partitions: int, move: Move, cursors: list[Cursor], using: str) -> Landing:
    """Return where a move ends, and what would not be handled any more."""
    subscriber = _declared(name)
    table = move.log._meta.db_table
    by_part = {each.partition: each for each in cursors if each.log == table}
    asked = reads_of(name, using)
    topics, types = asked.get("topics"), asked.get("types")
    parts: list[tuple[Cursor | None, EventFilter]] = [
        (by_part.get(part), EventFilter(topics, types, partitions, part))
        for part in range(partitions)
        if part in by_part or (subscriber and subscriber.start == "beginning")
    ]
    reader = LogReader(
        move.log,
        using=(subscriber and subscriber.read_from) or using,
        by_time=bool(subscriber and subscriber.by_time),
    )
    there = landing(reader, move.after, parts)
    # Those of parked streams are not lost: they come with the release.
    parked = ParkedStream.objects.using(using).filter(subscription=name, log=table)
    streams = set(parked.values_list("stream", flat=True))
    return replace(there, passed=[each for each in there.passed if each[2] not in streams])


def _move(row: Subscription, move: Move, there: Landing, using: str) -> None:
    """Write the cursors of one log, in the open transaction that holds the locks."""
    table = move.log._meta.db_table
    values: dict[str, Any] = {
        "state": there.state,
        "position": there.last if move.after is None else move.after,
        "partitions": row.partitions,
        "moved_at": DatabaseNow(),
        "error": "",
        "failures": 0,
        "retry_at": None,
        "failed_event": None,
        "counted": None,
    }
    cursors = Cursor.objects.using(using).filter(subscription=row.name, log=table)
    cursors.update(**values, revision=F("revision") + 1)
    begun = set(cursors.values_list("partition", flat=True))
    Cursor.objects.using(using).bulk_create(
        Cursor(subscription=row.name, partition=part, log=table, **values)
        for part in set(range(row.partitions)) - begun
    )
    if move.after is not None:
        _forget_parked(row.name, table, move.after, using)


def _forget_parked(name: str, table: str, after: int, using: str) -> None:
    """Let go of the streams whose events all come again, and of the gaps that they waited for."""
    parked = ParkedStream.objects.using(using).filter(subscription=name, log=table)
    streams = list(parked.filter(position__gt=after).values_list("stream", flat=True))
    gaps = Gap.objects.using(using).filter(subscription=name, log=table, kind=Gap.Kind.VERSION)
    for start in range(0, len(streams), CHUNK):
        some = streams[start : start + CHUNK]
        gaps.filter(stream__in=some, state=Gap.State.OPEN).update(
            state=Gap.State.CLOSED,
            settled_at=DatabaseNow(),
            reason="The subscription was replayed. What is still missing is noted again.",
        )
        parked.filter(stream__in=some).delete()


@contextmanager
def locked(name: str, using: str) -> Iterator[tuple[Subscription, list[Cursor]]]:
    """Hold the rows of a subscription: the order of locks is that of ``subscriptions.cursors``."""
    rows = Subscription.objects.using(using)
    with _patient(name), transaction.atomic(using=using):
        if connections[using].vendor == "postgresql":  # the others do not wait for ever
            with connections[using].cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
        # Called only where there is no row yet.
        partitions = {"partitions": lambda: subscriber_named(name).partitions}
        rows.get_or_create(name=name, defaults=partitions)
        row = rows.select_for_update().get(pk=name)
        cursors = Cursor.objects.using(using).select_for_update().filter(subscription=name)
        yield row, list(cursors.order_by("pk"))


@contextmanager
def _patient(name: str) -> Iterator[None]:
    try:
        yield
    except django.db.OperationalError as error:
        raise ReplayRefused(
            f"Nothing was changed: the rows of subscription {name!r} could not be locked "
            f"({error}). A page that is being handled has to end first. Try again."
        ) from error
