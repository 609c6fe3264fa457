"""Processes of the fleet: one row each, kept alive by its own heartbeat.

A server is called at its address; a client calls only. The row goes when the process ends, or when
its lease has run out and another process looks. It is a hint: nothing that is true depends on it.
"""

from __future__ import annotations

from uuid import uuid4

from django.core.validators import MaxValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class Server(models.Model):
    """A process of a service, as it has registered."""

    class Kind(models.TextChoices):
        SERVER = "server", _("is called")
        CLIENT = "client", _("calls only")

    id = models.UUIDField(primary_key=True, default=uuid4)
    service = models.CharField(_("service"), max_length=80)
    kind = models.CharField(_("kind"), max_length=6, choices=Kind.choices, default=Kind.SERVER)
    #: Of its door. Processes behind one socket have the same.
    address = models.CharField(_("address"), max_length=500, blank=True)
    #: Share of the calls beside the others'; 0: none.
    weight = models.PositiveSmallIntegerField(
        _("weight"), default=100, validators=[MaxValueValidator(100)]
    )
    #: Host and process id.
    node = models.CharField(_("node"), max_length=255)
    #: Of outbox_app.
    version = models.CharField(_("version"), max_length=40)
    #: Takes no new calls.
    draining = models.BooleanField(_("draining"), default=False)
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=DatabaseNow())
    #: Seconds after the heartbeat at which any other process may remove the row.
    lease_seconds = models.FloatField(_("lease in seconds"))

    class Meta:
        db_table = "outbox_server"
        verbose_name = _("server")
        verbose_name_plural = _("servers")
        indexes = [models.Index(fields=["service"], name="outbox_server_service")]

    def __str__(self) -> str:
        return f"{self.service} {self.node}"
