"""The Django app.

When Django is ready it registers the system checks and connects the log lines. It reads no
database and imports no broker.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class OutboxAppConfig(AppConfig):
    """Configuration of the app ``outbox_app``."""

    name = "outbox_app"
    label = "outbox_app"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect system checks and log lines."""
        from . import checks
        from .operations import logs

        checks.register()
        logs.connect()
