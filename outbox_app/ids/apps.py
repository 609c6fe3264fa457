"""The Django app of ids."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class IdsConfig(capability.Capability):
    name = "outbox_app.ids"
    label = "outbox_ids"
    verbose_name = _("Outbox: ids")
