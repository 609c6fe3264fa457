"""Cursors in the database: made once, moved by compare and set.

A move is the first statement of the transaction of the effects: it locks the row, so another
process that holds the same page waits, and then finds that the page is no longer its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction
from django.db.models import Exists, F, OuterRef

from ...database.callbacks import keep_callbacks_apart
from ...database.clock import DatabaseNow
from ...database.encoding import replaced
from ...exceptions import LeaseLost, TransactionEnded
from ...failpoints import failpoint
from ...process.endings import raise_what_ends_process
from ...text import error_text, storable
from ..conf import event_settings
from ..exceptions import ReadRefused
from ..log.filter import EventFilter
from ..log.reader import Events, LogReader, reads_by_time
from ..log.record import COLUMNS, RecordedEvent
from ..log.registry import log_named
from ..log.state import WindowState
from ..log.window import Page
from ..models import Cursor, Gap, ParkedStream, Subscription
from .subscriber import Subscriber

if TYPE_CHECKING:
    from .partition import Partition

#: How many characters of a traceback are kept, from its end.
TRACEBACK = 8000
#: The most rows of a shared page, and the characters of JSON above which the next one is shorter.
MAX_ROWS, MAX_SIZE = 20_000, 16 * 1024 * 1024

_DATA, _METADATA = COLUMNS.index("data"), COLUMNS.index("metadata")


class PartitionsDiffer(ReadRefused):
    """The code and the database do not agree on the number of partitions."""

    returncode = 1  # perhaps only for now: some partitions may have to catch up

    @classmethod
    def between(cls, name: str, before: int, wanted: int, why: str = "") -> PartitionsDiffer:
        return cls(
            f"Subscription {name!r} has {before} partitions in the database and {wanted} in the "
            f"code. {why or 'Its events would be handled twice or not at all.'} Run manage.py "
            f"outbox_subscriptions repartition {name}, or go back to {before}."
        )


class CursorConflict(LeaseLost):
    """Another process, or a person, has moved the cursor."""


class Paused(LeaseLost):
    """A person has paused the subscription: none of its events is handled until it is resumed."""


@dataclass(slots=True)
class LogCursor:
    """One log of a partition: its reader, its cursor, and the state that the cursor is at."""

    reader: LogReader
    cursor: Cursor
    state: WindowState
    #: The state after pages without events of its own (``SharedPages``).
    passed: WindowState | None = None
    #: The last page, if it had no events and was not stored.
    unstored: Page[Any] | None = None

    @property
    def fails(self) -> bool:
        """Whether its last page has failed, or a failing event is known."""
        return bool(self.cursor.failures or self.cursor.failed_event)

    def meets(self, other: LogCursor) -> bool:
        """Return whether the two cursors can share a page."""
        together = self.reader.table == other.reader.table and self.state == other.state
        return together and not (self.fails or other.fails)

    @contextmanager
    def moving(
        self,
        state: WindowState,
        *,
        handled: int,
        failed_event: dict[str, Any] | None,
        position: int = 0,
    ) -> Iterator[None]:
        """Move the cursor in the transaction of the block's effects; in memory after its commit.

        Raises ``CursorConflict`` if it was moved meanwhile. A failing commit callback is logged.
        """
        row = self.cursor
        using = str(row._state.db)
        columns: dict[str, Any] = {
            "state": state.dump(),
            "position": max(row.position, position),
            "failed_event": failed_event,
        }
        with transaction.atomic(using=using):
            same = Cursor.objects.using(using).filter(pk=row.pk, revision=row.revision)
            rows: Any = self.reader.if_server_unchanged(same)
            if not rows.move(**columns, handled=F("handled") + handled, moved_at=DatabaseNow()):
                raise CursorConflict(
                    f"The cursor {row} was moved by another process; this page is dropped."
                )
            failpoint("advanced")
            yield
            after = keep_callbacks_apart(using, of=f"the handler of {row.subscription!r}")
        self.state, self.passed, self.unstored = state, None, None
        row.revision += 1
        for name, value in {**columns, **Cursor.WELL}.items():
            setattr(row, name, value)
        raise_what_ends_process(after.limits)


def reader_of(cursor: Cursor, *, using: str) -> LogReader:
    """Return a reader of the cursor's log, of the kind that its state belongs to."""
    return LogReader(log_named(cursor.log), using=using, by_time=reads_by_time(cursor.state))


