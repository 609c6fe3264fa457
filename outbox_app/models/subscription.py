"""Where subscriptions stand: one row a subscription, one row a cursor.

A cursor is written in the same transaction as the effects of the page it has passed, by compare and
set on ``revision``: of two processes that hold the same page, one commits. What a state means is
known to the window of the log (``eventlog.state``); nothing here reads it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class Subscription(models.Model):
    """A subscription that has run at least once."""

    name = models.CharField(_("name"), max_length=80, primary_key=True)
    partitions = models.PositiveSmallIntegerField(_("partitions"), default=1)
    #: Set by a person: nothing is handled until it is resumed.
    paused = models.BooleanField(_("paused"), default=False)
    #: Its logs (tables), topics and types as last declared; a list that is null means all.
    reads = models.JSONField(_("reads"), null=True, editable=False)
    created_at = models.DateTimeField(_("created at"), db_default=DatabaseNow(), editable=False)

    class Meta:
        db_table = "outbox_subscription"
        verbose_name = _("subscription")
        verbose_name_plural = _("subscriptions")
        permissions = [
            ("pause_subscription", _("Can pause and resume subscriptions")),
            ("replay_subscription", _("Can replay and reset subscriptions")),
            ("skip_event", _("Can skip events and discard parked streams")),
        ]

    def __str__(self) -> str:
        return self.name


class CursorQuerySet(models.QuerySet["Cursor"]):
    """Cursors. A process that holds one of an older revision drops its page."""

    def bump_revision(self) -> int:
        return self.update(revision=models.F("revision") + 1)

    def move(self, **columns: Any) -> int:
        """Write columns, such as another state, and clear the error."""
        values = {**Cursor.WELL, "revision": models.F("revision") + 1, **columns}
        return self.update(**values)


class Cursor(models.Model):
    """Where one partition of a subscription stands in one log."""

    #: Columns of a cursor that does not fail.
    WELL: ClassVar = {"error": "", "failures": 0, "retry_at": None}

    id = models.BigAutoField(primary_key=True)
    subscription = models.CharField(_("subscription"), max_length=80)
    partition = models.PositiveSmallIntegerField(_("partition"))
    #: Of how many.
    partitions = models.PositiveSmallIntegerField(_("partitions"), default=1)
    #: Table of the log.
    log = models.CharField(_("log"), max_length=128)
    #: Counts the writes of this row: the condition of the next one.
    revision = models.BigIntegerField(_("revision"), default=0)
    #: The cursor in JSON, as ``eventlog.state`` reads it.
    state = models.TextField(_("state"))
    #: Highest position handled; for people, and for what must not be pruned.
    position = models.BigIntegerField(_("position"), default=0)
    handled = models.BigIntegerField(_("events handled"), default=0)
    moved_at = models.DateTimeField(_("moved at"), db_default=DatabaseNow())
    #: Why it has stopped: type, message and notes of the exception; empty while it runs.
    error = models.TextField(_("error"), blank=True, default="")
    failures = models.PositiveIntegerField(_("failures in a row"), default=0)
    #: Not before this time is it tried again.
    retry_at = models.DateTimeField(_("next attempt"), null=True)
    #: The event that fails, once it is known (``subscriptions.handling``).
    failed_event = models.JSONField(_("failed event"), null=True, editable=False)
    #: Where it was when counting began (``subscriptions.counting``); null: it is not counted.
    counted = models.JSONField(_("counted since"), null=True, editable=False)

    objects = CursorQuerySet.as_manager()

    class Meta:
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


class ParkedStream(models.Model):
    """A stream that one subscription has parked; its other streams are handled."""

    id = models.BigAutoField(primary_key=True)
    subscription = models.CharField(_("subscription"), max_length=80)
    partition = models.PositiveSmallIntegerField(_("partition"))
    log = models.CharField(_("log"), max_length=128)
    stream = models.CharField(_("stream"), max_length=255)
    #: First version that was not handled.
    version = models.BigIntegerField(_("first version not handled"))
    #: Position of that event; nothing from here on may be pruned.
    position = models.BigIntegerField(_("position"))
    error = models.TextField(_("error"))
    #: The event that failed, as on a cursor; null where it is not known, or versions are missing.
    failed_event = models.JSONField(_("failed event"), null=True, editable=False)
    parked_at = models.DateTimeField(_("parked at"), db_default=DatabaseNow(), editable=False)
    #: A person has asked for another attempt.
    released = models.BooleanField(_("released"), default=False)

    class Meta:
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
        """Write columns, unless a process or a person has moved the stream since it was read."""
        rows = ParkedStream.objects.using(self._state.db).filter(pk=self.pk, version=self.version)
        return bool(rows.update(**columns))


class DeliveredVersion(models.Model):
    """How far a reader by time has handled a stream: its cursor alone cannot tell (``by_time``)."""

    id = models.BigAutoField(primary_key=True)
    subscription = models.CharField(_("subscription"), max_length=80)
    log = models.CharField(_("log"), max_length=128)
    stream = models.CharField(_("stream"), max_length=255)
    version = models.BigIntegerField(_("highest version handled"))
    #: Of the cursor's state; a replay starts another run, and rows of an older one are ignored.
    run = models.CharField(_("run"), max_length=32)

    class Meta:
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
