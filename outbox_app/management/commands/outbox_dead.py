"""Lists, requeues or discards dead jobs: jobs that the drainer will not try to send again.

  list      count them by task and error, with the newest reason of each
  requeue   stage them again, with the same task id, in the order in which they were first staged.
            They may have been published before, so each batch is recorded as an incident
  discard   delete them for good

A job is selected if it matches all of the options. requeue and discard need at least one option;
--all selects every dead job.

  manage.py outbox_dead list
  manage.py outbox_dead requeue --task shop.send_receipt --newer-than 3h --dry-run
  manage.py outbox_dead requeue --task shop.send_receipt --newer-than 3h --because "queue is back"
  manage.py outbox_dead discard --id 17 --id 18

Two people may do this at the same time: each job is requeued once. If the command is
interrupted, run it again.

Exit codes: 0 done; 1 nothing matched, or it stopped half-way; 2 wrong arguments.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet

from ...aliases import outbox_alias
from ...conf import MAX_DAYS, outbox_settings
from ...database.clock import DatabaseNow
from ...exceptions import InvalidArgument, OutboxError
from ...jobs import dead
from ...jobs.dead_summary import dead_groups
from ...models import DeadJob
from ...models.counting import MANY
from ...process.preflight import require_migrated
from ...text import one_line
from ..base import OUTBOX_ALIAS, OutboxCommand, when

EXIT_NOTHING = 1
#: By option, what it selects.
LOOKUPS = {
    "ids": "id__in",
    "task": "task",
    "error": "error",
    "reason": "reason__contains",
    "queue": "queue",
    "key": "ordering_key",
    "app": "app",
    "older_than": "died_at__lt",
    "newer_than": "died_at__gte",
}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    found = timedelta(seconds=int(match[1]) * SECONDS[match[2]]) if match else None
    if found is None or found.days > MAX_DAYS:
        raise ArgumentTypeError(f"{text!r} is not an age; write 90s, 15m, 3h, 2d or 1w")
    return found


def identifier(text: str) -> int:
    """Return an id, a number that the column can hold."""
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 2**63:
        raise ArgumentTypeError(f"{text!r} is not the id of a dead job; ids are whole numbers")
    return int(text)


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("action", choices=["list", "requeue", "discard"], help="see above")
        add = parser.add_argument_group("selection").add_argument
        ids = "id of a dead job, as in the admin; may be given again"
        add("--id", dest="ids", type=identifier, action="append", metavar="N", help=ids)
        add("--task", help="name of the task")
        add("--error", metavar="CLASS", help="class of the error, as list shows it")
        add("--reason", metavar="TEXT", help="part of the reason")
        add("--queue", help="name of the queue")
        add("--key", help="ordering key")
        add("--app", help="name of the Celery app")
        add("--older-than", type=age, metavar="AGE", help="died longer ago than this: 90s, 3h, 2d")
        add("--newer-than", type=age, metavar="AGE", help="died less long ago")
        add("--all", action="store_true", help="every dead job")

        add = parser.add_argument
        add("--database", metavar="ALIAS", help=OUTBOX_ALIAS)
        add("--dry-run", action="store_true", help="print how many, and change nothing")
        why = "why: kept in the incident of a requeue, and in the log of a discard"
        add("--because", default="", metavar="TEXT", help=why)

    def handle(self, *, action: str, **options: Any) -> None:
        using = options["database"] or outbox_alias()
        selection = {
            lookup: DatabaseNow() - value if isinstance(value, timedelta) else value
            for name, lookup in LOOKUPS.items()
            if (value := options[name]) is not None
        }
        if selection and options["all"]:
            raise InvalidArgument(
                "--all selects every dead job, so no other selection may be given."
            )
        if options["reason"] == "":  # as from a script's unset variable
            raise InvalidArgument("--reason is empty, which would match every reason.")
        require_migrated(using)
        jobs = DeadJob.objects.using(using).filter(**selection)
        if action == "list":
            self._list(jobs)
            return
        if not selection and not options["all"]:
            raise InvalidArgument(
                f"Nothing is selected, so nothing was done. Say which dead jobs to {action} "
                "(--task, --error, --id …), or --all for every one."
            )
        self._decide(action, jobs, **options)

    def _list(self, jobs: QuerySet[DeadJob]) -> None:
        groups, is_all = dead_groups(jobs)
        if not groups:
            self.write("No dead job matches.")
            return
        self.write(f"{'count':>7}  {'newest':<19}  task, error, newest reason")
        for group in groups:
            newest = when(group.newest, using=jobs.db)
            self.write(f"{group.count:>7}  {newest}  {one_line(group.task, 80)}")
            self.write(f"{'':30}{one_line(group.error, 80)}")
            self.write(f"{'':30}{one_line(group.reason, 200)}")
        if not is_all:
            self.write(f"There are more. Shown: the most frequent of the newest {MANY} dead jobs.")

    def _decide(self, action: str, jobs: QuerySet[DeadJob], **options: Any) -> None:
        count = jobs.count()
        if not count:
            self.write("No dead job matches.")
            raise SystemExit(EXIT_NOTHING)
        if options["dry_run"]:
            blocks = action == "requeue" and outbox_settings().DEAD_KEY == "block"
            later = ", and the later dead jobs of their ordering keys" * blocks
            self.write(f"Would {action} {_jobs(count)}{later}. Nothing was done.")
            return
        decide = {"requeue": dead.requeue_dead, "discard": dead.discard_dead}[action]
        try:
            done = decide(jobs, by=self.user, reason=options["because"]).done
        except OutboxError as error:
            raise CommandError(f"Stopped half-way: {error} Run it again to continue.") from error
        past = {"requeue": "Requeued", "discard": "Discarded"}[action]
        self.write(f"{past} {_jobs(done)}.")


def _jobs(count: int) -> str:
    return f"{count} dead job" if count == 1 else f"{count} dead jobs"
