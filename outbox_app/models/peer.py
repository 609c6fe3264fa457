"""Peers: the services that prepared events are exchanged with over HTTP.

A peer is registered here or in the setting ``PEERS``, which wins. Its address is the only one that
is called, its keys are the only ones that are believed. The row holds no secret: what signs is
named by reference, an environment variable or a file.
"""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _


class Peer(models.Model):
    """A service that prepares events here, that keeps ours, or both."""

    class Direction(models.TextChoices):
        SENDER = "sender", _("prepares events here")
        KEEPER = "keeper", _("keeps events of ours")
        BOTH = "both", _("both")

    id = models.BigAutoField(primary_key=True)
    #: Without a colon, which the names of senders that are aliases have.
    name = models.CharField(
        _("name"), max_length=80, unique=True, validators=[RegexValidator(r"\A[^\s:/]+\Z")]
    )
    direction = models.CharField(_("direction"), max_length=6, choices=Direction.choices)
    #: Of its door; "prepared/" or "check" follows.
    address = models.CharField(_("address"), max_length=500)
    #: Alias of the fences of what it keeps.
    database = models.CharField(_("database"), max_length=100, default="default")
    #: Each with "id" and one of "public", "private" and "secret"; valid "from" and "until".
    keys = models.JSONField(_("keys"), default=list)
    #: Patterns of what it may prepare: types of events, their topics, tasks of jobs.
    types = models.JSONField(_("types"), default=list, blank=True)
    topics = models.JSONField(_("topics"), default=list, blank=True)
    jobs = models.JSONField(_("jobs"), default=list, blank=True)
    #: Patterns of the commands that it may execute: "bank.account.withdraw".
    commands = models.JSONField(_("commands"), default=list, blank=True)
    #: Of one request: "events" and "bytes".
    limits = models.JSONField(_("limits"), default=dict, blank=True)

    class Meta:
        db_table = "outbox_peer"
        verbose_name = _("peer")
        verbose_name_plural = _("peers")

    def __str__(self) -> str:
        return self.name
