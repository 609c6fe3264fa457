"""The Django app of prepared events."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class PreparedConfig(capability.Capability):
    name = "outbox_app.prepared"
    label = "outbox_prepared"
    verbose_name = _("Outbox: prepared events")
    needs = ("outbox_app.events",)
