"""Which database alias holds a log.

The settings decide, or without them the project's routers. Nothing here opens a connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import router

from ..aliases import chosen_alias

if TYPE_CHECKING:
    from .models import EventLog


def log_alias(log: type[EventLog]) -> str:
    """Return the alias of a log: the setting DATABASE, else what the routers say."""
    return chosen_alias() or router.db_for_write(log)
