"""Parked streams: one subscription leaves them out, and handles its other streams.

The row of a parked stream is written in the transaction that moves the cursor past its event. From
then on the subscription leaves out the stream's events, beginning with the unhandled version. When
a person releases the stream, the events that the cursor has passed are handled in order, and the
transaction of the last one deletes the row. Only the owner of the partition writes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import connections, transaction
from django.db.models import F, Q, QuerySet

from ...database.encoding import replaced
from ...database.transaction_guard import is_lost
from ...exceptions import LeaseLost, TransactionEnded
from ...text import error_text
from ..log.record import RecordedEvent
from ..models import Cursor, ParkedStream
from ..signals import stream_parked
from .cursors import CursorConflict, evidence
from .subscriber import Handler, Subscriber

#: The most released streams that are looked at in one run.
MAX_RELEASED = 100


def is_of_event(error: Exception) -> bool:
    """Return whether the handler failed for its event, whose stream may be parked then."""
    return not (isinstance(error, LeaseLost | TransactionEnded) or is_lost(error))


class Parking:
    def __init__(self, subscriber: Subscriber, part: int, *, using: str) -> None:
        self.subscriber = subscriber
        self.part = part
        self.using = using
        #: First version that was not handled, by log and stream.
        self.parked: dict[tuple[str, str], int] = {}
        #: How many events have parked a stream so far.
        self.failed = 0

    def load(self, rows: Iterable[tuple[int, str, str, int]]) -> None:
        self.parked = {(log, stream): at for part, log, stream, at in rows if part == self.part}

    def without(self, events: list[RecordedEvent]) -> list[RecordedEvent]:
        if not self.parked:
            return events
        return [event for event in events if (event.log, event.stream) not in self.parked]

    def handle_each(
        self, events: list[RecordedEvent], handle: Handler, cursor: Cursor
    ) -> list[RecordedEvent]:
        """Handle a page's events one by one. Returns those that were handled.

        The other events are counted when they are handled later, not when the cursor passes them.
        """
        handled = [event for event in events if self._handle(event, handle)]
        if missed := len(events) - len(handled):
            rows = Cursor.objects.using(self.using).filter(pk=cursor.pk)
            rows.update(handled=F("handled") - missed)
        return handled

    def _handle(self, event: RecordedEvent, handle: Handler) -> bool:
        """Handle one event in a savepoint, or park its stream. Returns whether it was handled."""
        if (event.log, event.stream) in self.parked:
            return False
        try:
            with transaction.atomic(using=self.using):
                handle([event])
                if connections[self.using].vendor == "postgresql":
                    # Check deferred constraints now, while it is known which event breaks them.
                    connections[self.using].check_constraints()
        except Exception as error:
            if not is_of_event(error) or connections[self.using].needs_rollback:
                raise  # or no transaction is left to park in
            self._park_failed(event, error)
            return False
        return True

    def _park_failed(self, event: RecordedEvent, error: BaseException) -> None:
        at = {"log": event.log, "stream": event.stream, "version": event.version}
        found = {
            "error": replaced(error_text(error), using=self.using),
            "failed_event": evidence(event, error, using=self.using),
        }
        parked = self.park(**at, **found, position=event.id)

        def committed() -> None:
            self.failed += 1
            stream_parked.send_robust(ParkedStream, using=self.using, parked=parked)

        transaction.on_commit(committed, using=self.using)

    def park(self, **columns: Any) -> ParkedStream:
        """Park a stream, from a version on, in the open transaction."""
        parked = ParkedStream(subscription=self.subscriber.name, partition=self.part, **columns)
        parked.save(using=self.using, force_insert=True)
        self.parked[parked.log, parked.stream] = parked.version
        return parked

    def repark(
        self, parked: ParkedStream, error: BaseException, events: list[RecordedEvent]
    ) -> None:
        """Keep a stream parked that failed again, unless a person has moved it meanwhile.

        The event is kept with the error, if it is known.
        """
        text = replaced(error_text(error), using=self.using)
        values: dict[str, Any] = {"released": False, "error": text}
        if len(events) == 1:
            [event] = events
            values["failed_event"] = evidence(event, error, using=self.using)
            values |= {"version": event.version, "position": event.id}
        parked.compare_and_set(**values)

    def due(self, log: str, streams: Sequence[str], *, released: bool) -> list[ParkedStream]:
        """Return parked streams of a log: those in ``streams``, and those that a person released.
        Makes no statement if no stream is parked."""
        if not self.parked:
            return []
        wanted = Q(stream__in=streams) | Q(released=True) if released else Q(stream__in=streams)
        rows = self._rows().filter(wanted, log=log)
        return list(rows.order_by("id")[: len(streams) + MAX_RELEASED])

    def progress(
        self, parked: ParkedStream, events: list[RecordedEvent], *, more: bool, waits: bool
    ) -> None:
        """Record in the open transaction which events of a parked stream were handled.

        If no ``more`` can be handled, and the stream ``waits`` for no version, its row is deleted.
        """
        key = (parked.log, parked.stream)
        if more or waits:
            version, position = events[-1].version + 1, events[-1].id + 1
            moved = parked.compare_and_set(
                version=version, position=position, released=not waits, failed_event=None
            )
            self.parked[key] = version
        else:
            moved = bool(self._rows().filter(pk=parked.pk, version=parked.version).delete()[0])
            self.parked.pop(key, None)
        if not moved:
            raise CursorConflict(f"{parked} was moved by another process; it is looked at again.")

    def _rows(self) -> QuerySet[ParkedStream]:
        return ParkedStream.objects.using(self.using).filter(
            subscription=self.subscriber.name, partition=self.part
        )
