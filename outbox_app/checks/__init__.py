"""System checks: what cannot work is said by ``manage.py check``, with what to do instead.

Ids ``outbox.E001`` and up are errors, ``outbox.W001`` and up warnings; ``docs/reference/checks.md``
lists them. Only the checks of databases open a connection, and they run only for the aliases that
``--database`` names (``migrate`` names its own).
"""

from __future__ import annotations

from django.core import checks

from .apps import check_apps
from .databases import check_databases
from .logs import check_log_tables, check_logs
from .models import check_models
from .subscribers import check_time_readers
from .values import check_settings


def register() -> None:
    """Register the checks of the app, under the tag ``outbox``."""
    for check in (check_settings, check_apps, check_models, check_logs, check_time_readers):
        checks.register(check, "outbox")
    for check in (check_databases, check_log_tables):
        checks.register(check, "outbox", checks.Tags.database)
