"""Shows the processes of a service, drains servers, and sets their weights.

  servers           the processes registered now: servers, and clients that call other services
  drain NAME        send a server no more calls. It finishes the calls that it has
  weight NAME N     set the server's share of the calls, 0 to 100, relative to the weights of the
                    other servers. A drained server is no longer drained
  topology          how many of the 1024 slices of entities of routed types each server leads

NAME is an address, a node (host:pid) or an id, as servers shows them. Clients learn of a change
within two seconds. It lasts until the process ends: the next process starts with its settings.

  manage.py outbox_fleet servers --service shop --json
  manage.py outbox_fleet topology --id a-17
  manage.py outbox_fleet drain https://shop-3.example/outbox/

Exit codes: 0 done; 1 no such server; 2 wrong arguments, no tables, or a registry that cannot
change other servers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ....events.log.newevent import slice_of
from ....exceptions import InvalidArgument
from ....management.base import OutboxCommand
from ....process.preflight import require_migrated
from ...conf import fleet_settings
from ...registry import Registry, new_registry
from ...topology import leaders_of, slices


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        names = "servers", "drain", "weight", "topology"
        servers, drain, weight, topology = map(actions.add_parser, names)
        name = "of this service (default: OUTBOX['FLEET']['SERVICE'])"
        servers.add_argument("--service", metavar="NAME", help=name)
        servers.add_argument("--json", action="store_true", help="as JSON")
        for each in (drain, weight):
            each.add_argument("name", metavar="NAME", help="address, node or id of a server")
        weight.add_argument("weight", type=int, metavar="N", help="0 to 100")
        topology.add_argument("--id", help="of an entity: show which server leads it")

    def handle(self, *, action: str, **options: Any) -> None:
        registry = new_registry()  # it does not use answers that this process has cached
        if using := getattr(registry, "using", ""):
            require_migrated(using)
        getattr(self, f"_{action}")(registry, **options)

    def _servers(self, registry: Registry, *, service: str | None, json: bool, **_: Any) -> None:
        service = service or fleet_settings().SERVICE
        if not service:
            raise InvalidArgument("Which service? Add --service, or set OUTBOX['FLEET'].")
        found = sorted(registry.members(service), key=lambda each: (each.kind, each.node))
        if json:
            self.write_json([{**asdict(each), "id": str(each.id)} for each in found])
            return
        for each in found:
            weight = "draining" if each.draining else f"weight {each.weight}"
            takes = f"{weight} {each.address}" if each.address else ""
            lease = f"lease {each.lease_seconds:g} s"
            self.write(
                f"{each.kind}  {each.node}  {each.id}  {each.version}  {lease}  {takes}".rstrip()
            )
        self.write(f"{service}: {len(found)} registered")

    def _topology(self, registry: Registry, *, id: str | None, **_: Any) -> None:
        members = registry.members(fleet_settings().SERVICE)
        leaders = leaders_of(members)
        if not leaders:
            self.write("No server leads: commands are executed where they arrive.")
        elif id is not None:
            self.write(f"{id}: {leaders[slice_of(id)]}")
        else:
            for address, count in slices(members).items():
                self.write(f"{count:4} slices  {address}")

    def _drain(self, registry: Registry, *, name: str, **_: Any) -> None:
        self._change(registry, name, draining=True)

    def _weight(self, registry: Registry, *, name: str, weight: int, **_: Any) -> None:
        if not 0 <= weight <= 100:
            raise InvalidArgument(f"A weight must be from 0 to 100; got {weight}.")
        self._change(registry, name, weight=weight, draining=False)

    def _change(self, registry: Registry, name: str, **values: Any) -> None:
        count = registry.change(name, **values)
        if not count:
            raise CommandError(f"There is no server {name!r}. Nothing was changed.")
        self.write(f"Changed {count} server{'' if count == 1 else 's'}.")
