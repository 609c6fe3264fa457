"""``manage.py outbox_status``: is work leaving, how late is it, what is dead, who drains.

Thin: arguments in, ``monitoring.status`` and ``monitoring.diagnosis`` out. It changes nothing, and
its exit code is for monitoring, so it runs no system checks first: it answers in any case.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import django.db
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...aliases import log_alias, outbox_alias
from ...models import Event
from ...monitoring.diagnosis import Limits, is_healthy, problems
from ...monitoring.status import outbox_status
from ...process.foreground import set_timeouts
from ...process.preflight import require_alias, require_migrated
from ...text import one_line
from ..status_table import table
from ..teaching import OUTBOX_ALIAS, TeachingCommand

HELP = """
Shows the state of the outbox: how many jobs wait and for how long, which drainers run, which jobs
are dead and why, which subscriptions are behind. It changes nothing.

  manage.py outbox_status
  manage.py outbox_status --max-age 60 --max-dead 0          for cron, Nagios and the like
  manage.py outbox_status --json | jq .backlog.oldest_seconds

A problem is bad (!) where work has stopped: no drainer is running, or none can send; shards have
no owner; a subscription's handler fails, or it is behind and no process runs it. A warning (-) is
shown, and changes no exit code: parked streams, open gaps, jobs that have died, and the like.

Each --max option adds a limit; a figure above its limit is a bad problem. Limits of jobs go up to
100000, because no more jobs are counted.

Exit codes: 0 fine, or warnings only; 1 there is a bad problem; 2 the database cannot be reached,
the tables are missing, or wrong arguments.
"""

EXIT_PROBLEM, EXIT_UNKNOWN = 1, 2


def limit(name: str, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads a limit from the command line."""

    def number(text: str) -> float:
        try:
            value = kind(text)
            Limits(**{name: value})  # type: ignore[arg-type]
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
        return value

    return number


class Command(TeachingCommand):
    """Shows how the outbox is doing."""

    help = HELP
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        older = "a problem: the oldest ready job is older"
        add("--max-age", type=limit("max_age", float), metavar="SECONDS", help=older)
        for name, what in (("backlog", "are ready"), ("dead", "are dead")):
            more = f"a problem: more jobs {what}"
            add(f"--max-{name}", type=limit(f"max_{name}", int), metavar="JOBS", help=more)
        add("--json", action="store_true", help="all of it as JSON")
        add("--database", metavar="ALIAS", help=OUTBOX_ALIAS)

    def handle(self, *, database: str | None, **options: Any) -> None:
        """Show it, and end with the exit code."""
        try:
            using = database or outbox_alias()
        except ImproperlyConfigured as error:  # 1 would say that it was asked
            raise CommandError(one_line(error, 1000), returncode=EXIT_UNKNOWN) from error
        require_alias(using)
        names = ("max_age", "max_backlog", "max_dead")
        limits = Limits(**{name: options[name] for name in names})
        for alias in {using, database or log_alias(Event)}:
            set_timeouts(alias)
        try:
            require_migrated(using)
            found = outbox_status(using=database)
        except django.db.Error as error:
            raise CommandError(
                f"Database {using!r} cannot be asked: {one_line(error, 300)}",
                returncode=EXIT_UNKNOWN,
            ) from error
        wrong = problems(found, limits)
        if options["json"]:
            answer = {"database": found.database, "ok": is_healthy(wrong)}
            answer |= {"problems": [each.as_json() for each in wrong]}
            self.write_json(answer | found.as_json())
        else:
            for line in table(found, wrong):
                self.write(line)
        if not is_healthy(wrong):
            raise SystemExit(EXIT_PROBLEM)
