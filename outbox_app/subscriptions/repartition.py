"""Changing the number of a subscription's partitions, without an event lost or handled twice.

From K to a multiple of K, each new partition begins at the place of the one that it is cut out of:
``slice % K' = p`` implies ``slice % K = p % K``. Any other change needs one place that each of the
old partitions has reached and none has passed. The end of the log is read first, as a window cannot
be opened in a transaction that holds locks. Once the cursors are locked, this end must prove to be
the place; otherwise the change is refused, and no cursor moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from math import gcd
from operator import attrgetter
from typing import Any

from django.db.models import Exists

from ..eventlog.newevent import slice_of
from ..eventlog.reader import LogReader
from ..exceptions import ReadRefused
from ..failpoints import failpoint
from ..models import Cursor, ParkedStream, Subscription
from ..process.lock_wait import atomic_with_lock_wait
from .cursors import PartitionsDiffer, is_stopped
from .handling import decided, joined
from .subscriber import Subscriber


def adopt_partitions(subscriber: Subscriber, *, using: str, merge: bool = False) -> None:
    """Make the cursors fit the declared number of partitions.

    ``merge`` allows a number that is no multiple, too. Only a person may ask for that: two versions
    of the code that run side by side would undo each other's changes. Raises ``PartitionsDiffer``
    if the cursors cannot fit, or not yet, and ``LogSetBack`` if a cursor has stopped with it.
    """
    name, wanted = subscriber.name, subscriber.partitions
    logs = {log._meta.db_table: log for log in subscriber.logs}
    rows = Subscription.objects.using(using).filter(pk=name)
    known = Cursor.objects.using(using).filter(subscription=name)
    # A log that was left out when the number was changed may be read again.
    differ = known.filter(log__in=list(logs)).exclude(partitions=wanted)
    if rows.filter(~Exists(differ), partitions=wanted).exists():
        return
    readers = {table: subscriber.reader(log, using=using) for table, log in logs.items()}
    try:
        # In autocommit: a window may not be opened inside a transaction that has written.
        ends: dict[str, tuple[str, Collection[int]]] = {}
        for table, reader in readers.items():
            states = states_of(reader, known.filter(log=table))
            ends[table] = reader.window.move(None, list(states.values())).dump(), states.keys()
        failpoint("ends_read")
        # A snapshot from before the locks would not show streams that the awaited page has parked.
        with atomic_with_lock_wait(None, using=using, read_committed=True):
            row = rows.select_for_update().get()
            numbers = {row.partitions, *differ.values_list("partitions", flat=True)}
            if numbers == {wanted}:
                return
            if not merge and (before := next((n for n in numbers if wanted % n), 0)):
                raise PartitionsDiffer.between(name, before, wanted)
            # With these locks, no page of the old partitions can commit, whichever code handles it.
            by_log: dict[str, dict[int, Cursor]] = defaultdict(dict)
            for cursor in lock_cursors(name, using=using):
                if cursor.log in readers:
                    cursor.recall()
                if cursor.partitions != wanted:
                    by_log[cursor.log][cursor.partition] = cursor
            for table, parts in by_log.items():
                end, sound = ends.get(table, ("", ()))
                if places := _places(subscriber, parts, readers.get(table), end, sound):
                    replace_cursors(list(parts.values()), places)
            for parked in ParkedStream.objects.using(using).filter(subscription=name):
                parked.partition = slice_of(parked.stream) % wanted
                parked.save(using=using, update_fields=["partition"])
            rows.update(partitions=wanted)
    finally:
        for reader in readers.values():
            reader.close()


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


def _places(
    subscriber: Subscriber,
    parts: dict[int, Cursor],
    reader: LogReader | None,
    end: str,
    sound: Collection[int],
) -> list[tuple[str, int]]:
    """Return state and position of each new partition; none if the log is no longer read.

    ``sound`` are the partitions whose states the log did not refuse when ``end`` was read.
    """
    before, wanted = parts[0].partitions, subscriber.partitions
    if wanted % before == 0:
        return [(parts[n % before].state, parts[n % before].position) for n in range(wanted)]
    if reader is None:
        return []
    if reader.by_time:
        # Handled versions are recorded by stream, so all can begin at the place furthest behind.
        place = attrgetter("at", "id")
        least = min(parts.values(), key=lambda cursor: place(reader.load(cursor.state)))
        return [(least.state, least.position)] * wanted
    for part, cursor in parts.items():
        why = ""
        if part not in sound:
            why = f"has a cursor that {reader.table} refuses: replay or reset the subscription"
        elif _lie_between(reader, cursor.state, end, before, part):
            why = f"is behind in {reader.table}: let all {before} partitions catch up"
        elif _lie_between(reader, end, cursor.state, before, part):
            # If it were set back to ``end``, the partition would handle those events again.
            why = f"has handled events of {reader.table} meanwhile that others may not have"
        if why:
            why = f"The partitions are not all at one place. Partition {part} {why}."
            raise PartitionsDiffer.between(subscriber.name, before, wanted, why)
    return [(end, max(cursor.position for cursor in parts.values()))] * wanted


def replace_cursors(old: list[Cursor], places: list[tuple[str, int]]) -> None:
    """Replace the cursors of one log. The first new one gets the sum of the handled events.

    A person's decision about a failing event goes with the event. A new cursor that gets streams of
    a cursor that waits for a person waits, too.
    """
    cursors = Cursor.objects.using(old[0]._state.db)
    skips = [event for each in old for event in decided(each.failed_event)]
    stopped = [each for each in old if is_stopped(each)]
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


def _lie_between(reader: LogReader, behind: str, ahead: str, parts: int, part: int) -> bool:
    """Return whether a partition has events that ``ahead`` has passed and ``behind`` has not."""
    unread = reader.window.unread(reader.load(behind))
    later = reader.window.unread(reader.load(ahead))
    sql = (
        f"SELECT 1 FROM {reader.window.source} WHERE {unread} AND NOT ({later}) "
        "AND slice %% %s = %s LIMIT 1"
    )
    return bool(reader.run(sql, [parts, part]))
