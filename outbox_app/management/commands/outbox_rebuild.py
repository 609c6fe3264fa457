"""``manage.py outbox_rebuild NAME``: makes a view anew from the log, while it is served.

Thin: arguments in, ``projections.rebuild`` out. Interrupting it changes nothing.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...projections.rebuild import rebuild
from ..base import TeachingCommand

HELP = """
Makes the view of a projection anew from the log, for example when its code has changed.

The log is replayed from the beginning into a table beside the view. Readers are served the old rows
all the while, and the subscription goes on. At the end the new rows take the place of the old ones
in one transaction, with the subscription's cursor where they stand: no event is missed or applied
twice. Pushes and writers of inline events wait for that transaction.

Deploy the new code first: the processes that run the subscription must not go on with the old one.

Killed or interrupted it has changed nothing; run it again. A second rebuild of the same view ends
the first.

Exit codes: 0 done; 1 it failed, the view is as it was; 2 wrong arguments, or it cannot be rebuilt.
"""


class Command(TeachingCommand):
    """Rebuilds a view."""

    help = HELP

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("name", metavar="NAME", help="the projection")

    def handle(self, **options: Any) -> None:
        """Rebuild."""
        rebuild(options["name"], write=self.write)
