"""The Django app of shadow mode."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class ShadowConfig(capability.Capability):
    name = "outbox_app.shadow"
    label = "outbox_shadow"
    verbose_name = _("Outbox: shadow mode")
