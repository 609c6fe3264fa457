"""Processes, incidents and statistics, read-only, and the overview.

The overview needs an address in the admin without a change to the project's AdminSite, so it lives
below the list of processes; the app's index and every list of ours link to it. Statistics with a
name come in the order of their index, the newest minute first; without, the last written come
first. Unlike a log, their table is small: see ``pipeline.driver.run``.
"""

from __future__ import annotations

from typing import Any

from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from ..pipeline.statistic_names import NAMES
from ..text import one_line
from .base import EscapedChangeList, OutboxAdmin, column
from .filters import ColumnFilter, column_filter
from .overview import overview
from .row_range import RowRange


class ProcessAdmin(OutboxAdmin):
    list_display = [
        "__str__",
        "resource",
        "started_at",
        "heartbeat_at",
        "done",
        "dead",
        "trouble",
    ]
    ordering = ("host", "pid", "id")

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.overview)
        return [path("overview/", view, name="outbox_app_overview"), *super().get_urls()]

    @method_decorator(require_safe)
    def overview(self, request: HttpRequest) -> HttpResponse:
        return overview(request, self)


class IncidentAdmin(OutboxAdmin):
    list_display = ["id", "created_at", "kind", "first_id", "last_id", "drainer", "short_detail"]
    list_filter = [column_filter("kind", _("kind"))]
    sortable_by = ["id", "created_at"]
    short_detail = column(_("detail"), lambda incident: str(incident.detail)[:120])


class NameFilter(ColumnFilter):
    """By name: those of every log, and of the newest rows."""

    parameter_name = "name"
    title = _("name")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Offer the known names too: those of the newest rows may be a few only."""
        found = dict(super().lookups(request, model_admin))
        return sorted({**{name: name for name in NAMES}, **found}.items())


class StatisticChangeList(EscapedChangeList):
    def get_ordering(self, request: HttpRequest, queryset: Any) -> Any:
        """Within a name, the order is whole without it; with it, MariaDB would sort all rows."""
        if request.GET.get("name"):
            return ["-minute", "-source", "-dimension", "-label"]
        return super().get_ordering(request, queryset)


class StatisticAdmin(OutboxAdmin):
    list_display = ["minute", "source", "name", "dimension", "short_label", "value", "written_at"]
    list_display_links = None
    list_filter = [NameFilter, column_filter("source", _("source"))]
    actions = None
    short_label = column(_("label"), lambda row: one_line(row.label, 120))

    def row_range(self, request: HttpRequest) -> RowRange | None:
        """With a name, the rows are in the order of their index."""
        return None if request.GET.get("name") else super().row_range(request)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return StatisticChangeList
