"""Projections of the tests. ``declare(base, **attributes)`` makes one that ends with the test.

As a program: ``python -m tests.events.projections.declared COMMAND ARGUMENT…`` runs a command of
``manage.py`` in a process in which ``sold`` and ``status`` are declared.
"""

from __future__ import annotations

import sys
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from outbox_app.events import Projection
from tests.events.projections.models import Sold, Status


class StatusOf(Projection):
    """What became of each stream."""

    model = Status

    def apply(self, event, row):
        if event.type == "gone":
            return None
        if event.type == "bad":
            raise ValueError(f"{event.stream}@{event.version}")
        row = row or Status()
        row.status = event.type
        row.path += f"{event.version} "
        row.changed_at = event.recorded_at
        return row


class SoldOf(Projection):
    """How often each article was sold."""

    model = Sold

    def key(self, event):
        return event.data["article"]

    def apply(self, event, row):
        row = row or Sold()
        row.count += event.data.get("count", 1)
        return row if row.count else None


def declare(base: type[Projection], name: str, **attributes: Any) -> Any:
    """Return the projection class that was made of ``base``."""
    return type(name.title(), (base,), {"name": name, "__module__": __name__, **attributes})


if __name__ == "__main__":
    from django.core.management import call_command

    declare(SoldOf, "sold", batch_size=10)
    declare(StatusOf, "status", batch_size=10, push=True)
    call_command(*sys.argv[1:])
