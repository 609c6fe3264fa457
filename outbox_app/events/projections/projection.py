"""``Projection``: a read model, kept up to date by a subscription.

A page of any size costs one read, one INSERT, one upsert and one DELETE at most (on MySQL, one for
each MiB). The subscription (*pull*) guarantees the rows: it applies each event exactly once.
``push=True`` also lets a writer apply its own events: see ``projections.push``, and
``projections.rows`` for the rule that lets both change one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from django.db import models

from ..exceptions import InvalidSubscriber
from ..log.record import RecordedEvent
from ..models import EventLog
from ..signals import events_published
from ..subscriptions.subscriber import (
    OnError,
    OnGap,
    Start,
    Subscriber,
    subscriber,
    subscriber_named,
)
from .push import receive
from .rows import PendingEvent, ProjectionTable

#: The options of ``@subscriber`` that a projection has, too.
_OPTIONS = (
    *("types", "topics", "logs", "partitions", "on_error"),
    *("start", "batch_size", "on_gap", "max_backtracks"),
)


class Projection:
    """Base of read models. A subclass that has a ``name`` is a subscription.

    Write it in the module ``subscribers`` of your app. The view is an ordinary model whose primary
    key is the result of ``key``, by default the event's stream. ``apply`` must depend only on its
    arguments: it may be called again for the same event, with the row read again.
    """

    #: The unique name of the subscription.
    name: ClassVar[str] = ""
    #: The model of the view. Its table is on the database of the logs.
    model: ClassVar[type[models.Model]]

    #: Options with the same meaning as for ``@subscriber``.
    types: ClassVar[Sequence[str] | None] = None
    topics: ClassVar[Sequence[str] | None] = None
    logs: ClassVar[Sequence[type[EventLog] | str] | None] = None
    partitions: ClassVar[int] = 1
    on_error: ClassVar[OnError] = "stop"
    start: ClassVar[Start] = "beginning"
    batch_size: ClassVar[int | None] = None
    on_gap: ClassVar[OnGap] = "off"
    max_backtracks: ClassVar[int] = 20

    #: Also apply the events of a transaction right after its commit, in the same process. Each row
    #: then stores the version of its stream that it has applied.
    push: ClassVar[bool] = False
    #: Each event has the whole state of its row, so it may be pushed on top of any earlier event.
    whole_state: ClassVar[bool] = False

    def apply(self, event: RecordedEvent, row: Any) -> models.Model | None:
        """Return the row as it is after an event.

        Args:
            event: The event.
            row: The row as it is before, or None if there is none.

        Returns:
            The changed row, or an instance of ``model``; its key is filled in. None: no row.
        """
        raise NotImplementedError

    def key(self, event: RecordedEvent) -> Any:
        """Return the primary key of the row that an event changes."""
        return event.stream

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            projection = cls()
            _check(projection)
            options: dict[str, Any] = {name: getattr(projection, name) for name in _OPTIONS}
            subscriber(cls.name, **options)(projection)
            events_published.connect(receive)

    def __call__(self, events: list[RecordedEvent]) -> None:
        """Handle a page of the subscription, in its transaction."""
        table = ProjectionTable(self, using=self.subscriber.using)
        table.apply([PendingEvent(event) for event in events])

    def __str__(self) -> str:
        return type(self).__qualname__

    @property
    def subscriber(self) -> Subscriber:
        return subscriber_named(self.name)


def _check(projection: Projection) -> None:
    text = f"Projection {projection.name!r}: "
    model = getattr(projection, "model", None)
    if not isinstance(model, type) or not issubclass(model, models.Model) or model._meta.abstract:
        raise InvalidSubscriber(f"{text}model must be the concrete model of the view; got {model}.")
    if type(projection).apply is Projection.apply:
        raise InvalidSubscriber(f"{text}define apply(self, event, row).")
    if model._meta.parents or model._meta.local_many_to_many:
        raise InvalidSubscriber(
            f"{text}{model._meta.label} must be one table of its own: not a proxy, and without "
            "multi-table inheritance and many-to-many fields."
        )
    key = model._meta.pk
    if isinstance(key, models.AutoField | models.CompositePrimaryKey):
        raise InvalidSubscriber(
            f"{text}the primary key of {model._meta.label} is {key.name} ({type(key).__name__}), "
            "but rows are found by the key of their events. Declare the field of this key with "
            "primary_key=True, for example stream = CharField(max_length=255, primary_key=True)."
        )
    if projection.push:
        _check_pushed(projection, text)


def _check_pushed(projection: Projection, text: str) -> None:
    if projection.logs is not None and len(projection.logs) > 1:
        raise InvalidSubscriber(
            f"{text}push=True needs rows that come from one stream each, but the projection "
            f"reads {len(projection.logs)} logs: no version can say what a row has applied. "
            "Leave push out; the subscription keeps the view up to date."
        )
    label = projection.model._meta.label
    fields = {field.name: field for field in projection.model._meta.concrete_fields}
    if not isinstance(fields.get("version"), models.IntegerField):
        raise InvalidSubscriber(
            f"{text}with push=True each row keeps the version of its stream that it has "
            f"applied. Give {label} version = BigIntegerField(default=0)."
        )
