"""Makes subscriptions continue after the database was restored from a dump, set back, or replaced
by a logical replica. Until then they have stopped with ForeignCursor: a cursor consists of
transaction ids, which mean nothing in another cluster.

Afterwards each subscription gets the events that it had not handled and all new ones, none twice.
Each log is rebased in one transaction: if the command is killed, that log is unchanged. It can be
run again, and then finds nothing to do.

Run it before new events are published, or name the last position from before the restore (--log,
--last-id): without it, the command refuses if it detects events published since.

Exit codes: 0 done, or nothing to do; 1 a cursor is damaged and was left as it is; 2 wrong
arguments, or the events that were handled cannot be determined.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ....management.base import OutboxCommand
from ...subscriptions.rebase import rebase_outbox


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--log", metavar="LOG", help="table of one log (default: all)")
        last = "last position of --log from before the restore (default: the last position)"
        add("--last-id", type=int, metavar="N", help=last)
        upgraded = (
            "the cluster was made by pg_upgrade, which keeps transaction ids: only its identifier "
            "is new"
        )
        add("--upgraded", action="store_true", help=upgraded)
        add("--dry-run", action="store_true", help="change nothing")
        add("--database", metavar="ALIAS", help="database alias (default: each log's)")

    def handle(self, **options: Any) -> None:
        self.run(rebase_outbox, write=self.write, **options)
