"""Who works on what: one row a drainer (its heartbeat), one row a shard (its owner).

A process that runs subscriptions has a row for each, and leases on their partitions.

A drainer that is alive rewrites only its own row; shards are written when they change hands. The
protocol that keeps one owner a shard is ``process.lease``.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class Drainer(models.Model):
    """A running drainer. The row goes when the drainer stops, or when its lease has run out."""

    id = models.UUIDField(primary_key=True)
    #: What it shares with the others: "jobs", or "subscription:" and a name.
    resource = models.CharField(_("resource"), max_length=100, default="jobs")
    host = models.CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process id"))
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=DatabaseNow())
    #: Seconds after the heartbeat at which others may take its shards.
    lease_seconds = models.FloatField(_("lease in seconds"))
    published = models.BigIntegerField(_("published"), default=0)
    #: No longer counted: drainers of earlier versions write it while they are replaced.
    expired = models.BigIntegerField(_("dropped as expired"), default=0)
    dead = models.BigIntegerField(_("moved to dead"), default=0)
    #: What it is waiting for, in the exception's own words; empty when all is well.
    trouble = models.TextField(_("trouble"), blank=True, default="")

    class Meta:
        db_table = "outbox_drainer"
        verbose_name = _("drainer")
        verbose_name_plural = _("drainers")
        permissions = [
            ("view_query_drainer", _("Can see the queries of sessions that block work")),
        ]

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class Lease(models.Model):
    """Ownership of one part of a resource, for example of one shard of the jobs."""

    resource = models.CharField(_("resource"), max_length=100)
    part = models.PositiveSmallIntegerField(_("part"))
    #: A Drainer's id. No foreign key: taking over must not wait for a lock on the drainer's row.
    owner = models.UUIDField(_("owner"), null=True)

    class Meta:
        db_table = "outbox_lease"
        verbose_name = _("lease")
        verbose_name_plural = _("leases")
        constraints = [
            models.UniqueConstraint(fields=["resource", "part"], name="outbox_lease_part"),
        ]

    def __str__(self) -> str:
        return f"{self.resource}[{self.part}]"
