"""Cursors in the database: made once, moved by compare and set.

``advance`` runs inside the transaction of the effects, first: it locks the row, so another process
that holds the same page waits, and then finds that the page is no longer its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import django.db
from django.db import connections, transaction
from django.db.models import Exists, F, OuterRef

from ..conf import outbox_settings
from ..eventlog.reader import LogReader
from ..eventlog.state import WindowState
from ..exceptions import LeaseLost, ReadRefused, TransactionEnded
from ..models import Cursor, DatabaseNow, Subscription
from ..process.backoff import described
from .subscriber import Subscriber


class PartitionsDiffer(ReadRefused):
    """The code and the database do not agree on the number of partitions."""

    @classmethod
    def between(cls, name: str, before: int, wanted: int, why: str = "") -> PartitionsDiffer:
        """Return the error for a number in the database and one in the code."""
        return cls(
            f"Subscription {name!r} has {before} partitions in the database and {wanted} in the "
            f"code. {why or 'Its events would be handled twice or not at all.'} Run manage.py "
            f"outbox_subscriptions repartition {name}, or go back to {before}."
        )


class Overtaken(LeaseLost):
    """Somebody else has moved the cursor: another process, or a person."""


class Paused(LeaseLost):
    """A person has paused the subscription: nothing of it is handled until it is resumed."""


def cursor_of(subscriber: Subscriber, part: int, reader: LogReader) -> Cursor:
    """Return the cursor of a partition in a log; made where it has never run.

    Raises:
        Paused: The subscription is. Whoever pauses bumps the revisions in the same transaction, so
            a cursor that was returned before cannot be advanced after.
        PartitionsDiffer: In the database the subscription has another number of partitions.
        Overtaken: The cursor went while it was looked for.
    """
    key = {"subscription": subscriber.name, "partition": part, "log": reader.table}
    # One statement: a pause that comes between two of them would be missed.
    paused = Subscription.objects.filter(pk=OuterRef("subscription"), paused=True)
    cursors = Cursor.objects.using(subscriber.using).filter(**key)
    cursors = cursors.annotate(is_paused=Exists(paused))
    found = cursors.first()
    if found is None:
        _begin(subscriber, reader)
        found = cursors.first()
    if found is None:
        raise Overtaken(f"Cursor {part} of {subscriber.name!r} in {reader.table} was taken away.")
    if found.is_paused:
        raise Paused(f"Subscription {subscriber.name!r} is paused.")
    if found.partitions != subscriber.partitions:
        raise PartitionsDiffer.between(subscriber.name, found.partitions, subscriber.partitions)
    return found


def _begin(subscriber: Subscriber, reader: LogReader) -> None:
    state = reader.window.start(0 if subscriber.start == "beginning" else None).dump()
    count = subscriber.partitions
    with transaction.atomic(using=subscriber.using):
        # All partitions at one place: the slice of a stream must lie behind one of them only.
        subscriptions = Subscription.objects.using(subscriber.using).select_for_update()
        row = subscriptions.get(pk=subscriber.name)
        if row.paused:
            raise Paused(f"Subscription {subscriber.name!r} is paused.")
        if row.partitions != count:
            raise PartitionsDiffer.between(subscriber.name, row.partitions, count)
        rows = [
            Cursor(
                subscription=subscriber.name,
                partition=n,
                partitions=count,
                log=reader.table,
                state=state,
            )
            for n in range(count)
        ]
        Cursor.objects.using(subscriber.using).bulk_create(rows, ignore_conflicts=True)


def advance(
    cursor: Cursor,
    state: WindowState,
    *,
    handled: int,
    position: int,
    using: str,
    failed_event: dict[str, Any] | None = None,
) -> None:
    """Move a cursor, in the open transaction of the effects.

    Raises:
        Overtaken: It was moved since it was read.
    """
    text = state.dump()
    position = max(cursor.position, position)
    moved = (
        Cursor.objects.using(using)
        .filter(pk=cursor.pk, revision=cursor.revision)
        .update(
            state=text,
            position=position,
            revision=cursor.revision + 1,
            handled=F("handled") + handled,
            moved_at=DatabaseNow(),
            error="",
            failures=0,
            retry_at=None,
            failed_event=failed_event,
        )
    )
    if not moved:
        raise Overtaken(f"The cursor {cursor} was moved by another process; this page is dropped.")


def is_in_hand(cursor: Cursor, *, using: str) -> bool:
    """Say whether somebody holds a cursor's row: a page of it is being handled elsewhere.

    Whoever advanced it would wait for that, and keep its other subscriptions waiting.
    """
    if not connections[using].features.has_select_for_update_nowait:
        return False
    rows = Cursor.objects.using(using).filter(pk=cursor.pk).select_for_update(nowait=True)
    try:
        with transaction.atomic(using=using):
            rows.values_list("pk").first()
    except django.db.OperationalError:
        return True
    return False


def advanced(cursor: Cursor, state: WindowState, *, position: int) -> None:
    """Note in memory what ``advance`` wrote, once it is committed."""
    cursor.state = state.dump()
    cursor.position = max(cursor.position, position)
    cursor.revision += 1
    cursor.failures = 0
    cursor.error = ""
    cursor.failed_event = None


def fail(cursor: Cursor, error: BaseException, *, handled: int = 0, using: str) -> float:
    """Write down why a cursor stands still. Returns the seconds after which to try again.

    Where the page's transaction was ended, and the cursor's move committed by that, it is put back
    and stops until a person decides: by then its effects may be there in part.

    Args:
        cursor: The cursor, as it was before the page.
        error: What the page failed with.
        handled: Events of the page.
        using: Database alias.
    """
    cursor.failures += 1
    rows = Cursor.objects.using(using).filter(pk=cursor.pk)
    if isinstance(error, TransactionEnded):
        error.add_note(
            "The effects of these events may be there in part. They are not tried again until "
            f"manage.py outbox_subscriptions resume {cursor.subscription} is run."
        )
        cursor.error = described(error)
        if rows.filter(revision=cursor.revision + 1).update(
            state=cursor.state,
            position=cursor.position,
            handled=F("handled") - handled,
            revision=F("revision") + 1,
            error=cursor.error,
            failures=cursor.failures,
            failed_event=cursor.failed_event,
            retry_at=None,
        ):
            return float("inf")
        error.__notes__.pop()  # the move is not there: all of it was rolled back
    delay: float = min(outbox_settings().MAX_RETRY_DELAY, 0.1 * 2 ** min(cursor.failures, 20))
    cursor.error = described(error)
    columns: dict[str, Any] = {
        "error": cursor.error,
        "failures": cursor.failures,
        "retry_at": DatabaseNow() + timedelta(seconds=delay),
        "failed_event": cursor.failed_event,
    }
    rows.filter(revision=cursor.revision).update(**columns)
    return delay


def is_stopped(cursor: Cursor) -> bool:
    """Say whether a cursor was put back, and waits until its subscription is resumed."""
    return cursor.retry_at is None and cursor.error.startswith(TransactionEnded.__name__)
