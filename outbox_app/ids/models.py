"""Nodes: the time of each that is reserved for ids."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..capability import require_app

require_app("outbox_app.ids")


class Node(models.Model):
    """The part of an id that tells processes apart. The migration writes a row for each node."""

    id = models.BigAutoField(primary_key=True)
    datacentre = models.PositiveSmallIntegerField(_("datacentre"))
    node = models.PositiveSmallIntegerField(_("node"))
    #: The id of the process; NULL once it has given the node back.
    owner = models.UUIDField(_("owner"), null=True)
    #: Every millisecond from the start of 2025 up to this one is, or was, reserved by a process.
    #: The value only grows, except when an owner gives back unused time.
    reserved_ms = models.BigIntegerField(_("reserved up to"), default=0)

    class Meta:
        app_label = "outbox_ids"
        db_table = "outbox_node"
        verbose_name = _("node")
        verbose_name_plural = _("nodes")
        constraints = [
            models.UniqueConstraint(fields=["datacentre", "node"], name="outbox_node_pair"),
        ]

    def __str__(self) -> str:
        return f"{self.datacentre}/{self.node}"
