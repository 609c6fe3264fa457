"""Parked streams: set aside by one subscription, so that its other streams may go on.

The row of a parked stream is written in the transaction that advances the cursor past its event;
from then on the stream's events are left out, by the version that was not handled and all later
ones. When a person releases it, the events that the cursor has passed are handled in order, and the
row goes in the transaction of the last of them. Only the owner of the partition writes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import django.db
from django.db import connections, transaction
from django.db.models import F, Q

from ..eventlog.reader import LogReader
from ..eventlog.record import COLUMNS, RecordedEvent
from ..eventlog.state import WindowState
from ..exceptions import LeaseLost, TransactionEnded
from ..models import Cursor, ParkedStream
from ..process.backoff import described
from ..signals import stream_parked
from .cursors import Overtaken
from .isolation import Found, evidence
from .subscriber import Subscriber

#: Streams that a person has released and that are looked at in one turn.
MAX_RELEASED = 100

Handle = Callable[[list[RecordedEvent]], None]


class Parking:
    """The parked streams of one partition.

    Args:
        subscriber: The subscription.
        part: Its partition.
        using: Database alias.
    """

    def __init__(self, subscriber: Subscriber, part: int, *, using: str) -> None:
        self.subscriber = subscriber
        self.part = part
        self.using = using
        #: First version that was not handled, by log and stream.
        self.parked: dict[tuple[str, str], int] = {}
        #: Events for which a stream was set aside by now.
        self.failed = 0

    def load(self) -> None:
        """Read which streams are parked."""
        rows = self._rows().values_list("log", "stream", "version")
        self.parked = {(log, stream): version for log, stream, version in rows}

    def without(self, events: list[RecordedEvent]) -> list[RecordedEvent]:
        """Return the events of streams that are not parked."""
        if not self.parked:
            return events
        return [event for event in events if (event.log, event.stream) not in self.parked]

    def handle_each(self, found: Found, handle: Handle, cursor: Cursor) -> Found:
        """Handle a page's events one by one. Returns the page with those that were handled.

        The others count when they are made up for, and not as well when the cursor passes them.
        """
        handled = [event for event in found.events if self.handle(event, handle)]
        if missed := len(found.events) - len(handled):
            rows = Cursor.objects.using(self.using).filter(pk=cursor.pk)
            rows.update(handled=F("handled") - missed)
        return found._replace(events=handled)

    def handle(self, event: RecordedEvent, handle: Handle) -> bool:
        """Handle one event in a savepoint; park its stream where that fails. Says if it worked."""
        if (event.log, event.stream) in self.parked:
            return False
        try:
            with transaction.atomic(using=self.using):
                handle([event])
                if connections[self.using].vendor == "postgresql":
                    # Deferred constraints now, while it is known whose event it is.
                    connections[self.using].check_constraints()
        except (LeaseLost, django.db.OperationalError, django.db.InterfaceError):
            raise  # not the event's fault
        except TransactionEnded:
            raise  # there is nothing any more that parking could be committed with
        except Exception as error:
            self.park(event, error)
            return False
        return True

    def park(self, event: RecordedEvent, error: BaseException) -> None:
        """Set the event's stream aside, from this event on, in the open transaction."""
        why = described(error)
        found = evidence(event, error)
        parked = self.hold(event.log, event.stream, event.version, event.id, why, failed=found)

        def committed() -> None:
            self.failed += 1
            stream_parked.send_robust(ParkedStream, using=self.using, parked=parked)

        transaction.on_commit(committed, using=self.using, robust=True)

    def hold(
        self,
        log: str,
        stream: str,
        version: int,
        position: int,
        why: str,
        *,
        failed: dict[str, Any] | None = None,
    ) -> ParkedStream:
        """Set a stream aside, from a version on, in the open transaction."""
        parked = ParkedStream(
            subscription=self.subscriber.name,
            partition=self.part,
            log=log,
            stream=stream,
            version=version,
            position=position,
            error=why,
            failed_event=failed,
        )
        parked.save(using=self.using, force_insert=True)
        self.parked[log, stream] = version
        return parked

    def move(self, parked: ParkedStream, version: int, position: int, why: str) -> bool:
        """Leave a stream aside from a version on. Says whether nobody else has moved it."""
        row = ParkedStream.objects.using(self.using).filter(pk=parked.pk, version=parked.version)
        return bool(row.update(version=version, position=position, error=why, released=False))

    def due(self, log: str, streams: Sequence[str]) -> list[ParkedStream]:
        """Return the streams of a log that a person wants to go on, and these. Asks only where some
        are parked."""
        if not self.parked:
            return []
        wanted = Q(released=True) | Q(stream__in=streams)
        return list(
            self._rows().filter(wanted, log=log).order_by("id")[: len(streams) + MAX_RELEASED]
        )

    def missed(
        self, parked: ParkedStream, reader: LogReader, state: WindowState, limit: int
    ) -> list[RecordedEvent]:
        """Return the stream's events that the cursor has passed without handling them."""
        condition, params = reader.only.sql()
        quote = connections[self.using].ops.quote_name
        sql = (
            f"SELECT {', '.join(COLUMNS)} FROM {quote(reader.table)} "
            f"WHERE stream = %s AND version >= %s AND NOT ({reader.window.unread(state)}) "
            f"{condition and f'AND {condition}'} ORDER BY version LIMIT {limit}"
        )
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, [parked.stream, parked.version, *params])
            return reader.records(list(cursor.fetchall()))

    def progress(
        self, parked: ParkedStream, events: list[RecordedEvent], *, more: bool, waits: bool = False
    ) -> None:
        """Note in the open transaction what was made up for; forget the stream where it is all.

        Args:
            parked: The stream.
            events: What was handled of it.
            more: Whether there is more to make up for at once.
            waits: Whether it waits for a version that is missing.

        Raises:
            Overtaken: A person has skipped some of it in the meantime.
        """
        row = ParkedStream.objects.using(self.using).filter(pk=parked.pk, version=parked.version)
        key = (parked.log, parked.stream)
        if not more and not waits:
            moved = row.delete()[0]
            transaction.on_commit(lambda: self.parked.pop(key, None), using=self.using)
        else:
            version, position = events[-1].version + 1, events[-1].id + 1
            moved = row.update(
                version=version, position=position, released=not waits, failed_event=None
            )
            self.parked[key] = version
        if not moved:
            raise Overtaken(f"{parked} was moved by somebody else; it is looked at again.")

    def park_again(
        self, parked: ParkedStream, error: BaseException, events: list[RecordedEvent]
    ) -> None:
        """It failed again: leave it parked, with the new error and the event, where it is known."""
        row = ParkedStream.objects.using(self.using).filter(pk=parked.pk)
        values: dict[str, Any] = {"released": False, "error": described(error)}
        if len(events) == 1:
            [event] = events
            values["failed_event"] = evidence(event, error)
            values |= {"version": event.version, "position": event.id}
        row.update(**values)

    def _rows(self) -> Any:
        return ParkedStream.objects.using(self.using).filter(
            subscription=self.subscriber.name, partition=self.part
        )
