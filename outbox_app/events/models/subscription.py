"""Subscriptions and their cursors.

A cursor is updated in the same transaction as the effects of the page that it passes, by compare
and set on ``revision``: of two processes that handle the same page, only one commits. Only the
log's window reads the state of a cursor (``events.log.state``); nothing here does.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ...database.clock import DatabaseNow
from ...fields import CharField, TextField
from ..exceptions import LogSetBack


class Subscription(models.Model):
    """A subscription that has run at least once."""

    name = CharField(_("name"), max_length=80, primary_key=True)
    partitions = models.PositiveSmallIntegerField(_("partitions"), default=1)
    #: Whether ``outbox_subscriptions repartition`` has chosen the number: no process changes it.
    pinned = models.BooleanField(_("partitions are pinned"), default=False, editable=False)
    paused = models.BooleanField(_("paused"), default=False)
    #: The logs (tables), topics and types, as last declared; null in place of a list means all.
    reads = models.JSONField(_("reads"), null=True, editable=False)
    created_at = models.DateTimeField(_("created at"), db_default=DatabaseNow(), editable=False)

    class Meta:
        app_label = "outbox_events"
        db_table = "outbox_subscription"
        verbose_name = _("subscription")
        verbose_name_plural = _("subscriptions")
        permissions = [
            ("pause_subscription", _("Can pause and resume subscriptions")),
            ("replay_subscription", _("Can replay and reset subscriptions")),
            ("skip_event", _("Can skip events and discard parked streams")),
            ("forget_subscription", _("Can forget subscriptions")),
        ]

    def __str__(self) -> str:
        return self.name


class CursorQuerySet(models.QuerySet["Cursor"]):
    """Cursors. A process that holds an older revision of a cursor drops its page."""

    def bump_revision(self) -> int:
        return self.update(revision=models.F("revision") + 1)

    def move(self, **columns: Any) -> int:
        """Update columns, such as the state, and clear the error."""
        values = {**Cursor.WELL, "revision": models.F("revision") + 1, **columns}
        return self.update(**values)


class Cursor(models.Model):
    """The place of one partition of a subscription in one log."""

    #: The columns of a cursor that has no error.
    WELL: ClassVar = {"error": "", "failures": 0, "retry_at": None}

    id = models.BigAutoField(primary_key=True)
    subscription = CharField(_("subscription"), max_length=80)
    partition = models.PositiveSmallIntegerField(_("partition"))
    partitions = models.PositiveSmallIntegerField(_("partitions"), default=1)
    #: The table of the log.
    log = CharField(_("log"), max_length=128)
    #: Each move adds 1. A process moves the cursor only if the number is the one that it has read.
    revision = models.BigIntegerField(_("revision"), default=0)
    #: The cursor in JSON, as ``events.log.state`` reads it.
    state = TextField(_("state"))
    #: The highest position handled. The admin shows it, and pruning respects it.
    position = models.BigIntegerField(_("position"), default=0)
    handled = models.BigIntegerField(_("events handled"), default=0)
    moved_at = models.DateTimeField(_("moved at"), db_default=DatabaseNow())
    #: Why the cursor has stopped: type, message and notes of the exception; empty while it runs.
    error = TextField(_("error"), blank=True, default="")
    failures = models.PositiveIntegerField(_("failures in a row"), default=0)
    retry_at = models.DateTimeField(_("next attempt"), null=True)
    #: The event that fails, once the search has found it (``subscriptions.handling``).
    failed_event = models.JSONField(_("failed event"), null=True, editable=False)
    #: The note of its place when counting began (``subscriptions.counting``); null if not counted.
    counted = models.JSONField(_("counted since"), null=True, editable=False)

    objects = CursorQuerySet.as_manager()

    class Meta:
        app_label = "outbox_events"
        db_table = "outbox_cursor"
        verbose_name = _("cursor")
        verbose_name_plural = _("cursors")
        constraints = [
            models.UniqueConstraint(
                fields=["subscription", "partition", "log"], name="outbox_cursor_part"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.subscription}[{self.partition}] in {self.log}"

    @property
    def was_set_back(self) -> bool:
        """Whether it has stopped because its log was emptied, or restored alone."""
        return self.error.startswith(LogSetBack.__name__)

    def recall(self) -> None:
        """Raise ``LogSetBack`` again: once new positions have reached the state, only this tells.

        The error is kept until a replay, a reset or ``outbox_rebase`` moves the cursor.
        """
        if self.was_set_back:
            raise LogSetBack(self.error.partition(": ")[2])


class ParkedStream(models.Model):
    """A stream that a subscription has parked; the subscription handles its other streams."""

    id = models.BigAutoField(primary_key=True)
    subscription = CharField(_("subscription"), max_length=80)
    partition = models.PositiveSmallIntegerField(_("partition"))
    log = CharField(_("log"), max_length=128)
    stream = CharField(_("stream"), max_length=255)
    version = models.BigIntegerField(_("first version not handled"))
    #: The position of that event. Events from this position on may not be pruned.
    position = models.BigIntegerField(_("position"))
    error = TextField(_("error"))
    #: The event that failed, as on a cursor; null if it is unknown or versions are missing.
    failed_event = models.JSONField(_("failed event"), null=True, editable=False)
    parked_at = models.DateTimeField(_("parked at"), db_default=DatabaseNow(), editable=False)
    #: Whether a person has asked for another attempt.
    released = models.BooleanField(_("released"), default=False)

    class Meta:
        app_label = "outbox_events"
        db_table = "outbox_parked"
        verbose_name = _("parked stream")
        verbose_name_plural = _("parked streams")
        constraints = [
            models.UniqueConstraint(
                fields=["subscription", "log", "stream"], name="outbox_parked_stream"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stream}@{self.version} of {self.subscription}"

    def compare_and_set(self, **columns: Any) -> bool:
        """Update columns, unless a process or a person has moved the stream since it was read."""
        rows = ParkedStream.objects.using(self._state.db).filter(pk=self.pk, version=self.version)
        return bool(rows.update(**columns))


class DeliveredVersion(models.Model):
    """The last version of a stream that a reader by time has handled: its cursor does not tell."""

    id = models.BigAutoField(primary_key=True)
    subscription = CharField(_("subscription"), max_length=80)
    log = CharField(_("log"), max_length=128)
    stream = CharField(_("stream"), max_length=255)
    version = models.BigIntegerField(_("highest version handled"))
    #: The run in the cursor's state. A replay starts a new run; rows of older runs are ignored.
    run = CharField(_("run"), max_length=32)

    class Meta:
        app_label = "outbox_events"
        db_table = "outbox_delivered"
        verbose_name = _("delivered version")
        verbose_name_plural = _("delivered versions")
        constraints = [
            models.UniqueConstraint(
                fields=["subscription", "log", "stream"], name="outbox_delivered_stream"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stream}@{self.version} of {self.subscription}"
