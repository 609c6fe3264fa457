"""Who serves, and which server leads what: for pages, metrics, and the status of the outbox.

As the registry of the database has it. Reading changes nothing: a silent server is left out, and
its row stays for the next process that looks for servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..conf import fleet_settings
from ..models import DatabaseNow, Server
from .topology import allocation

#: Servers that are looked at: the newest.
LISTED = 256


def live_servers(*, using: str) -> list[Server]:
    """Return the newest servers whose lease has not run out. Changes nothing."""
    rows = Server.objects.using(using).filter(kind=Server.Kind.SERVER).order_by("-started_at")
    found = rows.annotate(now=DatabaseNow())[:LISTED]
    return [each for each in found if each.now < each.lease_ends_at]


def leaders_of(members: Iterable[Server]) -> tuple[str, ...]:
    """Return the address of the leader of each slice of this service's entities; empty: none."""
    service = fleet_settings().SERVICE
    return allocation(each for each in members if each.service == service) if service else ()


def slices(members: Iterable[Server]) -> dict[str, int]:
    """Return how many slices each server of this service leads, by its address."""
    return dict(sorted(Counter(leaders_of(members)).items()))
