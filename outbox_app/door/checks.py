"""Peers that exchange messages with this service: their fields, and their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Warning

from .conf import door_settings
from .peers import FIELDS, SIGNS, VERIFIES, Peer, peer_faults, valid_keys

HINT = f"Correct it. The fields of a peer are {', '.join(FIELDS)}."


def check_peers(**kwargs: Any) -> Iterator[CheckMessage]:
    for name, fields in door_settings().PEERS.items():
        faults = peer_faults(name, fields)
        for fault in faults:
            text = f"The peer {name!r} of OUTBOX['PEERS'] {fault}."
            yield Error(text, hint=HINT, id="outbox.E003")
        if not faults:
            yield from _check_keys(Peer(name=name, **fields))


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
