"""The Django app of events."""

from __future__ import annotations

from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _

from .. import capability


class EventsConfig(capability.Capability):
    name = "outbox_app.events"
    label = "outbox_events"
    verbose_name = _("Outbox: events")

    def start(self) -> None:
        from . import log_lines  # noqa: F401  # connects its receivers

        autodiscover_modules("subscribers")
