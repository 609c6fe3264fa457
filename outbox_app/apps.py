"""The Django app.

When Django is ready it registers the system checks, connects the log lines, and imports the modules
named ``subscribers`` of the installed apps. It reads no database and contacts no broker.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
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
        from .monitoring import log_lines

        checks.register()
        log_lines.connect()
        autodiscover_modules("subscribers")
