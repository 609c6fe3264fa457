"""Parked streams: set aside by one subscription, so that its other streams may go on.

The row of a parked stream is written in the transaction that advances the cursor past its event;
from then on the stream's events are left out, by the version that was not handled and all later
ones. When a person releases it, the events that the cursor has passed are handled in order, and the
row goes in the transaction of the last of them. Only the owner of the partition writes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import django.db
from django.db import connections, transaction

from ..exceptions import LeaseLost
from ..log.cursor import State
from ..log.reader import LogReader
from ..log.record import COLUMNS, RecordedEvent
from ..models import ParkedStream
from ..signals import stream_parked
from .subscriber import Subscriber
from .trouble import readable

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
        self._streams: set[tuple[str, str]] = set()

    def load(self) -> None:
        """Read which streams are parked."""
        self._streams = set(self._rows().values_list("log", "stream"))

    def without(self, events: list[RecordedEvent]) -> list[RecordedEvent]:
        """Return the events of streams that are not parked."""
        if not self._streams:
            return events
        return [event for event in events if (event.log, event.stream) not in self._streams]

    def handle(self, event: RecordedEvent, handle: Handle) -> None:
        """Handle one event in a savepoint; park its stream where that fails."""
        if (event.log, event.stream) in self._streams:
            return
        try:
            with transaction.atomic(using=self.using):
                handle([event])
        except (LeaseLost, django.db.OperationalError, django.db.InterfaceError):
            raise  # not the event's fault
        except Exception as error:
            self.park(event, error)

    def park(self, event: RecordedEvent, error: BaseException) -> None:
        """Set the event's stream aside, from this event on, in the open transaction."""
        parked = ParkedStream(
            subscription=self.subscriber.name,
            partition=self.part,
            log=event.log,
            stream=event.stream,
            version=event.version,
            position=event.id,
            error=readable(f"{type(error).__name__}: {error}")[:10_000],
        )
        parked.save(using=self.using, force_insert=True)
        self._streams.add((event.log, event.stream))
        transaction.on_commit(
            lambda: stream_parked.send_robust(ParkedStream, using=self.using, parked=parked),
            using=self.using,
            robust=True,
        )

    def released(self, log: str) -> list[ParkedStream]:
        """Return the streams of a log that a person wants to go on. Asks only where some are."""
        if not self._streams:
            return []
        return list(self._rows().filter(log=log, released=True).order_by("id")[:100])

    def missed(
        self, parked: ParkedStream, reader: LogReader, state: State, limit: int
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

    def progress(self, parked: ParkedStream, events: list[RecordedEvent], *, done: bool) -> None:
        """Note in the open transaction what was made up for; forget the stream where it is all."""
        row = ParkedStream.objects.using(self.using).filter(pk=parked.pk)
        if done:
            row.delete()
            key = (parked.log, parked.stream)
            transaction.on_commit(lambda: self._streams.discard(key), using=self.using)
        else:
            row.update(version=events[-1].version + 1, position=events[-1].id + 1)

    def park_again(self, parked: ParkedStream, error: BaseException) -> None:
        """It failed again: leave it parked, with the new error."""
        text = readable(f"{type(error).__name__}: {error}")[:10_000]
        row = ParkedStream.objects.using(self.using).filter(pk=parked.pk)
        row.update(released=False, error=text)

    def _rows(self) -> Any:
        return ParkedStream.objects.using(self.using).filter(
            subscription=self.subscriber.name, partition=self.part
        )
