"""``manage.py outbox_rebase``: subscriptions go on after a restore or a switch-over.

Thin: arguments in, ``subscriptions.rebase`` out.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...subscriptions.rebase import rebase_outbox
from ..base import TeachingCommand

HELP = """
Makes subscriptions go on after the database was restored from a dump, set back, or switched over to
by logical replication. They stand still until then (ForeignCursor): what a cursor has passed is
known by the transaction ids of the cluster it was made in.

Afterwards each subscription is given what it had not passed, and everything new; nothing twice.
Each log is one transaction: killed at any point, nothing of it has changed. Run again, it finds
nothing to do.

Events published after the restore and before this command must not be mistaken for old ones: name
the last position that is from before (--log, --last-id), or run this before anything is published.

Exit codes: 0 done, or nothing to do; 1 a cursor is damaged and was left as it is; 2 wrong
arguments, or it cannot be told what was passed.
"""


class Command(TeachingCommand):
    """Rebases cursors."""

    help = HELP

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--log", metavar="LOG", help="table of one log (default: all)")
        parser.add_argument(
            "--last-id",
            type=int,
            metavar="N",
            help="highest position of --log that is from before (default: the highest there is)",
        )
        parser.add_argument(
            "--upgraded",
            action="store_true",
            help="the cluster was made by pg_upgrade, which keeps transaction ids: only its "
            "identifier is new",
        )
        parser.add_argument("--dry-run", action="store_true", help="change nothing")
        parser.add_argument("--database", metavar="ALIAS", help="alias (default: the outbox's)")

    def handle(self, **options: Any) -> None:
        """Rebase."""
        code = rebase_outbox(
            using=options["database"],
            log=options["log"],
            last_id=options["last_id"],
            upgraded=options["upgraded"],
            dry_run=options["dry_run"],
            write=self.write,
        )
        if code:
            raise SystemExit(code)
