"""The registered servers of a service. A row is a hint: no correctness depends on it."""

from __future__ import annotations

from uuid import uuid4

from django.core.validators import MaxValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..database.clock import DatabaseNow
from ..fields import CharField

require_app("outbox_app.fleet")


class Server(models.Model):
    """A process of a service: it is called at its address, or calls only.

    The process keeps the row alive by its heartbeat, and deletes the row when it ends. Other
    processes delete rows whose lease has expired.
    """

    class Kind(models.TextChoices):
        SERVER = "server", _("is called")
        CLIENT = "client", _("calls only")

    id = models.UUIDField(primary_key=True, default=uuid4)
    service = CharField(_("service"), max_length=80)
    kind = CharField(_("kind"), max_length=6, choices=Kind.choices, default=Kind.SERVER)
    #: The address of the server's door. Processes that share a socket share the address.
    address = CharField(_("address"), max_length=500, blank=True)
    #: The server's share of the calls, relative to the other weights; 0 for no calls.
    weight = models.PositiveSmallIntegerField(
        _("weight"), default=100, validators=[MaxValueValidator(100)]
    )
    #: The host and the process id.
    node = CharField(_("node"), max_length=255)
    #: The version of outbox_app.
    version = CharField(_("version"), max_length=40)
    #: Whether the server takes no new calls.
    draining = models.BooleanField(_("draining"), default=False)
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=DatabaseNow())
    lease_seconds = models.FloatField(_("lease in seconds"))

    class Meta:
        app_label = "outbox_fleet"
        db_table = "outbox_server"
        verbose_name = _("server")
        verbose_name_plural = _("servers")
        indexes = [models.Index(fields=["service"], name="outbox_server_service")]

    def __str__(self) -> str:
        return f"{self.service} {self.node}"
