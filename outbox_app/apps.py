"""The Django app.

When Django is ready, it reads no database and contacts no broker.
"""

from __future__ import annotations

import logging
from importlib import import_module

from django.apps import AppConfig, apps
from django.conf import settings
from django.utils.module_loading import autodiscover_modules, module_has_submodule
from django.utils.translation import gettext_lazy as _


class OutboxAppConfig(AppConfig):
    name = "outbox_app"
    label = "outbox_app"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"
    #: The core itself and all capabilities, in the order in which pages show them.
    capabilities = tuple(f"outbox_app{name}" for name in (
        "", ".events", ".entities", ".prepared", ".door", ".fleet", ".django_tasks", ".pipeline",
    ))  # fmt: skip

    def ready(self) -> None:
        from . import checks  # registers a Celery task
        from .conf import require_celery
        from .events import archives
        from .monitoring import log_lines  # noqa: F401  # connects its receivers
        from .text import get_logger

        require_celery()
        archives.provide_archives("outbox_app.pipeline.driver.archive_lookup.ArchiveLookup")
        # LOGGING has disabled those that exist: the project's celery.py imports them before.
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] == "outbox_app":
                get_logger(name).disabled = False
        for name in self.capabilities:
            if module_has_submodule(import_module(name), "checks"):
                checks.register(import_module(f"{name}.checks"))
        given = getattr(settings, "OUTBOX", None)
        if isinstance(given, dict) and given.get("DETECT"):  # a check reports any other type
            from .jobs.staging import detector

            detector.install()
        autodiscover_modules("subscribers")
        self._register_entities()

    def _register_entities(self) -> None:
        """Register admin pages for the entity types that the project has not registered itself."""
        if not apps.is_installed("django.contrib.admin"):
            return
        # Not at the top: Django would take an imported AdminConfig for the config of this app.
        from django.contrib.admin import apps as of_the_admin
        from django.contrib.admin import autodiscover

        if isinstance(apps.get_app_config("admin"), of_the_admin.AdminConfig):
            from .entities.admin import register_entities

            autodiscover()  # the admin's own ready() may run after this one
            register_entities()
