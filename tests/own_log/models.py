"""Logs of a project's own: one with a table name and an index of its own, one with nothing."""

from __future__ import annotations

from django.db import models

from outbox_app.models import EventLog


class Ledger(EventLog):
    """Has a name, an index and a column of its own."""

    note = models.CharField(max_length=20, null=True)  # noqa: DJ001

    class Meta(EventLog.Meta):
        db_table = "ledger"
        indexes = [*EventLog.Meta.indexes, models.Index(fields=["topic"], name="ledger_topic")]


class Visit(EventLog):
    """Has what every log has."""
