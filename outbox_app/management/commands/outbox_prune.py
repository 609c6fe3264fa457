"""``manage.py outbox_prune``: removes what was kept long enough. For cron, once a day.

Thin: arguments in, ``operations.retention`` out. Interrupting it loses nothing.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...operations.retention import BATCH_SIZE, prune_inbox, prune_incidents
from ..base import TeachingCommand

HELP = """
Removes rows that were kept long enough, oldest first, in small transactions. Run it once a day.

  --inbox       ids of executed jobs (table outbox_inbox). While an id is there, another delivery of
                its job does nothing; once it is gone, the job would be executed again.
  --incidents   recorded causes of extra publishes (table outbox_incident).

Exit codes: 0 done; 2 wrong arguments.
"""


class Command(TeachingCommand):
    """Removes old inbox ids and incidents."""

    help = HELP

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--inbox", action="store_true", help="remove old ids of executed jobs")
        parser.add_argument("--incidents", action="store_true", help="remove old incidents")
        parser.add_argument(
            "--older-than",
            type=int,
            metavar="DAYS",
            help="age of what is removed, at least 1 (default: OUTBOX['INBOX_RETENTION_DAYS'] and "
            "OUTBOX['INCIDENT_RETENTION_DAYS'], 30)",
        )
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="database alias (default: that of the inbox; for incidents, of the outbox)",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=BATCH_SIZE,
            metavar="N",
            help=f"rows removed at once (default {BATCH_SIZE})",
        )

    def handle(self, **options: Any) -> None:
        """Prune what was named."""
        prunes = {"inbox": prune_inbox, "incidents": prune_incidents}
        chosen = [prune for name, prune in prunes.items() if options[name]]
        if not chosen:
            raise CommandError("Say what to prune: --inbox, --incidents, or both.", returncode=2)
        for prune in chosen:
            prune(
                using=options["database"],
                older_than=options["older_than"],
                batch_size=options["batch_size"],
                write=self.write,
            )
