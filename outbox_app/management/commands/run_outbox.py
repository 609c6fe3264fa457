"""Does the work of several commands in one process:

  drain_outbox   sends committed jobs to the broker
  outbox_prune   removes rows whose retention is over, once an hour: inbox, incidents, counters, and
                 those of other installed apps whose setting names an age
  run_*          the same as the commands of other installed apps whose names begin with run_

For one server, or a few. Run two on different hosts, and one takes over from the other. When one
part is too slow, run its own command beside this one: they share the work by the same leases.

A part that fails is logged, and is started again after 2, 4, 8 s and so on, up to a minute. The
others continue. The admin lists the parts as processes, with one process id.

  SIGTERM, SIGINT   finish what is in progress, hand the leases back, exit

Exit codes: 0 stopped or done; 1 a part had failed when it was stopped, or with --once; 2 wrong
arguments, or no tables; 3 the broker is unsafe.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...supervisor import run_together
from ..base import OUTBOX_ALIAS, OutboxCommand


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        once = "do the work that is ready, part by part, then stop (cron, tests)"
        parser.add_argument("--once", action="store_true", help=once)
        parser.add_argument("--database", metavar="ALIAS", help=OUTBOX_ALIAS)

    def handle(self, **options: Any) -> None:
        self.run(run_together, **options)
