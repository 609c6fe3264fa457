"""One partition of a subscription: reads a page, and commits its effects with the cursor.

::

    read a page (autocommit) -> begin -> store the position -> handle -> commit -> next

A crash anywhere leaves the cursor and the effects where they were, together. A handler that raises
stops the partition: its error stays on the cursor's row and the page is tried again, with back-off.
After the second failure of a page, the event at fault is searched for (``subscriptions.handling``).
With ``on_error="park"`` the third attempt goes event by event, and parks the streams at fault. If
the error comes at COMMIT, the event is searched for, and is parked once it is alone in its page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from django.db import close_old_connections, connections
from django.dispatch import Signal

from ...database.transaction_guard import LOST, is_lost
from ...exceptions import LeaseLost, TransactionEnded
from ...failpoints import failpoint
from ...process import backoff
from ...text import error_text
from ..conf import event_settings
from ..exceptions import ReadRefused, UnsafeLog
from ..log.record import RecordedEvent
from ..log.window import Page
from ..models import Cursor, ParkedStream
from ..signals import page_failed, page_handled
from .cursors import (
    CursorConflict,
    LogCursor,
    SharedPages,
    StoredRows,
    evidence,
    fail,
    is_stopped,
)
from .handling import HandlingResult, call_handler, decided, joined, narrowed, raising
from .id_gaps import IdGaps
from .parking import Parking, is_of_event
from .subscriber import Handler, Subscriber
from .version_gaps import VersionGaps

#: Seconds after which a cursor is written although its pages were empty.
STORE_SECONDS = 5.0
#: Which attempt at a page parks failing streams, with ``on_error="park"``.
PARK_AFTER = 3
#: Seconds for which a page that another process handles is left alone.
LOCKED_SECONDS = 1.0
#: What names an event that is skipped: a log that was set back gives its positions out again.
_key = itemgetter("position", "stream", "version")


@dataclass(eq=False)
class Partition:
    subscriber: Subscriber
    part: int
    _: KW_ONLY
    #: 0: as the subscriber declares it, or the settings.
    batch_size: int = 0
    clock: Callable[[], float] = time.monotonic
    shared: SharedPages | None = None
    is_stopping: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        subscriber, part = self.subscriber, self.part
        self.using = subscriber.using
        self.batch_size = self.batch_size or subscriber.batch_size or event_settings().PAGE_SIZE
        self.handled = self._failed = 0
        self._handle = partial(call_handler, subscriber, using=self.using)
        self.error = ""
        self.parking = Parking(subscriber, part, using=self.using)
        self.gaps = VersionGaps(self.parking, clock=self.clock)
        self._id_gaps = IdGaps(subscriber, part, clock=self.clock)
        #: Its cursors; empty while the partition rests after a failure.
        self.cursors: list[LogCursor] = []
        #: The driver's connection that the cursors were read on.
        self._connection: Any = None
        #: When the cursor of each log, by table, was stored: it may be read again in between.
        self._stored_at: dict[str, float] = {}
        only = subscriber.only(part)
        self._readers = [subscriber.reader(e, using=self.using, only=only) for e in subscriber.logs]
        self._rest_until = float("-inf")

    @property
    def failed(self) -> int:
        """How many attempts have failed so far: at a page, at a parked stream, at an event."""
        return self._failed + self.parking.failed

    @property
    def resting(self) -> float:
        """Seconds for which the partition still rests after a failure."""
        return max(0.0, self._rest_until - self.clock())

    @property
    def pause(self) -> float | None:
        """Seconds after which it has to run again; None: only when there are new events."""
        return self.resting or (self.gaps.pause if self._holds else None)

    @property
    def revisions(self) -> dict[int, int]:
        """The revisions of the cursors that it holds, by their ids."""
        return {each.cursor.pk: each.cursor.revision for each in self.cursors}

    @property
    def _holds(self) -> bool:
        """Whether streams may be held back. Otherwise no page enters gaps or parking."""
        return self.gaps.active or bool(self.parking.parked)

    @property
    def unprepared(self) -> bool:
        """Whether it has no cursors yet, and does not rest."""
        return not (self.cursors or self.resting)

    def run_once(self) -> bool:
        """Handle a page of each log. Returns whether there may be more to handle right away."""
        if self._connection is not connections[self.using].connection:
            # The server may have crashed. If it had not flushed its last commits, it has lost the
            # stored state that this partition has moved to in memory (``SharedPages``).
            self.cursors = []
        if self.unprepared:
            self.take_cursors(StoredRows(self.subscriber, [self.part]))
        if self.resting:
            return False
        try:
            more = self._holds and self._process_due()
            for at in list(self.cursors):
                if self.resting or self.is_stopping():
                    return False
                more |= self._process_page(at)
                self._id_gaps.look(at.reader, at.state)
        except BaseException as error:
            # The cursors in memory may have been rolled back: begin from the rows.
            self.cursors = []
            if isinstance(error, CursorConflict):
                return True
            raise
        return more or (self._holds and self.gaps.pause == 0)

    def store(self) -> None:
        """Store the places after empty pages, at the end of a run.

        A run may be shorter than ``STORE_SECONDS``. The next ones would read these rows again and
        again, and the log could not be pruned.
        """
        if self._connection is not connections[self.using].connection:
            return
        for at in self.cursors:
            page = at.unstored
            if page and page.state.dump() != at.cursor.state:
                moving = at.moving(page.state, handled=0, failed_event=None, position=page.position)
                with suppress(CursorConflict), moving:
                    pass

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def take_cursors(self, rows: StoredRows) -> None:
        """Take the cursors from stored rows, and check that they belong to this database."""
        found = []
        for reader in self._readers:
            try:
                cursor = rows.cursor(self.part, reader)
            except ReadRefused as error:  # there is no row yet to write the error to
                self.error = error_text(error)
                self._rest_until = self.clock() + backoff.MAX_BACKOFF
                return
            if is_stopped(cursor):
                self.error, self._rest_until = cursor.error, float("inf")
                return
            try:
                state = reader.load(cursor.state)
                cursor.recall()
                rows.verify(reader, state)
            except LOST:
                raise  # not the handler's fault: the runner backs off
            except Exception as error:
                self._fail(cursor, error)
                return
            if rows.is_locked(cursor):
                self.error = "The process that had this partition before still handles a page."
                self._rest_until = self.clock() + LOCKED_SECONDS
                return
            found.append(LogCursor(reader, cursor, state))
            self._stored_at.setdefault(reader.table, self.clock())
        if rows.parked or self.parking.parked:
            self.parking.load(rows.parked)
        if self._holds:
            self.gaps.load()
        self._id_gaps.load(rows.id_gaps)
        self.cursors = found
        self._connection = connections[self.using].connection
        # An error from before the cursors were read is over; an error on their rows is not.
        self.error = next((each.cursor.error for each in found if each.cursor.error), "")

    def _load_parked(self) -> None:
        """Read again what a rolled-back transaction may have changed in memory."""
        self.parking.load(StoredRows(self.subscriber, [self.part]).parked)
        self.gaps.load()

    def _process_page(self, at: LogCursor) -> bool:
        cursor, parks = at.cursor, self.subscriber.on_error == "park"
        failures = cursor.failures
        parking = parks and failures + 1 >= PARK_AFTER
        tried = self._try_page(at, 1 if cursor.failed_event else self.batch_size, parking)
        # Parking finds the events at fault by itself. For other errors, as at COMMIT, search.
        if tried.error is not None and tried.rows > 1 and failures and (parking or not parks):

            def attempt(limit: int) -> HandlingResult:
                self._load_parked()
                return self._try_page(at, limit, parking)

            tried = narrowed(tried, attempt)
        if tried.error is None:
            return tried.more
        cursor.failures = failures  # the halves that succeeded do not shorten the back-off
        if tried.rows:
            alone = tried.events[:1] if tried.rows == 1 else []
            found = [evidence(event, tried.error, using=self.using) for event in alone]
            # Keep what a person has decided about other events.
            cursor.failed_event = joined([*found, *decided(cursor.failed_event)])
        self._fail(cursor, tried.error, handled=len(tried.events))
        return False

    def _try_page(self, at: LogCursor, limit: int, parks: bool) -> HandlingResult:
        """Handle a page of at most ``limit`` rows. An error is returned, not raised."""
        try:
            shared = self.shared and self.shared.read(self, at, limit)
            read, page = shared or at.reader.read(at.state, limit)
            failpoint("page_read")
            holds = self._holds
            complete, missing = self.gaps.check(at.reader, at.state, read) if holds else (read, [])
        except LOST:
            raise
        except Exception as error:  # reading was refused, or a row was edited by hand
            return HandlingResult(error=error)
        events, kept = self.gaps.wanted(complete) if self._holds else complete, None
        if skips := {_key(each): each for each in decided(at.cursor.failed_event)}:
            here = {(event.id, event.stream, event.version): event for event in events}
            if page.more:  # the events may come after this page, if others committed late
                kept = joined([each for key, each in skips.items() if key not in here])
            events = [event for key, event in here.items() if key not in skips]
        seen = read if self.gaps.active else events
        # If a partition's rows are all of parked streams, it stores a full page. Otherwise every
        # partition would read that page for ever.
        beside = shared and page.rows and not read
        if not seen and (not page.more or beside) and not self._is_stale(at, page):
            if shared and page.rows:
                at.passed = page.state
            at.unstored = page
            # Do not move the state in memory, either. After a crash, the server may give out again
            # the ids of transactions that left nothing on disk. A snapshot is safe only once a
            # later transaction, the one that stores it in the cursor, is on disk.
            return HandlingResult(more=page.more)

        def commit(handle: Handler) -> list[RecordedEvent]:
            handled = events
            with at.moving(
                page.state, handled=len(events), position=page.position, failed_event=kept
            ):
                if parks:
                    handled = self.parking.handle_each(events, handle, at.cursor)
                elif events:
                    handle(events)
                if self._holds:
                    self.gaps.record(at.reader, at.state, complete, missing)
            return handled

        started = self.clock()
        try:
            try:
                events = commit(self._handle)
            except Exception as error:
                if not (parks and events and len(read) == 1 and is_of_event(error)):
                    raise
                # No transaction was left to park in, as after a COMMIT that failed. Alone in its
                # page, the event is at fault. It is parked in a transaction without its effects.
                self._load_parked()
                events = commit(raising(error))
        except LeaseLost:
            raise
        except Exception as error:
            if events:
                first, last = events[0], events[-1]
                error.add_note(f"Handling {first.log} from position {first.id} to {last.id}.")
            return HandlingResult(len(read), False, error, events)
        failpoint("committed")
        self._stored_at[at.reader.table] = now = self.clock()
        self.handled += len(events)
        self.error = ""
        if events:
            seconds = now - started
            self._send(page_handled, at.reader.table, count=len(events), seconds=seconds)
        return HandlingResult(len(read), page.more)

    def _is_stale(self, at: LogCursor, page: Page[Any]) -> bool:
        """Return whether the cursor's row is so old that even an empty page is stored."""
        age = self.clock() - self._stored_at[at.reader.table]
        return at.fails or (page.state.dump() != at.cursor.state and age > STORE_SECONDS)

    def _process_due(self) -> bool:
        """Handle events of released and held streams, up to where the cursor stands."""
        more = False
        for at in list(self.cursors):
            for parked in self.gaps.due(at.reader.table):
                if self.resting or self.is_stopping():
                    return False
                more |= self._process_held(at, parked)
        return more

    def _process_held(self, at: LogCursor, parked: ParkedStream, limit: int | None = None) -> bool:
        try:
            events, missing, more = self.gaps.next_events(
                at.reader, at.state, parked, limit or self.batch_size
            )
        except LOST:
            raise
        except Exception as error:  # a row was edited by hand
            return self._repark(at, parked, error, [])
        if missing and not events:
            self.gaps.wait(parked, missing)
            return False
        wanted = self.gaps.wanted(events)
        try:
            # Keep a person's decision about a failing event: the cursor has not passed it yet.
            with at.moving(at.state, handled=len(wanted), failed_event=at.cursor.failed_event):
                if wanted:
                    self._handle(wanted)
                self.parking.progress(parked, events, more=more, waits=bool(missing))
                self.gaps.filled(parked, at.state, events, missing)
        except LeaseLost:
            raise
        except TransactionEnded as error:
            error.add_note(
                f"Handling version {parked.version} and later of {parked.stream!r:.100}."
            )
            self._fail(at.cursor, error, handled=len(wanted))
            return False
        except Exception as error:
            if len(events) > 1 and limit != 1:  # find the event; those before it are handled
                self._load_parked()
                parked.refresh_from_db(using=self.using)
                return self._process_held(at, parked, len(events) // 2)
            return self._repark(at, parked, error, wanted)
        failpoint("committed")
        self.handled, self.error = self.handled + len(wanted), ""
        return True

    def _repark(
        self, at: LogCursor, parked: ParkedStream, error: Exception, events: list[RecordedEvent]
    ) -> bool:
        self.cursors = []  # the state in memory was rolled back
        stops = self.subscriber.on_error == "stop" or is_lost(error)
        if stops and self.gaps.open_of(parked).exists():
            self._fail(at.cursor, error)
            return False
        self._failed += 1
        self.gaps.failed(parked)
        self.parking.repark(parked, error, events)
        return True

    def _fail(self, cursor: Cursor, error: Exception, *, handled: int = 0) -> None:
        self._failed += 1
        delay = fail(cursor, error, handled=handled, using=self.using)
        self.error = cursor.error
        # Close the handler's connections, too: Django closes old ones at the end of a request only.
        close_old_connections()
        if isinstance(error, UnsafeLog):  # the server may be a primary no more: connect anew
            connections[self.using].close()
        self._rest_until = self.clock() + delay
        self.cursors = []
        self._send(page_failed, cursor.log, error=error, failures=cursor.failures)

    def _send(self, signal: Signal, log: str, **facts: Any) -> None:
        facts |= {"subscription": self.subscriber.name, "partition": self.part, "log": log}
        signal.send_robust(Partition, using=self.using, **facts)
