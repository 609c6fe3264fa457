"""The Django app of the door."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class DoorConfig(capability.Capability):
    name = "outbox_app.door"
    label = "outbox_door"
    verbose_name = _("Outbox: door")