def begin(subscriber: Subscriber, reader: LogReader) -> None:
    """Create the cursors of a subscription that has never read a log, at its starting place."""
    state = reader.window.start(0 if subscriber.start == "beginning" else None).dump()
    name, count, using = subscriber.name, subscriber.partitions, subscriber.using
    with transaction.atomic(using=using):
        # All partitions begin at one place, so that each slice is read by exactly one of them.
        row = Subscription.objects.using(using).select_for_update().get(pk=name)
        if row.partitions != count:
            raise PartitionsDiffer.between(name, row.partitions, count)
        rows = [
            Cursor(subscription=name, partition=n, partitions=count, log=reader.table, state=state)
            for n in range(count)
        ]
        Cursor.objects.using(using).bulk_create(rows, ignore_conflicts=True)


def fail(cursor: Cursor, error: BaseException, *, handled: int = 0, using: str) -> float:
    """Record why a cursor stays where it was before the page, which had ``handled`` events.

    Returns the seconds after which to try again. If the handler has ended the page's transaction,
    and so committed the cursor's move, the cursor is put back and stops until a person decides: the
    effects may be there in part.
    """
    cursor.failures += 1
    rows = Cursor.objects.using(using).filter(pk=cursor.pk)
    columns: dict[str, Any] = {"failures": cursor.failures, "failed_event": cursor.failed_event}
    moved = rows.filter(revision=cursor.revision + 1)
    if isinstance(error, TransactionEnded) and moved.exists():
        error.add_note(
            "Some effects of these events may be committed. The events are not handled again until "
            f"manage.py outbox_subscriptions resume {cursor.subscription} is run."
        )
        columns["error"] = cursor.error = replaced(error_text(error), using=rows.db)
        at = {"state": cursor.state, "position": cursor.position}
        moved.move(**columns, **at, handled=F("handled") - handled)
        return float("inf")
    delay: float = min(event_settings().MAX_RETRY_DELAY, 0.1 * 2 ** min(cursor.failures, 20))
    cursor.error = replaced(error_text(error), using=rows.db)
    retry_at = DatabaseNow() + timedelta(seconds=delay)
    rows.filter(revision=cursor.revision).update(**columns, error=cursor.error, retry_at=retry_at)
    return delay


