"""Changing the number of a subscription's partitions, without an event lost or handled twice.

From K to a multiple of K, each new partition begins at the place of the one that it is cut out of:
``slice % K' = p`` implies ``slice % K = p % K``. Any other change needs one place that each of the
old partitions has reached and none has passed: the end of the log, which ``control.repartition``
reads once it has locked the cursors.

A process changes the number to a multiple by itself, until a person has changed it. Then only a
person does: a process of older code, which may run still, must not undo the decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import gcd
from typing import Any

from django.db.models import Exists

from ...database.lock_wait import atomic_with_lock_wait
from ..exceptions import ReadRefused
from ..log.newevent import slice_of
from ..log.reader import LogReader
from ..models import Cursor, ParkedStream, Subscription
from .cursors import PartitionsDiffer, is_stopped
from .handling import decided, joined
from .subscriber import Subscriber

#: State and position of a cursor.
Place = tuple[str, int]


def adopt_partitions(
    subscriber: Subscriber, *, using: str, ends: Mapping[str, Place] | None = None
) -> None:
    """Make the cursors fit the declared number of partitions.

    ``ends`` has, by table, the place that all partitions of a log have reached, if the number is no
    multiple; None: no person has asked. Only a person may ask for another number than a multiple:
    two versions of the code that run side by side would undo each other's changes. Raises
    ``PartitionsDiffer`` if the cursors cannot fit, or a person has chosen their number; and
    ``LogSetBack`` if a cursor has stopped with it.
    """
    name, wanted = subscriber.name, subscriber.partitions
    tables = [log._meta.db_table for log in subscriber.logs]
    rows = Subscription.objects.using(using).filter(pk=name)
    # A log that was left out when the number was changed may be read again.
    differ = Cursor.objects.using(using).filter(subscription=name, log__in=tables)
    differ = differ.exclude(partitions=wanted)
    if rows.filter(~Exists(differ), partitions=wanted).exists():
        return
    # A snapshot from before the locks would not show streams that the awaited page has parked.
    with atomic_with_lock_wait(None, using=using, read_committed=True):
        row = rows.select_for_update().get()
        numbers = {row.partitions, *differ.values_list("partitions", flat=True)}
        if numbers == {wanted}:
            return
        if ends is None and row.pinned and row.partitions != wanted:
            why = f"A person has chosen {row.partitions}, so no process changes the number."
            raise PartitionsDiffer.between(name, row.partitions, wanted, why)
        if ends is None and (before := next((n for n in numbers if wanted % n), 0)):
            raise PartitionsDiffer.between(name, before, wanted)
        # With these locks, no page of the old partitions can commit, whichever code handles it.
        by_log: dict[str, dict[int, Cursor]] = defaultdict(dict)
        for cursor in lock_cursors(name, using=using):
            if cursor.log in tables:
                cursor.recall()
            if cursor.partitions != wanted:
                by_log[cursor.log][cursor.partition] = cursor
        for table, parts in by_log.items():
            if ends and table in ends:
                places = [ends[table]] * wanted
            elif wanted % (before := parts[0].partitions) == 0:
                same = [parts[n % before] for n in range(wanted)]
                places = [(each.state, each.position) for each in same]
            else:  # the log is no longer read
                continue
            replace_cursors(list(parts.values()), places)
        for parked in ParkedStream.objects.using(using).filter(subscription=name):
            parked.partition = slice_of(parked.stream) % wanted
            parked.save(using=using, update_fields=["partition"])
        rows.update(partitions=wanted, pinned=row.pinned or ends is not None)


def lock_cursors(name: str, *, using: str) -> list[Cursor]:
    """Lock the cursors of a subscription, in the open transaction; return them.

    Each is locked by its key: otherwise MySQL may walk a small table, and wait for pages of other
    subscriptions.
    """
    rows = Cursor.objects.using(using).select_for_update()
    keys = list(rows.filter(subscription=name).values_list("pk", flat=True))  # from an index only
    return [rows.get(pk=key) for key in sorted(keys)]


def states_of(reader: LogReader, cursors: Iterable[Cursor]) -> dict[int, Any]:
    """Return, by partition, the states of a log's cursors that are neither damaged nor refused."""
    states = {}
    for cursor in cursors:
        with suppress(ReadRefused):
            cursor.recall()
            state = reader.load(cursor.state)
            reader.window.verify(state)
            states[cursor.partition] = state
    return states


def replace_cursors(old: list[Cursor], places: list[Place]) -> None:
    """Replace the cursors of one log. The first new one gets the sum of the handled events.

    A person's decision about a failing event goes with the event. A new cursor that gets streams of
    a cursor that waits for a person waits, too.
    """
    cursors = Cursor.objects.using(old[0]._state.db)
    skips = [event for each in old for event in decided(each.failed_event)]
    stopped = [each for each in old if is_stopped(each) or each.was_set_back]
    shared = gcd(len(old), len(places))  # partitions that differ by a multiple have common streams
    for cursor in old:
        cursor.delete(using=cursors.db)
    cursors.bulk_create(
        Cursor(
            subscription=old[0].subscription,
            partition=n,
            partitions=len(places),
            log=old[0].log,
            state=state,
            position=position,
            handled=0 if n else sum(cursor.handled for cursor in old),
            failed_event=joined([e for e in skips if slice_of(e["stream"]) % len(places) == n]),
            error=next((each.error for each in stopped if (n - each.partition) % shared == 0), ""),
        )
        for n, (state, position) in enumerate(places)
    )
