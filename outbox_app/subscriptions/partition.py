"""One partition of a subscription: reads a page, and commits its effects with the cursor.

::

    read a page (autocommit) -> begin -> advance the cursor -> handle -> commit -> next

A crash anywhere leaves the cursor and the effects where they were, together. A handler that raises
stops the partition: its error stays on the cursor's row and the page is tried again, with back-off.
The second failure of a page looks for the event (``subscriptions.isolation``). With
``on_error="park"`` the third attempt goes event by event, and sets the streams at fault aside. A
page may be checked for missing versions first (``subscriptions.version_gaps``).
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable

import django.db
from django.db import close_old_connections, connections, transaction

from ..conf import outbox_settings
from ..enclosure import SwallowedError, enclosed
from ..eventlog.reader import LogReader
from ..eventlog.record import RecordedEvent
from ..eventlog.state import WindowState
from ..exceptions import LeaseLost, OutboxError, ReadRefused, TransactionEnded
from ..failpoints import failpoint
from ..models import Cursor, ParkedStream
from ..process.backoff import described
from ..signals import page_failed, page_handled
from .cursors import Overtaken, advance, advanced, cursor_of, fail, is_in_hand, is_stopped
from .id_gaps import IdGaps
from .isolation import Attempt, Feed, Found, evidence, narrowed
from .parking import Parking
from .subscriber import Subscriber
from .version_gaps import Gaps

#: Seconds after which a cursor that has moved past nothing is written nevertheless.
STORE_SECONDS = 5.0
#: The attempt at a page that parks its streams, with ``on_error="park"``.
PARK_AFTER = 3
#: Seconds for which a page in the hands of another process is left alone.
IN_HAND_SECONDS = 1.0
#: Nobody's fault but the database's: the runner rests, and nothing is written down.
AWAY = (django.db.OperationalError, django.db.InterfaceError)


class EndedByHandler(OutboxError):
    """A handler asked for the end of the process, in which other subscriptions run."""


class Partition:
    """One partition of a subscription, in the hands of this process.

    Args:
        subscriber: The subscription.
        part: Which partition.
        batch_size: Events of a page. Default: the subscription's, or the setting PAGE_SIZE.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        part: int,
        *,
        batch_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.subscriber = subscriber
        self.part = part
        self.using = subscriber.using
        self.batch_size = batch_size or subscriber.batch_size or outbox_settings().PAGE_SIZE
        self.clock = clock
        self.handled = 0
        self._failed = 0
        self.error = ""
        self.parking = Parking(subscriber, part, using=self.using)
        self.gaps = Gaps(subscriber, part, self.parking, clock=clock)
        self._id_gaps = IdGaps(subscriber, part, using=self.using, clock=clock)
        self._feeds: list[Feed] = []
        self._readers = [
            LogReader(
                log,
                using=subscriber.read_from or self.using,
                only=subscriber.read(part),
                by_time=subscriber.by_time,
            )
            for log in subscriber.logs
        ]
        self._rest_until = float("-inf")

    @property
    def failed(self) -> int:
        """Attempts that failed by now: at a page, at a stream that is set aside, at an event."""
        return self._failed + self.parking.failed

    @property
    def resting(self) -> float:
        """Seconds for which it is left alone after a failure."""
        return max(0.0, self._rest_until - self.clock())

    @property
    def pause(self) -> float | None:
        """Seconds after which it wants a turn by itself; None: it need not have one."""
        return self.resting or self.gaps.pause

    @property
    def revisions(self) -> dict[int, int]:
        """Of the cursors it holds, by id."""
        return {feed.cursor.pk: feed.cursor.revision for feed in self._feeds}

    def turn(self) -> bool:
        """Handle a page of each log. Returns whether there may be more at once."""
        if self.resting:
            return False
        if not self._feeds:
            self._load()
        try:
            more = self._catch_up()
            for feed in list(self._feeds):
                if self.resting:
                    return False
                more |= self._handle_page(feed)
                self._id_gaps.look(feed.reader, feed.state)
        except BaseException as error:
            # What was noted in memory may have been rolled back: begin from the rows.
            self._feeds = []
            if isinstance(error, Overtaken):
                return True
            raise
        return more or self.gaps.pause == 0

    def close(self) -> None:
        """Close what it holds."""
        for reader in self._readers:
            reader.close()

    def _load(self) -> None:
        """Read the cursors, and see that they belong to this database."""
        feeds = []
        for reader in self._readers:
            try:
                cursor = cursor_of(self.subscriber, self.part, reader)
            except ReadRefused as error:  # it has no row yet to write that on
                self.error = described(error)
                self._rest_until = self.clock() + outbox_settings().MAX_BACKOFF
                return
            if is_stopped(cursor):
                self.error, self._rest_until = cursor.error, float("inf")
                return
            try:
                state = reader.load(cursor.state)
                reader.verify(state)
            except AWAY:
                raise
            except Exception as error:
                self._fail(cursor, error)
                return
            if is_in_hand(cursor, using=self.using):
                self.error = "Another process, which has had it before, still handles a page of it."
                self._rest_until = self.clock() + IN_HAND_SECONDS
                return
            feeds.append(Feed(reader, cursor, state, self.clock()))
        self.parking.load()
        self.gaps.load()
        self._id_gaps.load()
        self._feeds = feeds
        # What it stood still for before it had its cursors is over; what is on them is not.
        self.error = next((feed.cursor.error for feed in feeds if feed.cursor.error), "")

    def _handle_page(self, feed: Feed) -> bool:
        cursor, parks = feed.cursor, self.subscriber.on_error == "park"
        failures = cursor.failures
        parking = parks and failures + 1 >= PARK_AFTER
        tried = self._try_page(feed, 1 if cursor.failed_event else self.batch_size, parking)
        # Parking finds events itself; what it does not catch is looked for as elsewhere.
        ended = isinstance(tried.error, TransactionEnded)  # nothing of it is tried again
        if tried.error and not ended and tried.rows > 1 and failures and (parking or not parks):
            tried = narrowed(tried, lambda limit: self._try_again(feed, limit, parking))
        if not tried.error:
            return tried.more
        cursor.failures = failures  # the halves that succeeded do not shorten the back-off
        if tried.rows:
            alone = tried.events[0] if tried.rows == 1 and tried.events else None
            cursor.failed_event = alone and evidence(alone, tried.error)
        self._fail(cursor, tried.error, handled=len(tried.events))
        return False

    def _try_again(self, feed: Feed, limit: int, parks: bool) -> Attempt:
        self._forget_notes()
        return self._try_page(feed, limit, parks)

    def _forget_notes(self) -> None:
        """Read anew what was noted in memory by a transaction that was rolled back."""
        self.parking.load()
        self.gaps.load()

    def _try_page(self, feed: Feed, limit: int, parks: bool) -> Attempt:
        """Handle a page of at most so many rows. What it fails with is returned."""
        try:
            events, page = feed.reader.read(feed.state, limit)
            failpoint("page_read")
            checked = self.gaps.check(feed.reader, feed.state, events)
        except AWAY:
            raise
        except Exception as error:  # refused; or a row that somebody edited into nonsense
            return Attempt(error=error)
        found = Found(self.gaps.wanted(checked.events), page, checked)
        failed = feed.cursor.failed_event
        if failed and failed.get("skip"):  # a person has decided so
            kept = [event for event in found.events if event.id != failed["position"]]
            before = page.more and page.position < failed["position"]  # others committed late
            found = found._replace(events=kept, keeps=failed if before else None)
        seen = events if self.gaps.active else found.events
        if not seen and not page.more and not self._is_stale(feed, page.state):
            # The state is not moved in memory either. A server that crashes may give out again
            # the ids of transactions that wrote nothing down: a snapshot is worth something from
            # the moment on at which a later transaction, the cursor's own, is on disk.
            return Attempt()
        started = self.clock()
        try:
            with transaction.atomic(using=self.using):
                self._advance(feed, found)
                if parks:
                    found = self.parking.handle_each(found, self._handle, feed.cursor)
                elif found.events:
                    self._handle(found.events)
                self.gaps.passed(feed.reader, feed.state, *checked)
        except LeaseLost:
            raise
        except Exception as error:
            if found.events:
                first, last = found.events[0], found.events[-1]
                error.add_note(f"Handling {first.log} from position {first.id} to {last.id}.")
            return Attempt(len(events), False, error, found.events)
        self._moved(feed, found, self.clock() - started)
        return Attempt(len(events), page.more)

    def _advance(self, feed: Feed, found: Found) -> None:
        advance(
            feed.cursor,
            found.page.state,
            handled=len(found.events),
            position=found.page.position,
            failed_event=found.keeps,
            using=self.using,
        )
        failpoint("advanced")

    def _handle(self, events: list[RecordedEvent]) -> None:
        with enclosed(f"The handler of {self.subscriber.name!r}", using=self.using):
            self._call(events)

    def _call(self, events: list[RecordedEvent]) -> None:
        connection = connections[self.using]
        blocks, savepoints = len(connection.atomic_blocks), len(connection.savepoint_ids)
        try:
            self.subscriber.handle(list(events))  # it may take them out
        except BaseException as error:
            if len(connection.savepoint_ids) > savepoints:
                # The error holds a generator inside atomic(), which would leave it later: in the
                # middle of ours.
                traceback.clear_frames(error.__traceback__)
            if isinstance(error, SystemExit | asyncio.CancelledError):
                raise EndedByHandler(
                    f"The handler of {self.subscriber.name!r} raised {error!r}. That ends nothing "
                    "but its page; catch it where it comes from."
                ) from error
            raise
        finally:
            left = len(connection.savepoint_ids) > savepoints
            # Or the end of our transaction would be taken for the end of that block.
            del connection.savepoint_ids[savepoints:], connection.atomic_blocks[blocks:]
        if left:
            raise SwallowedError(
                f"The handler of {self.subscriber.name!r} has entered atomic() and not left it, as "
                "a generator does that is not read to its end. What it did was undone."
            )
        if connection.needs_rollback:
            raise SwallowedError(
                f"The handler of {self.subscriber.name!r} caught an error of the database, which "
                "has undone its transaction. Put the statement that may fail into atomic()."
            )
        failpoint("handled")

    def _moved(self, feed: Feed, found: Found, seconds: float) -> None:
        failpoint("committed")
        feed.state = found.page.state
        advanced(feed.cursor, found.page.state, position=found.page.position)
        feed.cursor.failed_event = found.keeps
        feed.stored_at = self.clock()
        self.handled += len(found.events)
        self.error = ""
        if found.events:
            page_handled.send_robust(
                Partition,
                using=self.using,
                subscription=self.subscriber.name,
                partition=self.part,
                log=feed.reader.table,
                count=len(found.events),
                seconds=seconds,
            )

    def _is_stale(self, feed: Feed, state: WindowState) -> bool:
        """Say whether an empty page is worth a write: the cursor's row has fallen behind."""
        return bool(feed.cursor.failures or feed.cursor.failed_event) or (
            state.dump() != feed.cursor.state and self.clock() - feed.stored_at > STORE_SECONDS
        )

    def _catch_up(self) -> bool:
        """Handle what was released or waited for, up to where the cursor stands."""
        more = False
        for feed in list(self._feeds):
            for parked in self.gaps.due(feed.reader.table):
                if self.resting:
                    return False
                more |= self._make_up(feed, parked)
        return more

    def _make_up(self, feed: Feed, parked: ParkedStream, limit: int | None = None) -> bool:
        try:
            events, hole, more = self.gaps.following(
                feed.reader, feed.state, parked, limit or self.batch_size
            )
        except AWAY:
            raise
        except Exception as error:  # a row that somebody edited into nonsense
            return self._leave_aside(feed, parked, error, [])
        if hole and not events:
            self.gaps.wait(parked, hole)
            return False
        wanted = self.gaps.wanted(events)
        try:
            with transaction.atomic(using=self.using):
                advance(feed.cursor, feed.state, handled=len(wanted), position=0, using=self.using)
                failpoint("advanced")
                if wanted:
                    self._handle(wanted)
                self.parking.progress(parked, events, more=more, waits=bool(hole))
                self.gaps.made_up(parked, feed.state, events, hole)
        except LeaseLost:
            raise
        except TransactionEnded as error:
            error.add_note(
                f"Handling version {parked.version} and later of {parked.stream!r:.100}."
            )
            self._fail(feed.cursor, error, handled=len(wanted))
            return False
        except Exception as error:
            if len(events) > 1 and limit != 1:  # find the event; what is before it is handled
                self._forget_notes()
                parked.refresh_from_db(using=self.using)
                return self._make_up(feed, parked, len(events) // 2)
            return self._leave_aside(feed, parked, error, wanted)
        failpoint("committed")
        advanced(feed.cursor, feed.state, position=0)
        self.handled += len(wanted)
        return True

    def _leave_aside(
        self, feed: Feed, parked: ParkedStream, error: Exception, events: list[RecordedEvent]
    ) -> bool:
        self._feeds = []  # what was noted in memory was rolled back
        stops = self.subscriber.on_error == "stop" or isinstance(error, AWAY)
        if stops and self.gaps.held(parked):
            self._fail(feed.cursor, error)
            return False
        self._failed += 1
        self.gaps.failed(parked)
        self.parking.park_again(parked, error, events)
        return True

    def _fail(self, cursor: Cursor, error: Exception, *, handled: int = 0) -> None:
        self._failed += 1
        delay = fail(cursor, error, handled=handled, using=self.using)
        self.error = cursor.error
        # Those that the handler uses: in a process that serves no requests nobody else does it.
        close_old_connections()
        self._rest_until = self.clock() + delay
        self._feeds = []
        page_failed.send_robust(
            Partition,
            using=self.using,
            subscription=self.subscriber.name,
            partition=self.part,
            log=cursor.log,
            error=error,
            failures=cursor.failures,
        )
