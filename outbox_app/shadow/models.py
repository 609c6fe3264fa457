"""What shadow mode records and compares: rows, notes, and results by task."""

from __future__ import annotations

from uuid import uuid4

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..database.clock import DatabaseNow
from ..fields import CharField

require_app("outbox_app.shadow")


class ShadowHalf(models.Model):
    """One half of what shadow mode compares: see ``jobs.staging.shadow``."""

    id = models.BigAutoField(primary_key=True)
    #: The two halves of a comparison have the same key.
    key = models.UUIDField(_("key"), unique=True, default=uuid4, editable=False)
    task = CharField(_("task"), max_length=255)
    #: Empty if ``delay_on_commit`` wrote the row, before its task had an id.
    task_id = CharField(_("task id"), max_length=255, blank=True, default="")
    at = models.DateTimeField(_("at"), db_default=DatabaseNow(), db_index=True, editable=False)

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class ShadowJob(ShadowHalf):
    """A row in place of a staged job: it exists if and only if its transaction committed."""

    class Meta(ShadowHalf.Meta):
        app_label = "outbox_shadow"
        db_table = "outbox_shadowjob"


class ShadowNote(ShadowHalf):
    """A task that the broker has taken. Its own connection writes the row, so rollbacks keep it."""

    in_transaction = models.BooleanField(_("in a transaction"), default=False)
    #: Why staging would have refused the call; empty if it would have accepted it.
    refused = CharField(_("refused"), max_length=255, blank=True, default="")

    class Meta(ShadowHalf.Meta):
        app_label = "outbox_shadow"
        db_table = "outbox_shadownote"


class ShadowResult(models.Model):
    """How often the comparison of a task had a certain outcome."""

    class Outcome(models.TextChoices):
        MATCHED = "matched", _("sent after its commit")
        EARLY = "early", _("sent before its commit")
        NEVER_SENT = "never_sent", _("committed and never sent")
        ROLLED_BACK = "rolled_back", _("sent for a rollback")
        REFUSED = "refused", _("staging would refuse the call")

    id = models.BigAutoField(primary_key=True)
    task = CharField(_("task"), max_length=255)
    outcome = CharField(_("outcome"), max_length=20, choices=Outcome.choices)
    count = models.BigIntegerField(_("count"))
    last_at = models.DateTimeField(_("last at"))
    last_task_id = CharField(_("last task id"), max_length=255, blank=True, default="")

    class Meta:
        app_label = "outbox_shadow"
        db_table = "outbox_shadowresult"
        verbose_name = _("shadow result")
        verbose_name_plural = _("shadow results")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["task", "outcome"], name="outbox_shadow_outcome"),
        ]

    def __str__(self) -> str:
        return f"{self.task} {self.outcome}: {self.count}"
