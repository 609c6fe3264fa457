"""Answers a keeper that cannot call this sender, for example through a firewall. Run it on the
sender, about every minute.

  answer KEEPER   fetch our open events from this peer, and send it the outcomes in the fences

The admin of the keeper shows prepared events, has their senders asked, and decides events that
remain in doubt. manage.py outbox_prune --prepared removes old ones.

  manage.py outbox_prepared answer shop

Exit codes: 0 done; 1 the keeper gave no answer, or had decided an event differently; 2 wrong
arguments, or no tables.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ....management.base import OutboxCommand
from ... import operations


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        answer = actions.add_parser("answer")
        answer.add_argument("keeper", metavar="KEEPER", help="name of the peer")

    def handle(self, *, keeper: str, **options: Any) -> None:
        done = operations.answer(keeper, write=self.write)
        if done["contradiction"]:
            raise CommandError("Some events had been decided differently. They were not changed.")
