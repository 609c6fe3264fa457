"""Logs of a project's own: one with a table name and an index of its own, one with nothing."""

from __future__ import annotations

from uuid import uuid4

from django.db import models

from outbox_app.events.models import EventLog


class Ledger(EventLog):
    """Has a name, an index and columns of its own; the database knows no default of theirs."""

    note = models.CharField(max_length=20, null=True)  # noqa: DJ001
    currency = models.CharField(max_length=3, default="%s'")
    booking = models.UUIDField(default=uuid4, unique=True)
    remark = models.TextField(blank=True)
    booked_at = models.DateTimeField(auto_now_add=True)

    class Meta(EventLog.Meta):
        db_table = "ledger"
        indexes = [*EventLog.Meta.indexes, models.Index(fields=["topic"], name="ledger_topic")]


class OpenManager(models.Manager["Visit"]):
    """Hides what is closed, as one that leaves out other tenants' rows does."""

    def get_queryset(self) -> models.QuerySet[Visit]:
        return super().get_queryset().exclude(topic="closed")


class Visit(EventLog):
    """Has what every log has; its default manager does not show all of it."""

    opened = OpenManager()
    objects: models.Manager[Visit] = models.Manager()
