"""Deletes old rows, oldest first, in small transactions. Run it once a day.

  --inbox       ids of executed jobs (table outbox_inbox). While an id is there, another delivery of
                its job does nothing; once it is gone, the job would be executed again.
  --incidents   recorded causes of extra publishes (table outbox_incident).
  --counters    counters of drainers and subscriptions (in table outbox_statistic). A drainer
                removes those of its own database by itself.
  --results     results of django.tasks (table outbox_taskresult), except results whose job is still
                staged or dead.
  --prepared    prepared events that were confirmed or cancelled (in table outbox_prepared).
  --commands    ids of commands whose versions --events, --archived or SINK have removed (table
                outbox_prunedcommand). While an id is there, a repeat of its command raises
                AnswerArchived or AnswerGone; once it is gone, the command would be executed again.
  --fences      what became of a sender's transactions (table outbox_fence). Needs --database, the
                alias of the sender. A question about an older transaction is answered "too_old".
  --events      events of the logs, from the oldest one on. It stops at the first event that is too
                young or that a subscription has not handled, and prints why. Versions of streams
                continue where they were.
  --archived DIR  like --events, but only events that are in the archive DIR, whose files are
                checked first (see manage.py outbox_pipeline archive). It prunes one log: --log, or
                outbox_event.

Exit codes: 0 done; 2 wrong arguments, or the events that were handled or archived cannot be
determined (a restored database, a damaged archive). Other logs are still pruned.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...exceptions import InvalidArgument
from ...retention.events import chosen_events, prune_events
from ...retention.rows import BATCH_SIZE, KEPT, kept_for, prune
from ..teaching import TeachingCommand


class Command(TeachingCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--inbox", action="store_true", help="remove old ids of executed jobs")
        add("--incidents", action="store_true", help="remove old incidents")
        add("--counters", action="store_true", help="remove old counters")
        add("--results", action="store_true", help="remove old results of django.tasks")
        add("--prepared", action="store_true", help="remove prepared events that were decided")
        add("--commands", action="store_true", help="remove old ids of commands")
        add("--fences", action="store_true", help="remove old fences; needs --database")
        add("--events", action="store_true", help="remove old events")
        add("--archived", metavar="DIR", help="remove old events that are in this archive")
        log = "table of one log (default: all but those of SINK; with --archived outbox_event)"
        add("--log", metavar="LOG", help=log)
        age = (
            "remove rows that are older, at least 1 (default: the setting of the kind in OUTBOX. "
            "INBOX_, INCIDENT_, TASK_RESULT_, PREPARED_ and FENCE_RETENTION_DAYS are 30, "
            "STATISTICS_RETENTION_HOURS is 48; ENTITY_COMMAND_DAYS and EVENT_RETENTION_DAYS have "
            "no default)"
        )
        add("--older-than", type=int, metavar="DAYS", help=age)
        alias = "database alias (default: the alias of the inbox, the outbox, entities, each log)"
        add("--database", metavar="ALIAS", help=alias)
        rows = f"rows removed at once (default {BATCH_SIZE})"
        add("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help=rows)
        add("--dry-run", action="store_true", help="print how many of each, and remove nothing")

    def handle(self, **options: Any) -> None:
        options["events"] = options["events"] or bool(options["archived"])
        if not any(options[name] for name in (*KEPT, "events")):
            raise InvalidArgument(
                "Say what to prune: --results, --prepared, --commands, --fences, --inbox, "
                "--incidents, --counters, --events, --archived DIR, or several."
            )
        if options["log"] and not options["events"]:
            raise InvalidArgument("--log needs --events or --archived.")
        given = {name: options[name] for name in ("older_than", "batch_size", "dry_run")}
        given["write"] = self.write
        # Before the first kind is pruned, as these refuse wrong arguments.
        using = {name: options["database"] or KEPT[name].alias() for name in KEPT if options[name]}
        if options["events"]:
            chosen_events(options["log"], options["older_than"])
        for name in using:
            kept_for(name, options["older_than"])
        for name, alias in using.items():
            prune(name, alias, **given)
        if options["events"]:
            chosen_log = {"log": options["log"], "archive": options["archived"]}
            prune_events(using=options["database"], **chosen_log, **given)
