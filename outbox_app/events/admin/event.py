"""Events, read-only: by stream, by message id, by type and topic inside a range of rows.

The table may hold billions of rows, so an index answers each query: streams and message ids have
one; types and topics are looked for in a range of positions, or of a stream's versions, and the
page says so. The page of an event links to the events before and after it in its stream. It shows
the payload to users who may see it.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...admin.base import BEFORE, OutboxAdmin, stored_value
from ...admin.filters import column_filter
from ...admin.job import carried_column
from ...admin.payload import data_of
from ...admin.row_range import RowRange, id_in, number, row_range
from ...admin.tables import link
from ...aliases import model_alias
from ...text import one_line
from ..models import Event, EventLog


@admin.register(Event)
class EventAdmin(OutboxAdmin):
    list_display = ["type", "linked_stream", "version", "recorded_at", "id"]
    list_filter = [
        column_filter("type", _("type")),
        column_filter("topic", _("topic")),
        column_filter("stream", _("stream")),
    ]
    payload_permission = "outbox_events.view_payload_event"
    actions = None
    search_fields = ["stream"]
    search_help_text = _("The whole stream, or the whole message id.")
    fieldsets = [
        (None, {"fields": ["type", "linked_stream", "version", "neighbours", "topic",
                           "recorded_at", "message_id", "id", "txid", "slice"]}),
        (_("Content"), {"fields": ["shown_data", "shown_metadata"]}),
    ]  # fmt: skip
    shown_data = carried_column(_("data"), lambda event: data_of(event.data))
    shown_metadata = carried_column(_("metadata"), lambda event: data_of(event.metadata))

    def alias(self) -> str:
        return model_alias(self.model)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("-id",) if _asked_stream(request) is None else ("-version",)

    def row_range(self, request: HttpRequest) -> RowRange | None:
        """Return a range of positions, or of versions if the list shows one stream."""
        stream = _asked_stream(request)
        if stream is None:
            return super().row_range(request)
        table = self.get_queryset(request).filter(stream=stream)
        return row_range(table, column="version", before=number(request.GET.get(BEFORE, "")))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the message id, if the term is one that exists, else for the stream."""
        message_id = id_in(search_term.strip())
        found = queryset.filter(message_id=message_id)
        if message_id and found.exists():
            return found, False
        return super().get_search_results(request, queryset, search_term)

    @admin.display(description=_("stream"))
    def linked_stream(self, event: EventLog) -> SafeString:
        return link(self.address(stream=stored_value(event, "stream")), one_line(event.stream, 100))

    @admin.display(description=_("in its stream"))
    def neighbours(self, event: EventLog) -> SafeString:
        rows = stream_of(event)
        before = rows.filter(version__lt=event.version).order_by("-version")
        after = rows.filter(version__gt=event.version).order_by("version")
        links = [
            (self.address(id), words, version)
            for words, found in ((gettext("before"), before), (gettext("after"), after))
            for id, version in found.values_list("id", "version")[:1]
        ]
        return format_html_join(" | ", '<a href="{}">{}: {}</a>', links) or SafeString("-")


def stream_of(event: EventLog) -> QuerySet[Any]:
    """Return all events of the given event's stream."""
    return QuerySet(type(event), using=event._state.db).filter(stream=stored_value(event, "stream"))


def _asked_stream(request: HttpRequest) -> str | None:
    stream = request.GET.get("stream") or request.GET.get("q", "").strip()
    return stream if stream and "\x00" not in stream else None  # no stream has a NUL
