"""The inbox: ids of jobs whose effects are committed.

A worker inserts the id in the same transaction as the effects, so the id is there if and only if
they are. The primary key is what makes two deliveries at the same moment wait for one another.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class InboxEntry(models.Model):
    """A job that was executed, once."""

    job_id = models.CharField(_("job id"), max_length=255, primary_key=True)
    task = models.CharField(_("task"), max_length=255)
    handled_at = models.DateTimeField(_("handled at"), db_default=DatabaseNow(), db_index=True)
    #: What the task returned, in kombu's JSON, where it may be asked for; empty for None.
    result = models.TextField(_("result"), blank=True, default="")

    class Meta:
        db_table = "outbox_inbox"
        verbose_name = _("inbox entry")
        verbose_name_plural = _("inbox entries")

    def __str__(self) -> str:
        return f"{self.task}[{self.job_id}]"
