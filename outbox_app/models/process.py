"""Processes and leases: a row for each process, and a row for each part of the work.

A drainer has a row, and leases on shards. A process that runs subscriptions has a row for each
subscription, and leases on partitions. For its heartbeat a process updates only its own row.
``process.lease`` ensures that a part has one owner.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..database.clock import DatabaseNow
from ..fields import CharField, TextField


class Process(models.Model):
    """A running process. The row is deleted when the process stops, or after its lease expired."""

    id = models.UUIDField(primary_key=True)
    #: The work that processes share: "jobs", "prepared", "retention", "subscription:" and a name,
    #: "sink:" and a log.
    resource = CharField(_("resource"), max_length=100, default="jobs")
    host = CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process id"))
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=DatabaseNow())
    #: Seconds after the heartbeat at which other processes may take over its leases.
    lease_seconds = models.FloatField(_("lease in seconds"))
    #: The number of jobs published, or of events handled.
    done = models.BigIntegerField(_("done"), default=0)
    dead = models.BigIntegerField(_("moved to dead"), default=0)
    #: The type and message of the error that the process backs off from; empty without one.
    trouble = TextField(_("trouble"), blank=True, default="")

    class Meta:
        app_label = "outbox_app"
        db_table = "outbox_process"
        verbose_name = _("process")
        verbose_name_plural = _("processes")
        permissions = [("view_query_process", _("Can see the queries of sessions that block work"))]

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class Overview(Process):
    """The overview's entry in the menu of the admin. It has no table and no permissions."""

    class Meta:
        app_label = "outbox_app"
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = _("overview")


class Lease(models.Model):
    """Ownership of one part of a resource, for example of one shard of the jobs."""

    resource = CharField(_("resource"), max_length=100)
    part = models.PositiveSmallIntegerField(_("part"))
    #: The id of a Process. Not a foreign key: a takeover must not wait for a lock on that row.
    owner = models.UUIDField(_("owner"), null=True)

    class Meta:
        app_label = "outbox_app"
        db_table = "outbox_lease"
        verbose_name = _("lease")
        verbose_name_plural = _("leases")
        constraints = [
            models.UniqueConstraint(fields=["resource", "part"], name="outbox_lease_part"),
        ]

    def __str__(self) -> str:
        return f"{self.resource}[{self.part}]"
