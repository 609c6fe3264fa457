"""System checks: what cannot work is said by ``manage.py check``, with what to do instead.

Ids ``outbox.E001`` and up are errors, ``outbox.W001`` and up warnings; ``docs/reference/checks.md``
lists them. Only the checks of databases open a connection, and they run only for the aliases that
``--database`` names (``migrate`` names its own).
"""

from __future__ import annotations

from django.core import checks

from .apps import check_apps
from .databases import check_databases
from .models import check_models
from .values import check_settings


def register() -> None:
    """Register the checks of the app, under the tag ``outbox``."""
    for check in (check_settings, check_apps, check_models):
        checks.register(check, "outbox")
    checks.register(check_databases, "outbox", checks.Tags.database)
