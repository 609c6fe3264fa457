"""Incidents: the recorded causes of extra publishes (promise P5).

After a kill it is unknown which rows the broker had taken already. So the cause is recorded, with
its shards and the range of ids that it may concern. A job published twice outside every incident is
a bug.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class Incident(models.Model):
    """One cause for which jobs may have been published more than once."""

    class Kind(models.TextChoices):
        """Why jobs may go twice."""

        TAKEOVER = "takeover", _("shards taken over from a dead drainer")
        UNKNOWN = "unknown", _("outcome of a publish unknown")
        REQUEUE = "requeue", _("requeued by a person")

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(_("kind"), max_length=20, choices=Kind.choices)
    created_at = models.DateTimeField(_("recorded at"), db_default=DatabaseNow(), db_index=True)
    drainer = models.CharField(_("drainer"), max_length=300, blank=True, default="")
    shards = models.JSONField(_("shards"), default=list)
    #: Ids of staged jobs that may be concerned, both ends included.
    first_id = models.BigIntegerField(_("first id"))
    last_id = models.BigIntegerField(_("last id"))
    detail = models.TextField(_("detail"), blank=True, default="")

    class Meta:
        db_table = "outbox_incident"
        verbose_name = _("incident")
        verbose_name_plural = _("incidents")

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.first_id}-{self.last_id}"
