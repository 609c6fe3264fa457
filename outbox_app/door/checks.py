"""Peers that exchange messages with this service: their keys, rows and clocks.

Rows of the table are read on the alias of the outbox only, if its database is among those being
checked. ``migrate`` checks before it makes tables and columns: a table that cannot be read is not
checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import django.db
from django.core.checks import CheckMessage, Error, Warning

from ..aliases import outbox_alias
from .clocks import wrong_clocks
from .conf import door_settings
from .models import Peer
from .peers import FIELDS, SIGNS, VERIFIES, peer_faults, valid_keys

HINT = "docs/reference/door.md lists the fields of a peer."


def check_peers(**kwargs: Any) -> Iterator[CheckMessage]:
    for name, fields in door_settings().PEERS.items():
        faults = peer_faults(name, fields)
        for fault in faults:
            text = f"The peer {name!r} of OUTBOX['PEERS'] {fault}."
            yield Error(text, hint=HINT, id="outbox.E003")
        if not faults:
            yield from _check_keys(Peer(name=name, **fields))


def check_peer_table(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterator[CheckMessage]:
    using = outbox_alias()
    if using in (databases or ()):
        with suppress(django.db.Error):
            yield from _check_rows(using)


def _check_rows(using: str) -> Iterator[CheckMessage]:
    for peer in Peer.objects.using(using):
        faults = peer_faults(peer.name, {name: getattr(peer, name) for name in FIELDS})
        for fault in faults:
            yield Error(f"The peer {peer.name!r} {fault}.", hint=HINT, id="outbox.E045")
        if not faults and peer.name not in door_settings().PEERS:
            yield from _check_keys(peer)
    for name, seconds in wrong_clocks(using=using).items():
        yield Warning(
            f"The clock of the peer {name!r} is off by {seconds:+d} seconds: its requests, or its "
            "answers, are refused.",
            hint="Set the clock of the peer, or of this host.",
            id="outbox.W036",
        )


def _check_keys(peer: Peer) -> Iterator[CheckMessage]:
    for kinds, what in ((SIGNS, "sign messages to it"), (VERIFIES, "verify its messages")):
        if not any(valid_keys(peer, kinds)):
            yield Warning(
                f"The peer {peer.name!r} has no key that is valid now to {what}: every request, "
                "and every answer, is refused.",
                hint="Add a key, or correct from and until of an existing key.",
                id="outbox.W035",
            )


ALWAYS = (check_peers,)
DATABASE = (check_peer_table,)
