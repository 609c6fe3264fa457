"""Processes, incidents and statistics, read-only, and the overview.

The overview needs a place in the menu without a change to the project's AdminSite, so it is
registered for a proxy model; every list of ours links to it. Statistics filtered by name are in the
order of their index, the newest minute first; without a name, those written last come first.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from ..models import Incident, Overview, Process, Statistic
from ..text import one_line, shown
from .base import EscapedChangeList, OutboxAdmin, column
from .filters import column_filter
from .overview import may_view, overview
from .tables import shards


@admin.register(Process)
class ProcessAdmin(OutboxAdmin):
    list_display = ["__str__", "resource", "short_trouble", "heartbeat_at", "done", "dead"]
    ordering = ("host", "pid", "id")
    short_trouble = column(_("trouble"), lambda row: shown(row.trouble, 120) or "-")


@admin.register(Overview)
class OverviewAdmin(OutboxAdmin):
    """One page, in the menu like a list, for users who may view processes."""

    def get_urls(self) -> list[Any]:
        view = self.of_one_database(self.admin_site.admin_view(self.overview))
        names = ("outbox_app_overview", "outbox_app_overview_changelist")
        return [path("", view, name=name) for name in names]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_view(request, Process)

    @method_decorator(require_safe)
    def overview(self, request: HttpRequest) -> HttpResponse:
        return overview(request, self)


def meaning(incident: Incident) -> str:
    """Return what an incident means, and what to do."""
    match incident.kind:
        case Incident.Kind.CONTRADICTION:
            return gettext(
                "A prepared event was decided, and its sender or a person says otherwise. It "
                "concerns no job. Find out which sender uses no fence, or who guessed."
            )
        case Incident.Kind.REQUEUE:
            return gettext(
                "A person staged dead jobs again. They may have been sent before they died. "
                "Idempotent tasks need nothing."
            )
        case Incident.Kind.NO_RECEIPT:
            return gettext(
                "No worker has started these jobs within the limit of their receipt, or the worker "
                "that had started them was lost. They were sent again. Look for workers that are "
                "silent or were killed, and for a broker that has lost messages. A job that a "
                "worker executes, or has ended, is not executed again."
            )
    return gettext("These jobs may have been sent twice. Idempotent tasks need nothing.")


def how_to_find(incident: Incident) -> str:
    """Return how the jobs of an incident are found."""
    if incident.kind == Incident.Kind.CONTRADICTION:
        return gettext("The detail names the event.")
    return gettext(
        "A second delivery has the task id of the first one: look in the logs of the workers for "
        "task ids that appear twice. These jobs had ids from %(first)d to %(last)d in the table; "
        "a receiver of the signal jobs_published can log id and task id of each job."
    ) % {"first": incident.first_id, "last": incident.last_id}


@admin.register(Incident)
class IncidentAdmin(OutboxAdmin):
    fields = ["kind", "meaning", "how_to_find", "created_at", "detail", "drainer", "first_id",
              "last_id", "which_shards"]  # fmt: skip
    meaning = column(_("what it means"), meaning)
    how_to_find = column(_("how to find them"), how_to_find)
    which_shards = column(_("shards"), lambda incident: shards(incident.shards))
    list_display = ["kind", "short_detail", "created_at", "first_id", "last_id"]
    list_filter = [column_filter("kind", _("kind"))]
    sortable_by = ["created_at"]
    short_detail = column(_("detail"), lambda incident: shown(incident.detail, 120))


class StatisticChangeList(EscapedChangeList):
    def get_ordering(self, request: HttpRequest, queryset: Any) -> Any:
        """Within a name, append no id: the order is total, and MariaDB would sort all rows."""
        if request.GET.get("name"):
            return ["-minute", "-source", "-dimension", "-label"]
        return super().get_ordering(request, queryset)


@admin.register(Statistic)
class StatisticAdmin(OutboxAdmin):
    list_display = ["minute", "name", "short_label", "figure", "source"]
    list_display_links = None
    list_filter = [column_filter("name", _("name")), column_filter("source", _("source"))]
    indexed_by = "name"
    fields = ["source", "minute", "name", "dimension", "label", "figure"]
    actions = None
    figure = column(_("value"), lambda row: f"{row.value:.10g}")

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Leave the list out of the menu: the overview draws its figures."""
        return {}

    short_label = column(_("label"), lambda row: one_line(row.label, 120) or "-")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return StatisticChangeList
