"""Peers: the services that call this one over HTTP, or that this one calls.

A peer is registered here or in the setting ``PEERS``, which takes precedence. Only its address is
called, and only its keys are accepted.
"""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..fields import CharField

require_app("outbox_app.door")


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
        app_label = "outbox_door"
        db_table = "outbox_peer"
        verbose_name = _("peer")
        verbose_name_plural = _("peers")

    def __str__(self) -> str:
        return self.name
