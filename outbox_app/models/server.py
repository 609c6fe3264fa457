"""Processes of the fleet: a row for each, which the process keeps alive by its heartbeat.

A server is called at its address; a client only calls. The process deletes its row when it ends;
other processes delete rows whose lease has expired. A row is a hint: no correctness depends on it.
"""

from __future__ import annotations

from uuid import uuid4

from django.core.validators import MaxValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow


class Server(models.Model):
    """A registered process of a service."""

    class Kind(models.TextChoices):
        SERVER = "server", _("is called")
        CLIENT = "client", _("calls only")

    id = models.UUIDField(primary_key=True, default=uuid4)
    service = models.CharField(_("service"), max_length=80)
    kind = models.CharField(_("kind"), max_length=6, choices=Kind.choices, default=Kind.SERVER)
    #: The address of the server's door. Processes that share a socket share the address.
    address = models.CharField(_("address"), max_length=500, blank=True)
    #: The server's share of the calls, relative to the other weights; 0 for no calls.
    weight = models.PositiveSmallIntegerField(
        _("weight"), default=100, validators=[MaxValueValidator(100)]
    )
    #: The host and the process id.
    node = models.CharField(_("node"), max_length=255)
    #: The version of outbox_app.
    version = models.CharField(_("version"), max_length=40)
    #: Whether the server takes no new calls.
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
