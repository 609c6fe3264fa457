"""Gaps: what is missing, since when, how often it was looked for, and what was decided.

The page of a gap shows the evidence: the events at its two ends as they are in the log now, and how
many events have arrived in between. Only a person skips a gap, with a reason, which the gap's row
keeps, too.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import display_for_value
from django.db.models import QuerySet
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...admin.actions import BulkAction, each_row
from ...admin.base import address, column, stored_value
from ...admin.filters import column_filter
from ...admin.tables import link
from ...models import counting
from ...text import one_line, shown
from ..models import Event, Gap
from ..subscriptions.skips import skip_gap
from .base import LogAdmin


def _skip(row: Any, values: Any, options: Any) -> str:
    return shown(skip_gap(row.pk, **options), 300)


@admin.register(Gap)
class GapAdmin(LogAdmin):
    list_display = ["missing", "state", "found_by", "short_reason", "seen"]
    list_filter = [
        column_filter("state", _("state")),
        column_filter("kind", _("kind")),
        column_filter("subscription", _("subscription")),
    ]
    sortable_by = ["seen"]
    missing = column(_("missing"), lambda row: f"{shown(row.stream or row.log, 80)}, {row.missing}")
    seen = column(_("first seen"), lambda row: row.seen_at, ordering="id")
    fields = ["kind", "state", "found_by", "partition", "log", "stream", "missing",
              "evidence", "seen_at", "attempts", "settled_at", "settled_by", "reason"]  # fmt: skip
    found_by = column(_("found by"), lambda row: shown(row.subscription, 80) or gettext("an audit"))
    short_reason = column(_("reason"), lambda row: shown(row.reason, 120) or "-")
    bulk_actions = (
        BulkAction(
            "skip_selected",
            "skip_gap",
            _("Skip gaps"),
            _("Skip the gap"),
            _(
                "The subscription continues without the missing events. If they arrive later, they "
                "are not handled. If an audit has found the gap, later audits no longer report it."
            ),
            each_row(_skip, _("Skipped: %s."), between="; "),
            listed_only=True,
        ),
    )

    @admin.display(description=_("in the log now"))
    def evidence(self, row: Gap) -> SafeString:
        if stored_value(row, "log") != Event._meta.db_table:
            return format_html("{}", gettext("The gap is in another log."))
        rows: QuerySet[Any] = Event.objects.using(row._state.db)
        column = "id"
        if row.kind == Gap.Kind.VERSION:
            column, rows = "version", rows.filter(stream=stored_value(row, "stream"))
        before = rows.filter(**{f"{column}__lt": row.first}).order_by(f"-{column}")
        inside = rows.filter(**{f"{column}__gte": row.first, f"{column}__lte": row.last})
        after = rows.filter(**{f"{column}__gt": row.last}).order_by(column)
        return format_html_join(
            "",
            "<p>{} {}</p>",
            (
                (gettext("Before:"), self._event(before)),
                (gettext("Inside:"), counting.shown_count(counting.counted(inside))),
                (gettext("After:"), self._event(after)),
            ),
        )

    def _event(self, rows: QuerySet[Any]) -> SafeString:
        event = rows.defer("data", "metadata").first()
        if event is None:
            return format_html("{}", gettext("nothing"))
        page = address(self.admin_site.name, "outbox_events.event", event.pk)
        name = link(page, one_line(f"{event.pk}: {event}", 200))
        return format_html("{}, {}", name, display_for_value(event.recorded_at, "-"))
