"""Events, read-only: by stream, by message id, by type and topic among the newest.

The table may hold anything from nothing to billions of rows, so whatever is asked for is answered
from an index: a stream and a message id have one; types and topics are looked for among the newest
positions only, and the heading says so.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.db.models import Max, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..log.logs import log_alias
from ..models import Event
from ..operations.status import MANY
from ..operations.text import one_line
from .base import OutboxAdmin
from .filters import ColumnFilter, column_filter
from .job import block
from .payload import data_of


class NewestFilter(ColumnFilter):
    """Rows with one value in a column that has no index, among the newest positions."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        """Leave out what lies further back."""
        rows = super().queryset(request, queryset)
        if rows is None:
            return None
        newest = Event.objects.using(queryset.db).aggregate(last=Max("id"))["last"] or 0
        return rows.filter(id__gt=newest - MANY)


class TypeFilter(NewestFilter):
    """By type."""

    parameter_name = "type"
    title = _("type, among the newest 100000 positions")


class TopicFilter(NewestFilter):
    """By topic."""

    parameter_name = "topic"
    title = _("topic, among the newest 100000 positions")


class EventAdmin(OutboxAdmin):
    """What happened."""

    list_display = ["id", "type", "linked_stream", "version", "topic", "recorded_at", "message_id"]
    list_filter = [TypeFilter, TopicFilter, column_filter("stream", _("stream"))]
    actions = None
    searched_column = "stream"
    search_help_text = _("The whole stream, or the whole message id.")
    fieldsets = [
        (
            None,
            {
                "fields": [
                    "type",
                    "linked_stream",
                    "version",
                    "topic",
                    "recorded_at",
                    "message_id",
                    "id",
                    "txid",
                    "slice",
                ]
            },
        ),
        (_("Content"), {"fields": ["shown_data", "shown_metadata"]}),
    ]
    readonly_fields = ["linked_stream", "shown_data", "shown_metadata"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Rows on the alias of the log."""
        return super().get_queryset(request).using(log_alias(Event))

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """The newest first; inside a stream by version, as its index has them."""
        asked = request.GET.get("stream") or request.GET.get("q")
        return ("-version",) if asked else ("-id",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Look for a message id where it is one, else for a stream."""
        term = search_term.strip()
        try:
            return queryset.filter(message_id=UUID(term)), False
        except ValueError:
            return super().get_search_results(request, queryset, search_term)

    @admin.display(description=_("stream"))
    def linked_stream(self, event: Event) -> SafeString:
        """The stream, with a link to its events."""
        url = reverse("admin:outbox_app_event_changelist")
        return format_html(
            '<a href="{}?{}">{}</a>',
            url,
            urlencode({"stream": event.stream}),
            one_line(event.stream, 100),
        )

    @admin.display(description=_("data"))
    def shown_data(self, event: Event) -> SafeString:
        """What happened."""
        return block(data_of(event.data))

    @admin.display(description=_("metadata"))
    def shown_metadata(self, event: Event) -> SafeString:
        """Around it."""
        return block(data_of(event.metadata))
