"""Servers that no other can call, and entity types whose commands cannot be passed on.

Neither loses a command: one that is not passed on is executed where it arrives. The peer with which
the servers of a service call one another may be in the table, so its absence is reported only if
the outbox's database is among those being checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from django.core.checks import CheckMessage, Error, Warning

from ..conf import FleetSettings, fleet_settings
from ..door.peers import is_this_host, peer_named
from ..entities.operations import entity_types
from ..exceptions import InvalidPeer
from ..models import Peer
from .aliases import is_checked
from .fleet import check_fleet
from .messages import listed


def check_reach(**kwargs: Any) -> Iterator[CheckMessage]:
    """Report, before a deploy, settings that keep servers from being called."""
    if (conf := _sound()) is None:
        return
    host = urlsplit(conf.ADDRESS).hostname
    if host and is_this_host(host):
        yield Warning(
            f"OUTBOX['FLEET']['ADDRESS'] is {conf.ADDRESS!r}: no other host can call it.",
            hint="Give each server the address at which the other servers reach it.",
            id="outbox.W041",
        )
    if not conf.SERVICE and (names := _routed()):
        yield Warning(
            f"{listed(names)} is routed, but OUTBOX['FLEET'] has no SERVICE: no server can be "
            "found, so commands are executed where they arrive.",
            hint="Set SERVICE and ADDRESS, or remove routed = True.",
            id="outbox.W040",
        )


def check_routed(databases: Sequence[str] | None = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report that commands cannot be passed on: neither the setting nor the table has the peer."""
    conf, names = _sound(), _routed()
    if conf is None or not conf.SERVICE or conf.TOPOLOGY is None or not names:
        return
    if not is_checked(Peer, databases):
        return
    try:
        peer_named(conf.SERVICE, Peer.Direction.BOTH)
    except InvalidPeer:
        yield Warning(
            f"{listed(names)} is routed, but no peer {conf.SERVICE!r} has the direction 'both': "
            "servers of this service cannot call one another, so commands are executed where they "
            "arrive.",
            hint="Add the peer to OUTBOX['PEERS'], with a key that all servers have.",
            id="outbox.W040",
        )


def _sound() -> FleetSettings | None:
    """Return the fleet's settings, or None if they have errors."""
    if any(isinstance(each, Error) for each in check_fleet()):
        return None
    return fleet_settings()


def _routed() -> list[str]:
    return [each._meta.label for each in entity_types() if each.routed]
