"""Rebuilds the view of a projection from the log, for example after a change of its code.

The log is replayed from the beginning into a shadow table. Meanwhile readers see the old rows, and
the subscription continues. At the end one transaction replaces the old rows with the new ones and
moves the subscription's cursor to their position: no event is missed or applied twice. Pushes
wait for that transaction.

Deploy the new code first, and restart the processes that run the subscription.

If it is killed or interrupted, the view is unchanged: run it again. A second rebuild of the same
view stops the first.

Exit codes: 0 done; 1 it failed, the view is unchanged; 2 wrong arguments, or it cannot be rebuilt.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ....management.base import OutboxCommand
from ...projections.rebuild import rebuild


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME", help="the projection")

    def handle(self, **options: Any) -> None:
        rebuild(options["name"], write=self.write)
