"""Asks the senders of prepared events what became of their transactions, and publishes or cancels
each event by the answer. A sender is asked about events that it has neither confirmed nor cancelled
in 10 s, or the seconds of its immune=, and then again after 10, 20, 40 s and so on, at most 5 min.
If it gives no outcome within a day, the policy that it chose decides, or a person.

Run one or more of these on the keeper, beside drain_outbox. Any number may run: one at a time asks
a given sender, and if it is killed another takes over when its lease has run out.

  SIGTERM, SIGINT   take the answers that are there, hand the senders back, exit 0

A sender that gives no answer holds up its own events only; the admin shows its error.

Exit codes: 0 stopped or done; 1 a process died, or with --once a sender gave no answer; 2 wrong
arguments, or no tables.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ....management.base import OutboxCommand
from ...run import run


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_foreground_arguments(
            parser,
            once="ask about the events that are due",
            interval="pause between two polls when nothing is due (default: 1)",
            database="the keeper's alias (default: the outbox's)",
            processes="processes that share the senders",
        )

    def handle(self, **options: Any) -> None:
        self.run(run, **options)