class StoredRows:
    """The rows that partitions begin from; each kind is read when needed, by one statement for all.

    They are read in the order that one partition needs: the cursors of a log, their locks, at last
    the parked streams. A process that writes one of these in between moves the cursor, too, so a
    page that was handled without the change is dropped. A state that several partitions share is
    verified once; if it is refused, it is refused to each.
    """

    def __init__(self, subscriber: Subscriber, parts: Collection[int]) -> None:
        self.subscriber = subscriber
        self.parts = parts
        self.using = subscriber.using
        #: Cursors by table and partition.
        self._cursors: dict[str, dict[int, Cursor]] = {}
        #: Ids of locked cursors by table.
        self._locked: dict[str, set[int]] = {}
        self._verified: list[tuple[LogReader, WindowState]] = []

    def cursor(self, part: int, reader: LogReader) -> Cursor:
        """Return the cursor of a partition in a log; it is created if there is none.

        Raises ``Paused`` if the subscription is paused. ``pause`` bumps the revisions in the same
        transaction, so a cursor that was returned before can no longer store a position.
        """
        name, wanted = self.subscriber.name, self.subscriber.partitions
        if reader.table not in self._cursors:
            self._cursors[reader.table] = self._read(reader)
        cursor = self._cursors[reader.table][part]
        if cursor.partitions != wanted:
            raise PartitionsDiffer.between(name, cursor.partitions, wanted)
        return cursor

    def _read(self, reader: LogReader) -> dict[int, Cursor]:
        name = self.subscriber.name
        # One statement: a pause that comes between two statements would be missed.
        paused = Subscription.objects.filter(pk=OuterRef("subscription"), paused=True)
        cursors = (
            Cursor.objects.using(self.using)
            .filter(subscription=name, partition__in=self.parts, log=reader.table)
            .annotate(is_paused=Exists(paused))
        )
        found: list[Any] = list(cursors)
        if len(found) < len(self.parts):
            begin(self.subscriber, reader)
            found = list(cursors.all())
        if any(each.is_paused for each in found):
            raise Paused(f"Subscription {name!r} is paused.")
        return {each.partition: each for each in found}

    def verify(self, reader: LogReader, state: WindowState) -> None:
        for other, verified in self._verified:
            if other.table == reader.table and verified == state:
                reader.adopt_verification(other)
                return
        reader.verify(state)
        self._verified.append((reader, state))

    def is_locked(self, cursor: Cursor) -> bool:
        """Return whether another process has locked the cursor, because it handles a page.

        To store a position would wait for that page, and keep the other subscriptions waiting. One
        statement finds the free cursors of all partitions.
        """
        if not connections[self.using].features.has_select_for_update_skip_locked:
            return False
        if cursor.log not in self._locked:
            keys = {each.pk for each in self._cursors[cursor.log].values()}
            rows = Cursor.objects.using(self.using).filter(pk__in=keys)
            with transaction.atomic(using=self.using):
                free = rows.select_for_update(skip_locked=True).values_list("pk", flat=True)
                self._locked[cursor.log] = keys.difference(free)
        return cursor.pk in self._locked[cursor.log]

    @cached_property
    def parked(self) -> list[tuple[int, str, str, int]]:
        logs = [log._meta.db_table for log in self.subscriber.logs]
        rows = ParkedStream.objects.using(self.using).filter(
            subscription=self.subscriber.name, partition__in=self.parts, log__in=logs
        )
        return list(rows.values_list("partition", "log", "stream", "version"))

    @cached_property
    def id_gaps(self) -> list[Gap]:
        if connections[self.using].vendor != "mysql":
            return []
        rows = Gap.objects.using(self.using).open()
        rows = rows.filter(kind=Gap.Kind.ID, subscription=self.subscriber.name)
        return list(rows.order_by("first"))


def is_stopped(cursor: Cursor) -> bool:
    """Return whether a cursor was put back, and waits until its subscription is resumed."""
    return cursor.retry_at is None and cursor.error.startswith(TransactionEnded.__name__)


def evidence(event: RecordedEvent, error: BaseException, *, using: str) -> dict[str, Any]:
    """Return the ``failed_event`` of a cursor or parked stream: what it keeps of the event."""
    text = replaced(storable("".join(traceback.format_exception(error))), using=using)
    return {
        "position": event.id,
        "version": event.version,
        "type": event.type,
        "stream": event.stream,
        "traceback": text[-TRACEBACK:],
    }


class SharedPage(NamedTuple):
    table: str
    #: The state that the page was read from.
    state: WindowState
    page: Page[Any]
    #: Rows by partition. A partition that reads the page takes its rows out.
    rows: dict[int, list[tuple[Any, ...]]]


