"""``manage.py run_subscriptions``: hands committed events to the subscriptions of the project.

Thin: arguments in, ``subscriptions.run.run`` out.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...subscriptions.run import run
from ..teaching import TeachingCommand

HELP = """
Hands committed events to the subscriptions that the project declares (@subscriber, Projection), in
the order of each stream, and skips none. Runs until it is stopped. What a handler writes to this
database is committed together with its position in the log: if the process is killed, both are
there, or neither.

Run one or more of these beside your web processes. Any number may run: one at a time owns a
partition, and if it is killed another takes it over when its lease has run out
(OUTBOX["LEASE_SECONDS"], and up to a fifth more).

  SIGTERM, SIGINT   finish the current page, hand the partitions back, exit 0

A handler that raises stops its partition and is retried; manage.py outbox_subscriptions list and
the admin show its error.

Exit codes: 0 stopped or done; 1 a process died, or with --once a subscription has stopped;
2 wrong arguments, no tables, or nothing to run.
"""


class Command(TeachingCommand):
    help = HELP

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
        parser.add_argument(
            "--once", action="store_true", help="handle what is there, then stop (cron, tests)"
        )
        parser.add_argument(
            "--interval",
            type=float,
            metavar="SECONDS",
            help="pause between two looks at an idle log (default: "
            "OUTBOX['SUBSCRIPTION_INTERVAL'], or 1 on PostgreSQL, where a commit wakes the process "
            "at once, and 0.1 elsewhere)",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            metavar="N",
            help="events handed over at once (default: the subscription's, or "
            "OUTBOX['PAGE_SIZE'], 500)",
        )
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="only the subscriptions on this alias; needed where they are on several",
        )
        parser.add_argument(
            "--processes",
            type=int,
            default=1,
            metavar="N",
            help="processes that share the partitions (default 1)",
        )

    def handle(self, **options: Any) -> None:
        code = run(
            options["names"],
            using=options["database"],
            interval=options["interval"],
            batch_size=options["batch_size"],
            once=options["once"],
            processes=options["processes"],
            write=self.write,
        )
        if code:
            raise SystemExit(code)
