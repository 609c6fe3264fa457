"""Shows, verifies, imports and erases entities.

A TYPE is a label such as bank.Account, or its table.

  list                the types, their tables, and how many rows they have, as JSON
  show TYPE ID        version and state of an entity, and its last versions with their answers, as
                      JSON; --version N: its state at that version
  verify [TYPE]       compare rows, heads and newest versions, while commands continue. --repair
                      writes the row or the head from the newest version, and prints what it did
  import FILE         execute a command for each line of JSON; - is standard input:
                      {"type": "bank.Account", "id": "a-17", "command": "deposit",
                       "arguments": {"amount": 5}, "command_id": "import-1"}
                      If it is interrupted, run it again: commands already answered do not run twice
  erase TYPE ID       empty the request, answer and state of all versions, and remove the row; needs
                      a --reason. Version numbers and command ids stay. It cannot be undone

  manage.py outbox_entities verify bank.Account
  manage.py outbox_entities erase bank.Account a-17 --reason "Request 88 of the customer"

Exit codes: 0 done; 1 verify has found differences and not repaired them, a line of an import has
failed, or there is no such entity; 2 wrong arguments, no such type, or no tables; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandParser

from ....events.aliases import log_alias
from ....exceptions import InvalidArgument
from ....management.base import OutboxCommand
from ....models.counting import counted, shown_count
from ....process.preflight import require_migrated
from ... import maintenance
from ...verification import verify


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        names = ("list", "show", "verify", "import", "erase")
        _, shown, verified, imported, erased = map(actions.add_parser, names)
        for each in (shown, erased):
            each.add_argument("type", metavar="TYPE", help="label or table of the type")
            each.add_argument("id", metavar="ID", help="id of the entity")
        then = "its state at this version"
        shown.add_argument("--version", dest="at", type=int, metavar="N", help=then)
        verified.add_argument("type", nargs="?", metavar="TYPE", help="one type (default: all)")
        repair = "write rows and heads from the newest versions"
        verified.add_argument("--repair", action="store_true", help=repair)
        imported.add_argument("file", metavar="FILE", help="lines of JSON; - is standard input")
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
        found = {each: database or log_alias(each.versions) for each in types}
        for each, using in found.items():
            require_migrated(using)
            require_migrated(using, each)
        getattr(self, f"_{action}")(found, database=database, **options)

    def _list(self, types: dict[Any, str], **options: Any) -> None:
        self.write_json([maintenance.summary(each, using=using) for each, using in types.items()])

    def _show(self, types: dict[Any, str], *, id: str, at: int | None, **options: Any) -> None:
        [(entity, using)] = types.items()
        self.write_json(maintenance.describe(entity, id, version=at, using=using))

    def _verify(self, types: dict[Any, str], *, repair: bool, **options: Any) -> None:
        arguments: Any = {"repair": repair, "write": self.write}
        if any([verify(each, using=using, **arguments) for each, using in types.items()]):
            raise SystemExit(1)

    def _import(
        self, types: dict[Any, str], *, database: str | None, file: str, **options: Any
    ) -> None:
        if file == "-" and sys.stdin is None:  # descriptor 0 may be a connection by now
            raise InvalidArgument("-: Standard input is closed.")
        try:
            # Invalid UTF-8 makes only its own line fail.
            read: Any = {"encoding": "utf-8", "errors": "surrogateescape"}
            with open(0 if file == "-" else file, closefd=file != "-", **read) as lines:
                failed = maintenance.import_commands(lines, using=database, write=self.write)
        except OSError as error:
            raise InvalidArgument(f"{file}: {error.strerror}.") from error
        if failed:
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
