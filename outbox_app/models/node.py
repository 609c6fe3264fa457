"""Nodes: the part of an id that tells processes apart, and the time reserved for each.

The migration writes a row for each node. Every millisecond up to ``reserved_ms`` belongs, or did
belong, to a process. The value only grows, except when an owner gives back unused time.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

#: The number of datacentres in an id, and of nodes in each datacentre.
DATACENTRES, NODES = 8, 32


class Milliseconds(models.Func):
    """Milliseconds since the start of 2025, in UTC, by the clock of the database server."""

    template = "CAST((julianday('now') - 2460676.5) * 86400000 AS bigint)"
    arity = 0
    output_field = models.BigIntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "((extract(epoch from clock_timestamp()) - 1735689600) * 1000)::bigint"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "(TIMESTAMPDIFF(MICROSECOND, '2025-01-01', UTC_TIMESTAMP(6)) DIV 1000)"
        return self.as_sql(compiler, connection, template=template, **context)


class Node(models.Model):
    """A node of a datacentre, and the process that makes ids with it."""

    id = models.BigAutoField(primary_key=True)
    datacentre = models.PositiveSmallIntegerField(_("datacentre"))
    node = models.PositiveSmallIntegerField(_("node"))
    #: The id of the process; NULL once it has given the node back.
    owner = models.UUIDField(_("owner"), null=True)
    #: Every millisecond from the start of 2025 up to this one is, or was, reserved.
    reserved_ms = models.BigIntegerField(_("reserved up to"), default=0)

    class Meta:
        db_table = "outbox_node"
        verbose_name = _("node")
        verbose_name_plural = _("nodes")
        constraints = [
            models.UniqueConstraint(fields=["datacentre", "node"], name="outbox_node_pair"),
        ]

    def __str__(self) -> str:
        return f"{self.datacentre}/{self.node}"
