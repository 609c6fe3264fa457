"""What the fleet adds to the core: the servers that are listed, and what they lead.

The servers are those of the database's registry. A project without a service has no section, and
nothing is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from ..capability import Doors, Figure, Section, is_on
from ..monitoring.status import Question
from .conf import FleetKey, fleet_settings
from .models import Server
from .topology import live_servers, slices

if TYPE_CHECKING:
    from ..admin.tables import Table


@dataclass(frozen=True, slots=True)
class FleetSection(Section):
    #: Servers in the database's registry whose lease has not run out.
    servers: list[Server]

    @property
    def slices(self) -> dict[str, int]:
        """How many slices of entities each server of this service leads, by its address."""
        return slices(self.servers)

    def figures(self) -> Iterator[Figure]:
        # fmt: off
        yield Figure(Counter(each.service for each in self.servers), "outbox_servers",
                     "Servers of services whose lease has not run out.", ("service",))
        yield Figure(self.slices, "outbox_server_slices",
                     "Slices of entities, of 1024, that a server leads.", ("address",))
        # fmt: on

    def tables(self, site: str) -> Iterator[Table]:
        from ..admin.tables import Table, numbers, pairs

        if led := self.slices:
            rows = numbers(led)
            yield Table(_("Servers"), [pairs(_("Server"), _("Leads, of 1024 slices"), rows)])


class FleetDoors(Doors):
    name = "fleet"
    rank = 50
    settings = FleetKey
    empty = FleetSection([])

    def parts(self) -> Mapping[str, Any]:
        return {"servers": [Server]}

    def read(self, question: Question) -> FleetSection | None:
        asked = question.wants("servers") and fleet_settings().SERVICE
        if asked and is_on(question.database, Server):
            return FleetSection(live_servers(using=question.database))
        return None


DOORS = FleetDoors()