class SharedPages:
    """Pages of the rows of several partitions, for one turn: nothing indexes the slices of a log.

    The partitions of a process that are at the same state share a page, and go to the state after
    it. Each stores it with its own effects; one without rows in the page moves in memory only, once
    another has stored the state. A partition at another state, as after a failure, reads alone.
    """

    def __init__(self, partitions: Mapping[int, Partition]) -> None:
        self.partitions = partitions
        self._pages: list[SharedPage] = []
        #: How many rows to read for the next page, by table.
        self._limits: dict[str, int] = {}

    def begin_turn(self) -> None:
        """Drop the last pages, and move partitions over pages without events of their own."""
        self._pages = []
        cursors = [at for each in self.partitions.values() for at in each.cursors]
        stored = {(at.reader.table, at.cursor.state) for at in cursors}
        for at in cursors:
            if at.passed and (at.reader.table, at.passed.dump()) in stored:
                at.state = at.passed
            at.passed = None

    def read(self, partition: Partition, at: LogCursor, limit: int) -> Events | None:
        """Return a partition's events of a shared page; None: it has to read alone."""
        part = partition.part
        if at.fails or limit < partition.batch_size:
            return None
        for shared in self._pages:
            if shared.table == at.reader.table and shared.state == at.state and part in shared.rows:
                break
        else:
            parts = [n for n, each in self.partitions.items() if any(map(at.meets, each.cursors))]
            if len(parts) < 2:
                return None
            shared = self._read(at, parts, limit)
            self._pages.append(shared)
        return Events(at.reader.records(shared.rows.pop(part)), shared.page)

    def _read(self, at: LogCursor, parts: list[int], limit: int) -> SharedPage:
        """Read a page in which no partition has more than ``limit`` rows.

        The rows after a full page are added at once, as long as the partitions have room for them
        and they are small: each partition then stores its position once for all of them.
        """
        reader = at.reader
        only = replace(reader.only, part=tuple(parts))
        most = min(max(limit, self._limits.get(reader.table, 0)), max(limit, MAX_ROWS))
        while True:
            page, rows = _split(reader, at.state, most, only, parts)
            longest = max(map(len, rows.values()))
            if longest <= limit or most <= limit:
                break
            most = max(limit, most * limit * 9 // (longest * 10))
        size, full = _size(page), len(page.rows) >= most
        while full and longest <= limit:
            count = len(page.rows)
            wanted = min(
                3 * count,
                count * (limit - longest) * 9 // (max(longest, 1) * 10),
                count * max(0, MAX_SIZE - size) // max(size, 1),
                max(limit, MAX_ROWS) - count,
            )
            if wanted <= count // 4:
                break
            following, found = _split(reader, page.state, wanted, only, parts)
            if not following.rows or any(len(rows[n]) + len(found[n]) > limit for n in parts):
                break  # these rows begin the next page
            for n in parts:
                rows[n] += found[n]
            full = len(following.rows) >= wanted
            page = replace(
                following,
                rows=page.rows + following.rows,
                position=max(page.position, following.position),
            )
            size += _size(following)
            longest = max(map(len, rows.values()))
        if size > MAX_SIZE:
            most = len(page.rows) // 2
        elif full:
            # At most four times as many rows: so the first large events do not fill the memory.
            most = len(page.rows) * limit * 9 // (max(longest, limit // 4, 1) * 10)
        self._limits[reader.table] = most
        page = replace(page, rows=page.rows[:1])  # whether there are any: partitions take them
        return SharedPage(reader.table, at.state, page, rows)


def _split(
    reader: LogReader, state: WindowState, limit: int, only: EventFilter, parts: list[int]
) -> tuple[Page[Any], dict[int, list[tuple[Any, ...]]]]:
    """Return a page of some partitions, and its rows by partition."""
    page = reader.page(state, limit, only=only, columns=(*reader.columns, "slice"))
    rows: dict[int, list[tuple[Any, ...]]] = {n: [] for n in parts}
    for row in page.rows:
        rows[row[-1] % only.parts].append(row)
    return page, rows


def _size(page: Page[Any]) -> int:
    return sum(len(row[_DATA]) + len(row[_METADATA]) for row in page.rows)
