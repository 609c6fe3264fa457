"""The Django app of the fleet."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class FleetConfig(capability.Capability):
    name = "outbox_app.fleet"
    label = "outbox_fleet"
    verbose_name = _("Outbox: fleet")
    needs = ("outbox_app.door",)
