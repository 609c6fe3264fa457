"""The Django app of entities."""

from __future__ import annotations

from django.apps import apps
from django.utils.translation import gettext_lazy as _

from .. import capability


class EntitiesConfig(capability.Capability):
    name = "outbox_app.entities"
    label = "outbox_entities"
    verbose_name = _("Outbox: entities")
    needs = ("outbox_app.events",)

    def start(self) -> None:
        # Not at the top: Django would take an imported AdminConfig for the config of this app.
        from django.contrib.admin import apps as of_the_admin
        from django.contrib.admin import autodiscover

        if not apps.is_installed("django.contrib.admin"):
            return
        if isinstance(apps.get_app_config("admin"), of_the_admin.AdminConfig):
            from .admin import register_entities

            autodiscover()  # the admin's own ready() may run after this one
            register_entities()
