"""Sends committed jobs from the table outbox_stagedjob to the broker of the Celery app that staged
them. Runs until it is stopped.

Run one or more drainers beside your Celery workers, under systemd or in a container of their own.
They share the work. If one is killed, the others take over its shards when its lease has run out
(OUTBOX["LEASE_SECONDS"], and up to a fifth more).

  SIGTERM, SIGINT   finish the current batch, hand the shards back, exit 0

With --once jobs stay if their broker takes nothing for 1.5 times the lease, or the database fails
several times. The last line has the reason.

Exit codes: 0 stopped or done; 1 a drainer process died, or with --once jobs stayed because a broker
or the database failed; 2 wrong arguments, or no tables; 3 the broker is unsafe: Redis evicts queues
(maxmemory-policy allkeys-*), or an AMQP broker has no publisher confirms.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...jobs.drain.run import drain_outbox
from ..base import OUTBOX_ALIAS, OutboxCommand


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_foreground_arguments(
            parser,
            once="send the jobs that are there",
            interval="pause between two polls of an empty outbox (default: OUTBOX['INTERVAL'], or "
            "1 on PostgreSQL, where a commit wakes the drainer at once, and 0.1 elsewhere, where "
            "this is the longest delay)",
            batch_size="rows moved at once (default: OUTBOX['BATCH_SIZE'], 1000)",
            database=f"database {OUTBOX_ALIAS}",
            processes="drainer processes; a second one helps when one core is not enough",
        )
        jobs = "stop after about N jobs, for example to let a supervisor start a fresh process"
        parser.add_argument("--max-jobs", type=int, metavar="N", help=jobs)

    def handle(self, **options: Any) -> None:
        self.run(drain_outbox, **options)
