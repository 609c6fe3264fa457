"""Who works on what: one row a process (its heartbeat), one row a part of the work (its owner).

A drainer has a row and leases on shards; a process that runs subscriptions has a row for each of
them, and leases on their partitions. A live process rewrites only its own row; leases are written
when they change hands. The protocol that keeps one owner a part is ``process.lease``.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class Process(models.Model):
    """A running process. The row goes when the process stops, or when its lease has run out."""

    id = models.UUIDField(primary_key=True)
    #: What it shares with the others: "jobs", "prepared", "retention", "subscription:" and a name,
    #: "sink:" and a log.
    resource = models.CharField(_("resource"), max_length=100, default="jobs")
    host = models.CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process id"))
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=DatabaseNow())
    #: Seconds after the heartbeat at which others may take over its leases.
    lease_seconds = models.FloatField(_("lease in seconds"))
    #: Jobs published, or events handled.
    done = models.BigIntegerField(_("done"), default=0)
    dead = models.BigIntegerField(_("moved to dead"), default=0)
    #: What it is waiting for, in the exception's own words; empty when all is well.
    trouble = models.TextField(_("trouble"), blank=True, default="")

    class Meta:
        db_table = "outbox_process"
        verbose_name = _("process")
        verbose_name_plural = _("processes")
        permissions = [("view_query_process", _("Can see the queries of sessions that block work"))]

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class Overview(Process):
    """The overview's place in the menu of the admin: no table, and no permission of its own."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = _("overview")


class Lease(models.Model):
    """Ownership of one part of a resource, for example of one shard of the jobs."""

    resource = models.CharField(_("resource"), max_length=100)
    part = models.PositiveSmallIntegerField(_("part"))
    #: The id of a Process. No foreign key: a takeover must not wait for a lock on its row.
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
