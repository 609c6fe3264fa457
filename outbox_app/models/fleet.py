"""The fleet: peers that exchange prepared events over HTTP, servers, and the nodes of ids.

A peer is registered here or in the setting ``PEERS``, which takes precedence. Only its address is
called, and only its keys are accepted. The row of a server is a hint: no correctness depends on it.
"""

from __future__ import annotations

from uuid import uuid4

from django.core.validators import MaxValueValidator, RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..fields import CharField
from .clock import DatabaseNow

#: The number of datacentres in an id, and of nodes in each datacentre.
DATACENTRES, NODES = 8, 32


class Peer(models.Model):
    """A service that prepares events here, that keeps our prepared events, or both."""

    class Direction(models.TextChoices):
        SENDER = "sender", _("prepares events here")
        KEEPER = "keeper", _("keeps events of ours")
        BOTH = "both", _("both")

    id = models.BigAutoField(primary_key=True)
    #: A name has no colon, because a colon marks a sender that is a database alias.
    name = CharField(
        _("name"), max_length=80, unique=True, validators=[RegexValidator(r"\A[^\s:/]+\Z")]
    )
    direction = CharField(_("direction"), max_length=6, choices=Direction.choices)
    #: The URL of the peer's door, to which "prepared/" or "check" is appended.
    address = CharField(_("address"), max_length=500)
    #: The alias of the database with the fences of the events that the peer keeps.
    database = CharField(_("database"), max_length=100, default="default")
    #: A key has an "id", one of "public", "private" and "secret", and is valid "from" and "until".
    #: The row holds no secret: a key names an environment variable or a file.
    keys = models.JSONField(_("keys"), default=list)
    #: Patterns for what the peer may prepare: event types, their topics, and tasks of jobs.
    types = models.JSONField(_("types"), default=list, blank=True)
    topics = models.JSONField(_("topics"), default=list, blank=True)
    jobs = models.JSONField(_("jobs"), default=list, blank=True)
    #: Patterns for the commands that the peer may execute, such as "bank.account.withdraw".
    commands = models.JSONField(_("commands"), default=list, blank=True)
    #: The limits of one request: "events" and "bytes".
    limits = models.JSONField(_("limits"), default=dict, blank=True)

    class Meta:
        db_table = "outbox_peer"
        verbose_name = _("peer")
        verbose_name_plural = _("peers")

    def __str__(self) -> str:
        return self.name


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
        db_table = "outbox_server"
        verbose_name = _("server")
        verbose_name_plural = _("servers")
        indexes = [models.Index(fields=["service"], name="outbox_server_service")]

    def __str__(self) -> str:
        return f"{self.service} {self.node}"


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
        db_table = "outbox_node"
        verbose_name = _("node")
        verbose_name_plural = _("nodes")
        constraints = [
            models.UniqueConstraint(fields=["datacentre", "node"], name="outbox_node_pair"),
        ]

    def __str__(self) -> str:
        return f"{self.datacentre}/{self.node}"
