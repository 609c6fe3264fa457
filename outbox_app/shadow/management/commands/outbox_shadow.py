"""Shows what shadow mode has found, by task: tasks whose mode in OUTBOX['TASK_MODES'] is "shadow"
are sent as before, and what was sent is compared with what was committed.

  matched       sent after its commit, as with the outbox
  early         sent before its commit: a worker may have found no row
  never_sent    committed and never sent, known after an hour: the process died, or the send failed
  rolled_back   sent for a transaction that rolled back, known after an hour
  refused       staging would refuse the call with an error, which is in the log

  manage.py outbox_shadow
  manage.py outbox_shadow --forget 'shop.tasks.*'      count these tasks anew, after a change

Exit codes: 0 done; 1 a call of a task would be refused; 2 wrong arguments, or no tables.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import CommandParser

from ....aliases import outbox_alias
from ....management.base import OUTBOX_ALIAS, OutboxCommand
from ....process.preflight import require_migrated
from ....text import one_line
from ...comparison import report
from ...models import ShadowJob, ShadowNote, ShadowResult

Outcome = ShadowResult.Outcome


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        forget = "delete the results of the tasks that match; a name or a pattern as in TASK_MODES"
        parser.add_argument("--forget", metavar="PATTERN", help=forget)
        parser.add_argument("--database", metavar="ALIAS", help=OUTBOX_ALIAS)

    def handle(self, *, forget: str | None, **options: Any) -> None:
        using = options["database"] or outbox_alias()
        require_migrated(using, ShadowJob)
        results = report(using=using)
        if forget is not None:
            chosen = [task for task in results if fnmatchcase(task, forget)]
            ShadowResult.objects.using(using).filter(task__in=chosen).delete()
            self.write(f"Forgotten tasks: {len(chosen)}.")
            return
        self._write_lines(results)
        if waiting := sum(each.objects.using(using).count() for each in (ShadowJob, ShadowNote)):
            known = "never sent, or sent for a rollback, is known after an hour"
            self.write(f"Calls that are not judged yet: {waiting}. What was {known}.")
        if any(Outcome.REFUSED in found for found in results.values()):
            raise SystemExit(1)

    def _write_lines(self, results: dict[str, dict[str, ShadowResult]]) -> None:
        for task, found in results.items():
            counts = (
                f"{outcome}={found[outcome].count if outcome in found else 0}"
                for outcome in Outcome.values
            )
            self.write(f"{one_line(task, 100)}: {' '.join(counts)}")
            for each in found.values():
                if each.outcome != Outcome.MATCHED:
                    last = f"{each.last_at.isoformat(' ', 'seconds')} {each.last_task_id}"
                    self.write(f"    last {each.outcome}: {last.rstrip()}")
        if not results:
            self.write("No call in shadow mode was judged.")
