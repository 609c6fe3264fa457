"""Prepared events, in the keeper's database; fences, in the database of each sender.

No reader of a log sees a prepared event. A fence says how the sender's transaction ended: of two
processes that insert it, the primary key lets the first one decide. Only ``prepared.keeper``
confirms or cancels events, and only ``prepared.fences`` writes fences.
"""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..database.clock import DatabaseNow
from ..fields import CharField, JSONField, TextField

require_app("outbox_app.prepared")


class PreparedEventQuerySet(models.QuerySet["PreparedEvent"]):
    def open(self) -> PreparedEventQuerySet:
        """Prepared events that may still be confirmed or cancelled."""
        return self.filter(state__in=PreparedEvent.OPEN)

    def due(self, sender: str) -> PreparedEventQuerySet:
        """Prepared events about which to ask this sender now, the longest due first."""
        due = self.filter(sender=sender, next_check_at__lte=DatabaseNow())
        return due.order_by("next_check_at")


class PreparedEvent(models.Model):
    """An event, or a job, that waits for the outcome of its sender's transaction."""

    class State(models.TextChoices):
        PREPARED = "prepared", _("prepared")
        UNDECIDED = "undecided", _("undecided")
        CONFIRMED = "confirmed", _("confirmed")
        CANCELLED = "cancelled", _("cancelled")

    class Policy(models.TextChoices):
        ASK = "ask", _("a person decides")
        CANCEL = "cancel", _("cancel")
        CONFIRM = "confirm", _("confirm")

    OPEN: ClassVar = (State.PREPARED, State.UNDECIDED)

    # The key is not (sender, event_id): Django's admin supports no composite primary key.
    id = models.BigAutoField(primary_key=True)
    #: "alias:" and a database alias of this project, or the name of a peer.
    sender = CharField(_("sender"), max_length=100)
    event_id = models.UUIDField(_("event id"))
    #: The table of the log to which the event is published; empty for a job.
    log = CharField(_("log"), max_length=128, blank=True, default="")
    stream = CharField(_("stream"), max_length=255, blank=True, default="")
    #: The event's type, or the job's task; empty if it was cancelled before it was prepared.
    type = CharField(_("type"), max_length=255, blank=True, default="")
    topic = CharField(_("topic"), max_length=255, blank=True, default="")
    #: The data and metadata of an event, or the args and kwargs of a job.
    content = JSONField(_("content"), default=dict, encoder=DjangoJSONEncoder)
    #: SHA-256 of everything that will be published.
    content_hash = CharField(_("content hash"), max_length=64, blank=True, default="")
    state = CharField(_("state"), max_length=9, choices=State.choices, default=State.PREPARED)
    policy = CharField(_("policy"), max_length=7, choices=Policy.choices, default=Policy.ASK)
    prepared_at = models.DateTimeField(_("prepared at"), db_default=DatabaseNow(), editable=False)
    #: The time at which the policy decides, if nothing has decided before.
    decide_by = models.DateTimeField(_("decide by"))
    #: When to ask the sender next; NULL if it is not asked any more.
    next_check_at = models.DateTimeField(_("next check at"), null=True, blank=True)
    #: How many questions were sent, got an answer that decides nothing, and got no usable answer.
    asked = models.PositiveIntegerField(_("asked"), default=0)
    answered = models.PositiveIntegerField(_("answered"), default=0)
    unreachable = models.PositiveIntegerField(_("not answered"), default=0)
    last_answer = TextField(_("last answer"), blank=True, default="")
    decided_at = models.DateTimeField(_("decided at"), null=True, blank=True)
    #: "call", "answer", "policy", or the name of a person.
    decided_by = CharField(_("decided by"), max_length=255, blank=True, default="")
    reason = TextField(_("reason"), blank=True, default="")

    objects = PreparedEventQuerySet.as_manager()

    class Meta:
        app_label = "outbox_prepared"
        db_table = "outbox_prepared"
        verbose_name = _("prepared event")
        verbose_name_plural = _("prepared events")
        permissions = [
            ("check_preparedevent", _("Can have senders asked about prepared events")),
            ("confirm_preparedevent", _("Can confirm prepared events")),
            ("cancel_preparedevent", _("Can cancel prepared events")),
            ("extend_preparedevent", _("Can extend prepared events")),
            ("view_payload_preparedevent", _("Can see what prepared events contain")),
        ]
        indexes = [
            models.Index(fields=["sender", "next_check_at"], name="outbox_prepared_check"),
            models.Index(fields=["state", "prepared_at"], name="outbox_prepared_state"),
            models.Index(fields=["state", "decide_by"], name="outbox_prepared_decide_by"),
            models.Index(fields=["decided_at"], name="outbox_prepared_decided"),
        ]
        constraints = [
            # The id is first: it is looked up among the events of other senders, too.
            models.UniqueConstraint(fields=["event_id", "sender"], name="outbox_prepared_event"),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.stream or self.event_id}: {self.get_state_display()}"


class Fence(models.Model):
    """The outcome of a sender's transaction, in the sender's database, committed with its rows."""

    class Outcome(models.TextChoices):
        COMMITTED = "committed", _("committed")
        ROLLED_BACK = "rolled_back", _("rolled back")
        PRUNED = "pruned", _("pruned")  # of the row ``MARK`` alone

    #: The id of a special row: fences older than its ``written_at`` have been pruned.
    MARK: ClassVar = UUID(int=0)

    event_id = models.UUIDField(_("event id"), primary_key=True)
    outcome = CharField(_("outcome"), max_length=11, choices=Outcome.choices)
    keeper = CharField(_("keeper"), max_length=80, blank=True, default="")
    written_at = models.DateTimeField(_("written at"), db_default=DatabaseNow(), db_index=True)

    class Meta:
        app_label = "outbox_prepared"
        db_table = "outbox_fence"
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return f"{self.event_id}: {self.get_outcome_display()}"
