"""Compares the events that a log has for a subscription with those it handled, between two moments.

The first count notes where each cursor is and how many events it has handled; every later count
compares both with the log's rows. This is exact, as a cursor's count is committed with the effects:
a row that a cursor has passed was handled, parked, skipped by a person, or lost. A move without
handling (replay, repartition, rebase, rebuild) and a prune of counted rows drop the note; other
topics or types need a new note. Cursors are locked while they are read, not while rows are counted.
With a reader by time, rows that committed late around the note show as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Exists, OuterRef, Q

from ...database.clock import DatabaseNow, aware
from ...database.transactions import own_connection
from ..exceptions import ReplayRefused
from ..log.filter import EventFilter
from ..log.window import TOMBSTONE
from ..models import Cursor, EventLog, Gap, ParkedStream
from .control import LOCK_SECONDS, alias_of, locked, reads_of
from .cursors import reader_of
from .handling import decided

#: The most streams, or decisions, that one statement looks for.
CHUNK = 200


@dataclass(slots=True)
class Count:
    """One log of a subscription, since its first count or the last restart."""

    log: str
    #: Since when, as ISO 8601; empty: counting begins now.
    since: str = ""
    #: Events of the log that its cursors have passed; those that its handler was given.
    published: int = 0
    handled: int = 0
    #: Growth of the events that parked and held streams have missed; events that a person skipped.
    parked: int = 0
    skipped: int = 0
    #: Partition, positions from and to, and the difference, of each partition that has one.
    uneven: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def difference(self) -> int:
        """Events that nothing accounts for; below zero: more was handled than the log has."""
        return self.published - self.handled - self.parked - self.skipped


def count_events(name: str, *, restart: bool = False, using: str | None = None) -> list[Count]:
    """Compare the events that a subscription has passed in each of its logs with those it handled.

    With ``restart`` the next count starts from the moment of this one. ``using`` is by default the
    alias of its logs.

    Raises:
        UnknownSubscription: No subscription has this name.
        ReplayRefused: The subscription has never run, or a page that is being handled does not end.
        ReadRefused: A cursor does not belong to this database, or is damaged.
    """
    using = using or alias_of(name)
    reads = reads_of(name, using)
    with locked(name, using) as (_, cursors):
        if not cursors:
            raise ReplayRefused(f"Subscription {name!r} has never run: there is nothing to count.")
        # Locking reads: the transaction may have a snapshot from before the cursors' locks.
        rows = ParkedStream.objects.using(using).select_for_update().filter(subscription=name)
        streams = list(rows)
        parts = [_Part(cursor, reads) for cursor in cursors]
        with own_connection(using, seconds=LOCK_SECONDS):
            for part in parts:
                part.look(streams)
        new = {each.cursor.log for each in parts if each.old.get("reads") != reads}
        for part in parts:
            if restart or part.cursor.log in new:
                part.note()
    counts = {each.cursor.log: Count(each.cursor.log) for each in parts}
    with own_connection(using, seconds=LOCK_SECONDS):
        for part in parts:
            if part.cursor.log not in new:
                part.add_to(counts[part.cursor.log])
    return list(counts.values())


def drop_pruned(log: type[EventLog], ids: Sequence[int], *, using: str) -> None:
    """Drop the notes that count these rows, in the open transaction that deletes them."""
    rows = log._base_manager.using(using).filter(pk__range=(ids[0], ids[-1]))
    noted = Cursor.objects.using(using).filter(log=log._meta.db_table, counted__isnull=False)
    for cursor in noted:
        reader = reader_of(cursor, using=using)
        old = cursor.counted or {}
        unread = reader.window.unread(reader.load(old["state"]))
        # Events parked at the note, and skipped since, are counted by their rows, too.
        skips = Gap.objects.using(using).filter(
            state=Gap.State.SKIPPED, subscription=cursor.subscription, log=cursor.log,
            settled_at__gte=datetime.fromisoformat(old["at"]), stream=OuterRef("stream"),
        )  # fmt: skip
        if rows.extra(where=[unread]).exists() or rows.filter(Exists(skips)).exists():
            noted.filter(pk=cursor.pk).update(counted=None)


class _Part:
    """A cursor as it was read under its lock, and statements about the rows that it has passed."""

    def __init__(self, cursor: Cursor, reads: dict[str, Any]) -> None:
        self.cursor, self.reads = cursor, reads
        self.using = str(cursor._state.db)
        self.old: dict[str, Any] = cursor.counted or {}
        self._reader = reader_of(cursor, using=self.using)
        self._window = self._reader.window
        self._state = self._reader.load(cursor.state)
        wanted, self._params = EventFilter(
            **reads, parts=cursor.partitions, part=cursor.partition
        ).sql()
        self._passed = f"NOT {self._window.unread(self._state)} AND type <> '{TOMBSTONE}'"
        self._passed += wanted and f" AND {wanted}"
        self._skips = self._decisions() if self.old else []

    def look(self, streams: list[ParkedStream]) -> None:
        """Check its state, and count what its parked streams have missed, in autocommit."""
        self.cursor.recall()
        self._window.verify(self._state)
        key = self.cursor.log, self.cursor.partition
        mine = [each for each in streams if (each.log, each.partition) == key]
        #: Events of its parked streams that it has passed.
        self._missed = self._rows(
            [("stream = %s AND version >= %s", each.stream, each.version) for each in mine]
        )

    def note(self) -> None:
        """Note, in the open transaction, that counting begins here."""
        cursors = Cursor.objects.using(self.using).filter(pk=self.cursor.pk)
        counted = {
            "at": cursors.annotate(now=DatabaseNow()).values_list("now")[0][0].isoformat(),
            "state": self.cursor.state,
            "position": self.cursor.position,
            "handled": self.cursor.handled,
            "parked": self._missed,
            "skips": [each["position"] for each in decided(self.cursor.failed_event)],
            "reads": self.reads,
        }
        cursors.update(counted=counted)

    def add_to(self, count: Count) -> None:
        """Add what the cursor has passed and handled since the note."""
        old, before = self.old, count.difference
        since = aware(datetime.fromisoformat(old["at"]), using=self.using).isoformat()
        count.since = min(filter(None, (count.since, since)))
        count.published += self._rows([(self._window.unread(self._reader.load(old["state"])),)])
        count.handled += self.cursor.handled - old["handled"]
        count.parked += self._missed - old["parked"]
        count.skipped += self._rows(self._skips)
        if difference := count.difference - before:
            ends = old["position"], self.cursor.position
            count.uneven.append((self.cursor.partition, *ends, difference))

    def _decisions(self) -> list[tuple[Any, ...]]:
        """Return a condition for each skip since the note: of an event, or of late versions."""
        at = datetime.fromisoformat(self.old["at"])
        rows = Gap.objects.using(self.using).select_for_update().filter(
            Q(settled_at__gte=at) | Q(kind=Gap.Kind.EVENT, first__in=self.old.get("skips", [])),
            state=Gap.State.SKIPPED,
            subscription=self.cursor.subscription,
            log=self.cursor.log,
        )  # fmt: skip
        columns = {Gap.Kind.EVENT.value: "id", Gap.Kind.VERSION.value: "version"}
        return [
            (f"stream = %s AND {columns[x.kind]} BETWEEN %s AND %s", x.stream, x.first, x.last)
            for x in rows
            if x.kind in columns
        ]

    def _rows(self, conditions: Sequence[tuple[Any, ...]]) -> int:
        found = 0
        for start in range(0, len(conditions), CHUNK):
            some = conditions[start : start + CHUNK]
            params = [value for _, *values in some for value in values]
            [(rows,)] = self._window.run(
                f"SELECT count(*) FROM {self._window.source} WHERE "
                f"({' OR '.join(f'({sql})' for sql, *_ in some)}) AND {self._passed}",
                [*params, *self._params],
            )
            found += rows
        return found
