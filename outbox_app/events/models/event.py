"""The event log: an append-only table of what happened, read by any number of subscriptions.

A row is there if and only if the transaction that published it committed. ``id`` is the position;
positions commit out of order and leave gaps, so a reader that remembers only the last id it saw
loses rows; ``events.log`` reads without a loss. Versions of a stream are contiguous and commit in
order, because a transaction that assigns one holds a lock on the stream's ``StreamHead``.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar
from uuid import uuid4

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from ...capability import require_app
from ...database.clock import DatabaseNow, aware
from ...fields import CharField, JSONField
from .transaction import CurrentTransaction

require_app("outbox_app.events")


class EventLog(models.Model):
    """Base of every log. Derive a concrete model from it for a log of your own. Fields that you
    add need a default, or null. Write to it by ``publish(…, log=YourLog)`` only."""

    #: Whether its rows are the answers of commands, whose columns its records have, too.
    has_answers: ClassVar = False
    #: The position, which cursors refer to.
    id = models.BigAutoField(primary_key=True)
    #: The transaction that wrote the row (PostgreSQL; 0 elsewhere). Windows are bounded by it.
    txid = models.BigIntegerField(_("transaction"), db_default=CurrentTransaction(), editable=False)
    #: The publication that the event belongs to; a project may have one for each tenant.
    topic = CharField(_("topic"), max_length=255, blank=True, default="")
    #: The aggregate or entity that the event happened to.
    stream = CharField(_("stream"), max_length=255)
    #: 1, 2, 3 … inside the stream.
    version = models.BigIntegerField(_("version"))
    type = CharField(_("type"), max_length=255)
    data = JSONField(_("data"), default=dict, encoder=DjangoJSONEncoder)
    metadata = JSONField(_("metadata"), default=dict, encoder=DjangoJSONEncoder)
    #: CRC-32 of the stream, modulo 1024. Parallel readers divide the log by slices.
    slice = models.PositiveSmallIntegerField(_("slice"))
    #: Unique among all events of the log. Receivers deduplicate by it.
    message_id = models.UUIDField(_("message id"), unique=True, default=uuid4)
    recorded_at = models.DateTimeField(_("recorded at"), db_default=DatabaseNow(), editable=False)

    class Meta:
        abstract = True
        indexes = [models.Index(fields=["txid", "id"])]
        constraints = [
            models.UniqueConstraint(
                fields=["stream", "version"], name="%(app_label)s_%(class)s_version"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.stream}@{self.version}"

    @classmethod
    def require_publishable(cls) -> None:
        """Raise an error if something else than ``publish()`` writes the rows."""

    @classmethod
    def before_pruning(cls, rows: Any, now: datetime, *, is_archived: bool) -> None:
        """Keep what must outlive rows, in the transaction that removes them.

        ``rows`` is in a fixed order; ``now`` is the database's time.
        """

    @classmethod
    def audited(cls, *, using: str) -> Iterable[tuple[str, str]] | None:
        """Return what an audit reports beside the events: ids of other rows, and a text each.

        None: no other rows belong to the log.
        """
        return None

    def to_cloudevent(self, source: str = "") -> dict[str, Any]:
        """Return the event in the JSON format of CloudEvents."""
        return cloudevent(self, log=self._meta.db_table, source=source, using=self._state.db)


def cloudevent(event: Any, *, log: str, source: str, using: str | None) -> dict[str, Any]:
    """Return a row of a log, or its record, in the JSON format of CloudEvents 1.0.

    Built by hand: it is one dictionary, and the SDK has dependencies of its own. The stream is
    the ``subject``; version, position and topic are the extension attributes ``streamversion``,
    ``position`` and ``topic``, as strings, because CloudEvents' integers have 32 bits. ``source``
    is the URI reference of the publishing system; by default it is the log's table.
    """
    return {
        "specversion": "1.0",
        "id": str(event.message_id),
        "source": source or log,
        "type": event.type,
        "subject": event.stream,
        "time": aware(event.recorded_at, using=using).isoformat(),
        "datacontenttype": "application/json",
        "streamversion": str(event.version),
        "position": str(event.id),
        **({"topic": event.topic} if event.topic else {}),
        "data": event.data,
    }


class Event(EventLog):
    """The default log, to which ``publish()`` writes if no other is given."""

    class Meta(EventLog.Meta):
        abstract = False
        app_label = "outbox_events"
        db_table = "outbox_event"
        verbose_name = _("event")
        verbose_name_plural = _("events")
        # Not inherited: a project's own log has the permissions that its Meta names.
        permissions = [("view_payload_event", _("Can see what events contain"))]


class StreamHead(models.Model):
    """The latest version of a stream. It is kept when the stream's events are archived."""

    pk = models.CompositePrimaryKey("log", "stream")
    #: Table of the log.
    log = CharField(_("log"), max_length=128)
    stream = CharField(_("stream"), max_length=255)
    version = models.BigIntegerField(_("version"))

    class Meta:
        app_label = "outbox_events"
        db_table = "outbox_stream"
        verbose_name = _("stream")
        verbose_name_plural = _("streams")

    def __str__(self) -> str:
        return f"{self.log}: {self.stream}@{self.version}"
