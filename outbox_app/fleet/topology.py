"""Which server of a service leads which slice: a pure function of a process's list of servers.

Rendezvous hashing with the servers' weights assigns each slice to a server, so a server that comes
or goes moves only its own slices. Each process computes the leaders from its own list. They are not
stored, and two processes need not agree: a command that is passed to a server other than the leader
is executed there, at the cost of a conflict at most.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache, partial
from hashlib import blake2b

from ..events.conf import SLICES
from ..process.lease import alive
from ..text import get_logger
from .cluster import known_of
from .conf import fleet_settings
from .models import Server
from .registry import SERVER, Member

logger = get_logger("outbox_app.fleet")

#: Seconds for which no command is passed to a server that has not answered.
AVOIDED = 5.0
_avoided: dict[str, float] = {}


def other_leader(slice: int) -> str:
    """Return the address of the other server that leads a slice, even if it does not answer.

    Return an empty string if this process leads the slice, or if no server does.
    """
    conf = fleet_settings()
    listed = conf.TOPOLOGY == "registered" and conf.SERVICE
    owners = leaders_of(known_of(conf.SERVICE).watch.listing().servers if listed else ())
    address = owners[slice] if owners else ""
    return "" if address == conf.ADDRESS else address


def leaders_of(members: Iterable[Member | Server]) -> tuple[str, ...]:
    """Return the leader's address for each slice of this service; empty without servers."""
    conf = fleet_settings()
    if not conf.SERVICE:
        return ()
    if conf.TOPOLOGY == "registered":
        found = [m for m in members if m.service == conf.SERVICE and m.kind == SERVER]
        leads = [(m.address, m.weight) for m in found if m.weight and not m.draining]
        return _allocation(tuple(sorted(leads)))
    return _allocation(tuple((address, 1) for address in conf.TOPOLOGY or ()))


@lru_cache(maxsize=8)
def _allocation(servers: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    if not servers:
        return ()
    return tuple(max(servers, key=partial(_score, n))[0] for n in range(SLICES))


def _score(slice: int, server: tuple[str, int]) -> float:
    address, weight = server
    digest = blake2b(f"{slice} {address}".encode(), digest_size=6).digest()
    return -weight / math.log((int.from_bytes(digest) + 0.5) / 2**48)


def is_avoided(address: str) -> bool:
    """Return whether commands are not passed to a server because it did not answer lately."""
    return time.monotonic() < _avoided.get(address, 0)


def avoid(address: str, commands: int, why: object) -> None:
    logger.warning(
        "Commands executed here, as the leader did not answer address=%s commands=%d error=%s",
        *(address, commands, why),
    )
    for each in list(_avoided):  # other threads may remove entries, too
        if not is_avoided(each):
            _avoided.pop(each, None)
    _avoided[address] = time.monotonic() + AVOIDED


def live_servers(*, using: str) -> list[Server]:
    """Return the servers in the database whose lease has not run out. Changes nothing."""
    return alive(Server.objects.using(using).filter(kind=Server.Kind.SERVER))


def slices(members: Iterable[Member | Server]) -> dict[str, int]:
    """Return the number of slices that each server of this service leads, by address."""
    return dict(sorted(Counter(leaders_of(members)).items()))
