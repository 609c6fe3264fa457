"""Hands committed events to the subscriptions that the project declares (@subscriber, Projection),
in the order of each stream, and skips none. Runs until it is stopped. A handler's writes to this
database are committed together with its position in the log: if the process is killed, both are
kept, or neither.

Run one or more of these beside your web processes. Any number may run: one at a time owns a
partition, and if it is killed another takes it over when its lease has run out
(OUTBOX["LEASE_SECONDS"], and up to a fifth more).

  SIGTERM, SIGINT   finish the current page, hand the partitions back, exit 0

A handler that raises stops its partition and is retried; manage.py outbox_subscriptions list and
the admin show its error.

Where OUTBOX["SINK"] names a log of this database, one of these processes also removes its old
events: those that the archive holds, and that every subscription has passed. It needs
manage.py outbox_pipeline archive --follow beside it.

Exit codes: 0 stopped or done; 1 a process died, or with --once a subscription has stopped;
2 wrong arguments, no tables, or nothing to run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from ....management.base import OutboxCommand
from ...loops import sinking
from ...subscriptions.run import run


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="subscriptions (default: all)")
        self.add_foreground_arguments(
            parser,
            once="handle the events that are there",
            interval="pause between two polls of an idle log (default: "
            "OUTBOX['SUBSCRIPTION_INTERVAL'], or 1 on PostgreSQL, where a commit wakes the process "
            "at once, and 0.1 elsewhere)",
            batch_size="events handed over at once (default: the subscription's, or "
            "OUTBOX['PAGE_SIZE'], 500)",
            database="only the subscriptions on this alias; needed if they are on several",
            processes="processes that share the partitions",
        )

    def handle(self, **options: Any) -> None:
        self.run(partial(run, beside=sinking), **options)
