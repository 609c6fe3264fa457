"""The Django app of the core: jobs.

When Django is ready, it reads no database and contacts no broker.
"""

from __future__ import annotations

import logging
from importlib import import_module

from django.conf import settings
from django.utils.module_loading import module_has_submodule
from django.utils.translation import gettext_lazy as _

from . import capability


class OutboxAppConfig(capability.Capability):
    name = "outbox_app"
    label = "outbox_app"
    verbose_name = _("Outbox")

    def start(self) -> None:
        from . import checks
        from .conf import require_celery
        from .monitoring import log_lines, no_drainer  # noqa: F401  # they connect receivers
        from .receipts.tracer import install
        from .text import get_logger

        require_celery()
        install()
        # LOGGING has disabled those that exist: the project's celery.py imports them before.
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] == "outbox_app":
                get_logger(name).disabled = False
        for app in capability.capabilities():
            if module_has_submodule(app.module, "checks"):
                checks.register(import_module(f"{app.name}.checks"))
        outbox = getattr(settings, "OUTBOX", None)
        if isinstance(outbox, dict) and outbox.get("DETECT"):  # a check reports any other type
            from .jobs.staging import detector

            detector.install()
