"""Verifies and erases entities. The admin shows them.

A TYPE is a label such as bank.Account, or its table.

  verify [TYPE]       compare rows, heads and newest versions, while commands continue. --repair
                      writes the row or the head from the newest version, and prints what it did
  erase TYPE ID       empty the request, answer and state of all versions, and remove the row; needs
                      a --reason. Version numbers and command ids stay. It cannot be undone

  manage.py outbox_entities verify bank.Account
  manage.py outbox_entities erase bank.Account a-17 --reason "Request 88 of the customer"

Exit codes: 0 done; 1 verify has found differences and not repaired them, or there is no such
entity; 2 wrong arguments, no such type, or no tables; 130 interrupted.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ....aliases import model_alias
from ....management.base import OutboxCommand
from ....models.counting import counted, shown_count
from ....process.preflight import require_migrated
from ... import maintenance
from ...verification import verify


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        verified, erased = map(actions.add_parser, ("verify", "erase"))
        verified.add_argument("type", nargs="?", metavar="TYPE", help="one type (default: all)")
        repair = "write rows and heads from the newest versions"
        verified.add_argument("--repair", action="store_true", help=repair)
        erased.add_argument("type", metavar="TYPE", help="label or table of the type")
        erased.add_argument("id", metavar="ID", help="id of the entity")
        why = "why; kept with the versions"
        erased.add_argument("--reason", required=True, metavar="TEXT", help=why)
        self.add_no_input(erased)
        for each in actions.choices.values():
            alias = "database alias (default: the type's)"
            each.add_argument("--database", metavar="ALIAS", help=alias)

    def handle(self, *, action: str, database: str | None, **options: Any) -> None:
        types = maintenance.entity_types()
        if options.get("type") is not None:
            types = [maintenance.entity_named(options["type"])]
        found = {each: database or model_alias(each.versions) for each in types}
        for each, using in found.items():
            require_migrated(using)
            require_migrated(using, each)
        getattr(self, f"_{action}")(found, **options)

    def _verify(self, types: dict[Any, str], *, repair: bool, **options: Any) -> None:
        arguments: Any = {"repair": repair, "write": self.write}
        if any([verify(each, using=using, **arguments) for each, using in types.items()]):
            raise SystemExit(1)

    def _erase(self, types: dict[Any, str], *, id: str, reason: str, **options: Any) -> None:
        [(entity, using)] = types.items()
        name = f"{entity._meta.label} {id!r}"
        if options["interactive"]:
            count = shown_count(counted(entity.history(id, using=using)))
            self.confirm(f"Erase {name}, {count} versions?")
        arguments: Any = {"reason": reason, "by": self.user, "using": using, "write": self.write}
        emptied = maintenance.erase(entity, id, **arguments)
        self.write(f"Erased {name}: {emptied} versions emptied.")
        self.write(
            "Archives, backups, projections, and events and jobs of its commands may still hold "
            "copies."
        )
