"""Rebuilding a projection from the log, beside the live table: ``manage.py outbox_rebuild``.

The log is replayed into a shadow table, while the live table is read and its subscription runs. The
takeover is one transaction: it reads the events that have come meanwhile, replaces the old rows
with the new rows, and sets the subscription's cursors to their state. Readers see the old rows
until it commits, then the new rows; no event is missed or applied twice. Rows are copied and no
table is renamed: on MySQL a RENAME commits by itself, and indexes, constraints, grants and foreign
keys keep their names. A killed rebuild leaves only a shadow table, which the next one removes. A
projection that cannot be rebuilt is refused before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import django.db
from django.db import connections, models, transaction
from django.db.models import Exists, OuterRef

from ...database.lock_wait import atomic_with_lock_wait, is_conflict
from ...database.transaction_guard import guarded
from ...failpoints import failpoint
from ...process.preflight import require_migrated
from ...text import Write, error_text, get_logger, one_line
from ..conf import event_settings
from ..exceptions import RebuildFailed, RebuildRefused, TooManyGaps
from ..log.filter import EventFilter
from ..log.reader import LogReader
from ..log.state import WindowState, is_whole_window
from ..models import Cursor, Gap, ParkedStream, StreamHead, Subscription
from ..subscriptions.cursors import begin
from ..subscriptions.repartition import lock_cursors
from ..subscriptions.subscriber import subscriber_named
from .projection import Projection
from .rows import PendingEvent, ProjectionTable
from .shadow_table import shadow_table

logger = get_logger("outbox_app.events.subscriptions")

#: Seconds that the takeover waits for a lock, while others wait for its locks.
LOCK_WAIT = 2
#: How often the takeover is tried.
ATTEMPTS = 10
#: Seconds between two looks at a log in which too many gaps are open.
GAPS_PAUSE = 0.5
#: Events between two progress lines.
PROGRESS_EVENTS = 50_000


def rebuild(name: str, *, write: Write = logger.info) -> int:
    """Rebuild the projection ``name`` from the log; return how many rows it has now.

    Raises ``RebuildRefused``, or ``RebuildFailed`` for any other error: the live rows and the
    subscription are unchanged, unless the COMMIT has worked and only its reply was lost.
    """
    projection = rebuildable(name)
    using = projection.subscriber.using
    require_whole(projection)
    with failing_as_one(name), shadow_table(projection.model, using=using) as shadow:
        return Rebuild(projection, shadow, write=write).run()


def rebuildable(name: str) -> Projection:
    """Return a projection whose rows can be replaced. Raises ``RebuildRefused``."""
    declared = subscriber_named(name)
    using = declared.using
    projection: Any = declared.handle
    if not isinstance(projection, Projection):
        raise RebuildRefused(
            f"Subscription {name!r} is not a projection: {declared.handle!r} handles its events, "
            "and its rows are not known. Replay it: manage.py outbox_subscriptions replay."
        )
    model = projection.model
    relations: Any = model._meta.get_fields(include_hidden=True)  # related_name="+", too
    far = (each for each in relations if each.auto_created and not each.concrete)
    if pointing := {each.related_model._meta.label for each in far}:
        raise RebuildRefused(
            f"{', '.join(sorted(pointing))} points at {model._meta.label} with a foreign key, so "
            "the rows of the view cannot be deleted and inserted again. Point at the objects that "
            "the rows describe, or store the key in a plain column."
        )
    require_migrated(using, Subscription)
    return projection


def require_whole(projection: Projection) -> None:
    """Raise ``RebuildRefused`` if version 1 of a stream was pruned, which its head outlives."""
    using = projection.subscriber.using
    for log in projection.subscriber.logs:
        table = log._meta.db_table
        first = log._base_manager.using(using).filter(stream=OuterRef("stream"), version=1)
        heads = StreamHead.objects.using(using).filter(~Exists(first), log=table)
        stream = heads.values_list("stream", flat=True).first()
        if stream is not None:
            raise RebuildRefused(
                f"{table} has no version 1 of {stream!r} any more: events were pruned. The view "
                "has applied them, but a rebuild could not. If they are archived, run manage.py "
                "outbox_pipeline rebuild --archive DIR. Otherwise keep the view as it is."
            )


@contextmanager
def failing_as_one(
    name: str, *, describe: Callable[[BaseException], str] | None = None
) -> Iterator[None]:
    """Wrap any error of a rebuild, except ``RebuildRefused``, in ``RebuildFailed``."""
    try:
        yield
    except RebuildRefused:
        raise
    except Exception as error:
        text = describe(error) if describe else f"{type(error).__name__}: {error}"
        raise RebuildFailed(
            f"The rebuild of {name!r} failed with {text}. The view and its subscription are "
            "unchanged, unless only the reply to its COMMIT was lost. Run the rebuild again."
        ) from error


class Rebuild:
    """One rebuild: ``fill`` makes the new rows, ``finish`` replaces the old rows with them."""

    def __init__(self, projection: Projection, shadow: type[models.Model], *, write: Write) -> None:
        self.projection, self.subscriber = projection, projection.subscriber
        self.name = projection.name
        self.live = projection.model
        self.shadow = shadow
        self.using = self.subscriber.using
        self.write = write
        self.view = ProjectionTable(projection, using=self.using, table=shadow)
        self.limit = projection.batch_size or event_settings().PAGE_SIZE
        self.replayed = 0
        only = EventFilter(self.subscriber.topics, self.subscriber.types)
        logs = self.subscriber.logs
        self.readers = [LogReader(log, using=self.using, only=only) for log in logs]
        #: The highest replayed position of each log.
        self.positions = [0] * len(logs)
        # This thread's own connection reads the log: the takeover's transaction may not read it.
        self.thread = ThreadPoolExecutor(1, "rebuild")

    def run(self) -> int:
        """Make the new rows, and take over. Return the number of rows."""
        try:
            self.ask(self._make_cursors)
            self.write(f"rebuild started name={self.name} table={self.live._meta.db_table}")
            return self.finish(self.fill())
        finally:
            self.ask(self._close)
            self.thread.shutdown()

    def fill(self) -> list[WindowState]:
        """Make the new rows; return the states of the logs that they have applied."""
        states = self.replay([self.ask(reader.window.start, 0) for reader in self.readers])
        # The log may have been pruned meanwhile. Events read from here on are too new to be pruned.
        self.ask(require_whole, self.projection)
        return states

    def finish(self, states: list[WindowState]) -> int:
        """Take over; again after a lock timeout, a deadlock or new gaps. Return how many rows."""
        for attempt in range(1, ATTEMPTS + 1):
            replayed = self.replayed
            try:
                rows = self._take_over(states)
                break
            except (django.db.OperationalError, TooManyGaps) as error:
                # After any other error the COMMIT may have worked: the shadow has the events then.
                passes = is_conflict(error) or isinstance(error, TooManyGaps)
                if attempt == ATTEMPTS or not passes:
                    raise
                self.replayed = replayed
                why = one_line(error_text(error), 1000)
                self.write(f'takeover tried again name={self.name} error="{why}"')
                states = self.replay(states)
        self.write(f"rebuild done name={self.name} events={self.replayed} rows={rows}")
        return rows

    def _make_cursors(self) -> None:
        Subscription.objects.using(self.using).get_or_create(
            name=self.name, defaults={"partitions": self.subscriber.partitions}
        )
        begun = Cursor.objects.using(self.using).filter(subscription=self.name)
        for reader in self.readers:
            if not begun.filter(log=reader.table).exists():
                begin(self.subscriber, reader)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread that reads the log."""
        return self.thread.submit(function, *arguments).result()

    def replay(self, states: list[WindowState]) -> list[WindowState]:
        """Apply the events after these states; return the states at the end of the logs."""
        states = list(states)
        for index, reader in enumerate(self.readers):
            more = True
            while more:
                before = states[index]
                found, page = self._read(reader, before)
                what = f"The projection {self.name!r}"
                with transaction.atomic(using=self.using), guarded(what, using=self.using):
                    self.view.apply([PendingEvent(event) for event in found])
                failpoint("rebuild_page")
                states[index] = page.state
                more = page.more and not is_whole_window(before, page.state)
                self.positions[index] = max(self.positions[index], page.position)
                count, self.replayed = self.replayed, self.replayed + len(found)
                if count // PROGRESS_EVENTS < self.replayed // PROGRESS_EVENTS:
                    self.write(f"replaying name={self.name} events={self.replayed}")
        return states

    def _read(self, reader: LogReader, state: WindowState) -> Any:
        """Read a page. With too many gaps wait, as a subscription does, but not with locks."""
        while True:
            try:
                return self.ask(reader.read, state, self.limit)
            except TooManyGaps:
                if connections[self.using].in_atomic_block:
                    raise
                time.sleep(GAPS_PAUSE)

    def _take_over(self, states: list[WindowState]) -> int:
        using = self.using
        cursors = Cursor.objects.using(using).filter(subscription=self.name)
        vendor = connections[using].vendor
        # With a snapshot from before the lock, the DELETE would not empty the table.
        with atomic_with_lock_wait(LOCK_WAIT, using=using, read_committed=vendor == "postgresql"):
            if vendor == "mysql":  # gaps are locked, too: no row is inserted behind the DELETE
                with connections[using].cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            # Otherwise a repartition could replace the cursors while they are locked one by one.
            Subscription.objects.using(using).select_for_update().get(pk=self.name)
            # Lock the cursors first, as the pull does: either this waits for a page in flight, or
            # that page finds its cursor moved. Then lock the table: pushes wait, so
            # the log that is read now has all events that the old rows have applied.
            own = lock_cursors(self.name, using=using)
            for each in own:
                cursors.filter(pk=each.pk).bump_revision()
            self._lock_and_empty()
            ends = self.replay(states)
            rows = self._copy()
            failpoint("rebuild_copied")
            for reader, end, position in zip(self.readers, ends, self.positions, strict=True):
                values = {"state": end.dump(), "position": position}
                for each in own:  # by key: else MySQL locks others' cursors, too
                    if each.log == reader.table:
                        cursors.filter(pk=each.pk).move(counted=None, failed_event=None, **values)
            ParkedStream.objects.using(using).filter(subscription=self.name).delete()
            gaps = Gap.objects.using(using).filter(subscription=self.name)
            gaps.filter(kind=Gap.Kind.VERSION).settle(
                Gap.State.CLOSED, reason="The view was rebuilt without these versions."
            )
        return rows

    def _lock_and_empty(self) -> None:
        connection = connections[self.using]
        live = connection.ops.quote_name(self.live._meta.db_table)
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                # A weaker lock lets a SELECT … FOR UPDATE begin, which waits for a row that is then
                # gone, and does not see the row that replaces it. Plain reads are not blocked.
                cursor.execute(f"LOCK TABLE {live} IN EXCLUSIVE MODE")
            cursor.execute(f"DELETE FROM {live}")

    def _copy(self) -> int:
        connection = connections[self.using]
        quote = connection.ops.quote_name
        fields = [f for f in self.live._meta.concrete_fields if not f.generated]
        columns = ", ".join(quote(str(field.column)) for field in fields)
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {quote(self.live._meta.db_table)} ({columns}) "
                f"SELECT {columns} FROM {quote(self.shadow._meta.db_table)}"
            )
            return int(cursor.rowcount)

    def _close(self) -> None:
        for reader in self.readers:
            reader.close()
        connections[self.using].close()
