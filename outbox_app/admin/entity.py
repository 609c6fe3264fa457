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
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..aliases import log_alias, outbox_alias
from ..entities.operations import entity_types
from ..eventlog.newevent import slice_of
from ..fleet.topology import leaders_of, live_servers
from ..models import EntityRow, EntityVersion
from .base import OutboxAdmin, column, given
from .event import EventAdmin, stream_of
from .job import carried, carried_column
from .payload import data_of, difference_of
from .row_range import number

#: How many versions a page links to.
LAST = 10


class EntityAdmin(OutboxAdmin):
    list_display = ["id", "version", "changed_at"]
    ordering = sortable_by = ("id",)
    not_listed = ("state",)
    actions = None
    search_fields = ["id"]
    search_help_text = _("The whole id.")
    payload_permission = "view_payload_event"
    fieldsets = [
        (None, {"fields": ["id", "version", "changed_at", "last_versions"]}),
        (_("Content"), {"fields": ["shown_state"]}),
    ]
    shown_state = carried_column(_("state"), lambda entity: data_of(entity.state))

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        first, *others = super().get_fieldsets(request, obj)
        leader = ["leader"] if self.model.routed else []
        return [(first[0], {"fields": [*first[1]["fields"], *leader]}), *others]

    def alias(self) -> str:
        return log_alias(self.model.versions)

    @admin.display(description=_("leads it"))
    def leader(self, entity: EntityRow) -> str:
        leaders = leaders_of(live_servers(using=outbox_alias()))
        return leaders[slice_of(given(entity, "id"))] if leaders else "-"

    @admin.display(description=_("versions"))
    def last_versions(self, entity: EntityRow) -> SafeString:
        log = self.model.versions
        pages = self.admin_site._registry.get(log)
        if not isinstance(pages, VersionAdmin):
            return SafeString("-")
        rows: Any = QuerySet(log, using=entity._state.db).filter(stream=given(entity, "id"))
        links = [
            (pages.address(row.pk), row.version, row.command or row.type, answer(row))
            for row in rows.order_by("-version").defer(*pages.not_listed)[:LAST]
        ]
        last = format_html_join("", '<li><a href="{}">{}: {}</a> {}</li>', links)
        every = pages.address(stream=given(entity, "id"))
        return format_html('<ul>{}</ul><a href="{}">{}</a>', last, every, gettext("All versions"))


def answer(version: EntityVersion) -> str:
    return gettext("rejected") if version.rejected else gettext("accepted")


class VersionAdmin(EventAdmin):
    list_display = ["id", "linked_stream", "version", "type", "answer", "recorded_at", "command_id"]
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

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the version; ``against`` is the number of the version to compare it with."""
        row = super().get_object(request, object_id, from_field)
        if row:
            row.against = number(request.GET.get("against", "")) or row.version - 1
        return row

    @admin.display(description=_("difference"))
    def difference(self, version: Any) -> SafeString:
        rows = stream_of(version)
        earlier = rows.filter(version__lt=version.version).order_by("-version")
        numbers = list(earlier.values_list("version", flat=True)[:LAST])
        words, shown = gettext("Version %(number)s does not exist, or no longer."), ""
        for before in rows.filter(version=version.against):
            words = gettext("Compared with version %(number)s.")
            shown = carried(self, version, difference_of(before.state, version.state))
        links = format_html_join(" ", '<a href="?against={}">{}</a>', [(n, n) for n in numbers])
        note = words % {"number": version.against}
        return format_html("<div><p>{} {}</p>{}</div>", note, links, shown)


def register_entities() -> None:
    """Register the types and versions that the project has not registered itself."""
    for entity in entity_types():
        for model, made in ((entity, EntityAdmin), (entity.versions, VersionAdmin)):
            if not admin.site.is_registered(model):
                admin.site.register(model, made)
