"""Shows the state of the outbox: how many jobs wait and for how long, which drainers run, which
jobs are dead and why, and what other installed apps have to say. It changes nothing.

  manage.py outbox_status
  manage.py outbox_status --max-age 60 --max-dead 0          for cron, Nagios and the like
  manage.py outbox_status --json | jq .backlog.oldest_seconds

A problem is bad (!) if work has stopped: no drainer is running, or none can send; shards have
no owner. A warning (-) is shown, but exit codes ignore it: jobs that have died, and the like.

Each --max option adds a limit; a figure above its limit is a bad problem. Limits of jobs go up to
100000, because no more jobs are counted.

Exit codes: 0 fine, or warnings only; 1 there is a bad problem; 2 the database cannot be reached,
the tables are missing, or wrong arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django.db
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...aliases import outbox_alias
from ...capability import BAD, Problem, all_doors
from ...exceptions import InvalidArgument
from ...monitoring.diagnosis import Limits, is_healthy, problems
from ...monitoring.status import OutboxStatus, outbox_status
from ...process.foreground import set_timeouts
from ...process.preflight import require_alias, require_migrated
from ...text import one_line
from ..base import OUTBOX_ALIAS, OutboxCommand

EXIT_PROBLEM, EXIT_UNKNOWN = 1, 2


class Command(OutboxCommand):
    help = __doc__
    requires_system_checks = []  # for monitoring: its exit code answers in any case

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        older = "report a problem if the oldest ready or due job is older"
        add("--max-age", type=float, metavar="SECONDS", help=older)
        for name, what in (("backlog", "are ready or due"), ("dead", "are dead")):
            more = f"report a problem if more jobs {what}"
            add(f"--max-{name}", type=int, metavar="JOBS", help=more)
        add("--json", action="store_true", help="print everything as JSON")
        add("--database", metavar="ALIAS", help=OUTBOX_ALIAS)

    def handle(self, *, database: str | None, **options: Any) -> None:
        try:
            using = database or outbox_alias()
        except ImproperlyConfigured as error:  # code 1 would mean that the outbox answered
            raise CommandError(one_line(error, 1000), returncode=EXIT_UNKNOWN) from error
        require_alias(using)
        try:
            limits = Limits(options["max_age"], options["max_backlog"], options["max_dead"])
        except ValueError as error:
            raise InvalidArgument(f"--{error}".replace("_", "-")) from error
        others = () if database else (a for doors in all_doors() for a in doors.aliases())
        for alias in {using, *others}:
            set_timeouts(alias)
        try:
            require_migrated(using)
            found = outbox_status(using=database)
        except django.db.Error as error:
            raise CommandError(
                f"Database {using!r} cannot be queried: {one_line(error, 300)}",
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


def table(status: OutboxStatus, found: list[Problem]) -> Iterator[str]:
    yield f"Outbox on database {status.database!r}: {verdict(found)}"
    for problem in found:
        yield f"  {'!' if problem.severity == BAD else '-'} {problem.text}"
        if problem.detail:
            yield f"    {problem.detail}"
        yield f"    {problem.action}"
    yield ""
    for each in status.figures():
        yield from each.lines


def verdict(found: list[Problem]) -> str:
    """Return the verdict for the first line: the number of bad problems, else of warnings."""
    bad = sum(each.severity == BAD for each in found)
    if bad:
        return "1 PROBLEM" if bad == 1 else f"{bad} PROBLEMS"
    return f"fine, {len(found)} warning{'s' if len(found) > 1 else ''}" if found else "fine"
