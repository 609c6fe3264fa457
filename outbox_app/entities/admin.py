"""Entities by type, read-only: the state, the versions with their answers, how two states differ.

Every type of the project gets these pages when Django is ready and the project's own admin has been
imported, except types and versions that the project has registered itself. States, arguments and
answers are payload: users who may see that of events may see them. Lists are in the order of the
index on the id; lists of versions are lists of events.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..admin.base import OutboxAdmin, column, stored_value
from ..admin.job import carried, carried_column
from ..admin.payload import data_of, difference_of
from ..admin.tables import link
from ..aliases import model_alias
from ..events.admin.event import EventAdmin, stream_of
from ..models import counting
from .maintenance import entity_types
from .models import EntityRow, EntityVersion


class EntityAdmin(OutboxAdmin):
    list_display = ["id", "version", "changed_at"]
    ordering = sortable_by = ("id",)
    not_listed = ("state",)
    actions = None
    search_fields = ["id"]
    search_help_text = _("The whole id.")
    payload_permission = "outbox_events.view_payload_event"
    fieldsets = [
        (None, {"fields": ["id", "version", "changed_at", "all_versions"]}),
        (_("Content"), {"fields": ["shown_state"]}),
    ]
    shown_state = carried_column(_("state"), lambda entity: data_of(entity.state))

    def alias(self) -> str:
        return model_alias(self.model.versions)

    @admin.display(description=_("versions"))
    def all_versions(self, entity: EntityRow) -> SafeString:
        pages = self.admin_site._registry.get(self.model.versions)
        if not isinstance(pages, VersionAdmin):
            return SafeString("-")
        return link(pages.address(stream=stored_value(entity, "id")), gettext("All versions"))


def answer(version: EntityVersion) -> str:
    return gettext("rejected") if version.rejected else gettext("accepted")


class VersionAdmin(EventAdmin):
    list_display = ["type", "answer", "linked_stream", "version", "recorded_at", "id"]
    not_listed = ("data", "metadata", "response", "state")
    fieldsets = [
        (None, {"fields": ["type", "linked_stream", "version", "neighbours", "command",
                           "command_id", "answer", "recorded_at", "message_id", "id", "txid",
                           "slice"]}),
        (_("Content"), {"fields": ["shown_data", "shown_response", "shown_state", "difference",
                                   "shown_metadata"]}),
    ]  # fmt: skip
    answer = column(_("answer"), answer)
    shown_data = carried_column(_("arguments"), lambda version: data_of(version.data))
    shown_response = carried_column(_("response"), lambda version: data_of(version.response))
    # A copy, as masking works in place: ``difference`` compares the unmasked state.
    shown_state = carried_column(_("state"), lambda version: data_of(deepcopy(version.state)))

    @admin.display(description=_("difference"))
    def difference(self, version: Any) -> SafeString:
        """Compare the state with the last one before it: not every version has one."""
        near = (version.version - counting.MANY, version.version - 1)
        earlier = stream_of(version).filter(version__range=near, state__isnull=False)
        before = earlier.order_by("-version").first()
        if version.state is None or before is None:
            return SafeString("-")
        words = gettext("Compared with version %(number)s.") % {"number": before.version}
        shown = carried(self, version, difference_of(before.state, version.state))
        return format_html("<div><p>{}</p>{}</div>", words, shown)


def register_entities() -> None:
    """Register the types and versions that the project has not registered itself."""
    for entity in entity_types():
        for model, made in ((entity, EntityAdmin), (entity.versions, VersionAdmin)):
            if not admin.site.is_registered(model):
                admin.site.register(model, made)
