"""Deletes old rows, oldest first, in small transactions. Run it once a day.

Exit codes: 0 done; 2 wrong arguments, or it cannot be determined which rows are still needed
(as after a restore). Rows of other tables are still removed.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...capability import all_doors, setting
from ...exceptions import InvalidArgument
from ...retention.rows import BATCH_SIZE, all_kept, kept_for, prune
from ..base import OutboxCommand


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        for name, kept in all_kept().items():
            days = kept.days if isinstance(kept.days, int) else setting(kept.days)
            age = f"older than {days} days" if kept.days == days else f"{kept.days} is {days}"
            add(f"--{name}", action="store_true", help=f"{kept.help} ({age})")
        for doors in all_doors():
            doors.prune_arguments(add)
        age = "remove rows that are older, at least 1 (default: the setting of the kind)"
        add("--older-than", type=int, metavar="DAYS", help=age)
        alias = "database alias (default: the alias of each kind's rows)"
        add("--database", metavar="ALIAS", help=alias)
        rows = f"rows removed at once (default {BATCH_SIZE})"
        add("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help=rows)
        add("--dry-run", action="store_true", help="print how many of each, and remove nothing")

    def handle(self, **options: Any) -> None:
        # Before the first kind is pruned, as these refuse wrong arguments.
        chosen = {
            name: options["database"] or kept.alias()
            for name, kept in all_kept().items()
            if options[name]
        }
        for name in chosen:
            kept_for(name, options["older_than"])
        others = [work for doors in all_doors() if (work := doors.pruning(options))]
        if not chosen and not others:
            kinds = [f"--{name}" for name in all_kept()]
            kinds += [text for doors in all_doors() for text in doors.prunes]
            raise InvalidArgument(f"Say what to prune: {', '.join(kinds)}, or several.")
        arguments = {name: options[name] for name in ("older_than", "batch_size", "dry_run")}
        for name, alias in chosen.items():
            prune(name, alias, **arguments, write=self.write)
        for work in others:
            work(**arguments, write=self.write)
