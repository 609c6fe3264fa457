"""Sends committed jobs to the broker, and does what else the installed apps need, in one process.
Runs until it is stopped, beside your Celery workers.

It sends jobs as drain_outbox does. Once an hour it removes rows whose retention is over, as
outbox_prune does: inbox, incidents, counters, and those of other installed apps whose setting names
an age. If other apps are installed that have a command whose name begins with run_, such as
run_subscriptions, it does the work of that command, too.

For one server, or a few. Run two on different hosts, and one takes over from the other. When one
part is too slow, run its own command beside this one: they share the work by the same leases.

A part that fails is logged, and is started again after 2, 4, 8 s and so on, up to a minute. The
others continue. The admin lists the parts as processes, with one process id.

  SIGTERM, SIGINT   finish what is in progress, hand the leases back, exit

Exit codes: 0 stopped or done; 1 a part had failed when it was stopped, or with --once; 2 wrong
arguments, or no tables; 3 the broker is unsafe: Redis evicts queues (maxmemory-policy allkeys-*),
or an AMQP broker has no publisher confirms.
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
