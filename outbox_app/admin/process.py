"""Processes, servers, incidents, statistics and results of tasks, read-only, and the overview.

The overview needs a place in the menu without a change to the project's AdminSite, so it is
registered for a proxy model; every list of ours links to it. Statistics filtered by name are in the
order of their index, the newest minute first; without a name, those written last come first.

The list of servers is the database's registry.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy
from django.views.decorators.http import require_safe

from ..fleet.registries.database import change
from ..models import Incident, Overview, Process, Server, Statistic, TaskResult
from ..pipeline.statistic_names import NAMES
from ..text import LIMIT, one_line, shown
from .actions import BulkAction, ConfirmedActionsAdmin, Reason
from .base import EscapedChangeList, OutboxAdmin, column, given
from .filters import ColumnFilter, column_filter
from .job import carried_column
from .masking import masked_text
from .overview import may_view, overview
from .payload import Part, json_of, parsed


@admin.register(Process)
class ProcessAdmin(OutboxAdmin):
    list_display = ["__str__", "resource", "started_at", "heartbeat_at", "done", "dead", "trouble"]
    ordering = ("host", "pid", "id")


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


class Weight(Reason):
    weight = forms.IntegerField(label=_("Weight"), min_value=0, max_value=100)
    field_order = ("weight", "reason")


CHANGED = ngettext_lazy("%d server was changed.", "%d servers were changed.")


@admin.register(Server)
class ServerAdmin(ConfirmedActionsAdmin):
    list_display = ["node", "service", "kind", "address", "weight", "draining", "heartbeat_at",
                    "lease_seconds", "version"]  # fmt: skip
    list_filter = [column_filter("service", _("service")), column_filter("kind", _("kind"))]
    ordering = ("service", "-kind", "node", "id")
    bulk_actions = (
        BulkAction(
            "drain_selected",
            "change_server",
            _("Drain servers"),
            _("Drain the server"),
            _(
                "The servers receive no more calls, and finish the calls that they have. This "
                "lasts until their processes end, or a weight is set."
            ),
            lambda rows, values, by: change(rows, draining=True),
            outcome=CHANGED,
        ),
        BulkAction(
            "weight_selected",
            "change_server",
            _("Set the weight of servers"),
            _("Set the weight of the server"),
            _("Each server receives this share of the calls, drained or not; 0: none."),
            lambda rows, values, by: change(rows, draining=False, weight=values["weight"]),
            outcome=CHANGED,
            form=Weight,
        ),
    )


@admin.register(Incident)
class IncidentAdmin(OutboxAdmin):
    list_display = ["id", "created_at", "kind", "first_id", "last_id", "drainer", "short_detail"]
    list_filter = [column_filter("kind", _("kind"))]
    sortable_by = ["id", "created_at"]
    short_detail = column(_("detail"), lambda incident: shown(incident.detail, 120))


class NameFilter(ColumnFilter):
    parameter_name = "name"
    title = _("name")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Offer all known names, too: the newest rows may have a few of them only."""
        found = dict(super().lookups(request, model_admin))
        return sorted({**{name: name for name in NAMES}, **found}.items())


class StatisticChangeList(EscapedChangeList):
    def get_ordering(self, request: HttpRequest, queryset: Any) -> Any:
        """Within a name, append no id: the order is total, and MariaDB would sort all rows."""
        if request.GET.get("name"):
            return ["-minute", "-source", "-dimension", "-label"]
        return super().get_ordering(request, queryset)


@admin.register(Statistic)
class StatisticAdmin(OutboxAdmin):
    list_display = ["minute", "source", "name", "dimension", "short_label", "value", "written_at"]
    list_display_links = None
    list_filter = [NameFilter, column_filter("source", _("source"))]
    indexed_by = "name"
    actions = None

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Leave the list out of the menu: the overview draws its figures."""
        return {}

    short_label = column(_("label"), lambda row: one_line(row.label, 120))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return StatisticChangeList


def _workers(row: Any) -> str:
    text = given(row, "worker_ids")
    try:
        return shown(", ".join(parsed(text)), 300)
    except TypeError:  # the row was edited by hand
        return shown(text, 300)


def _raised(row: Any) -> Part:
    text = given(row, "errors")
    try:
        traces = "\n".join(each["traceback"][-LIMIT:] for each in parsed(text))
    except (TypeError, KeyError):  # the row was edited by hand
        return json_of(text)
    return Part("", masked_text(shown(traces))) if traces else Part("-")


@admin.register(TaskResult)
class TaskResultAdmin(OutboxAdmin):
    list_display = ["id", "task", "status", "enqueued_at", "started_at", "finished_at", "task_id"]
    list_filter = [column_filter("status", _("status")), column_filter("task", _("task"))]
    sortable_by = ["id"]
    not_listed = ("call", "return_value", "errors", "worker_ids")
    search_fields = ["task_id"]
    search_help_text = _("The whole id of the result.")
    indexed_by = "q"
    payload_permission = "view_payload_taskresult"
    fields = ["task", "task_id", "status", "attempts", "enqueued_at", "started_at",
              "last_attempted_at", "finished_at", "called", "returned", "raised"]  # fmt: skip
    attempts = column(_("workers"), _workers)
    called = carried_column(_("call"), lambda row: json_of(given(row, "call")))
    returned = carried_column(_("return value"), lambda row: json_of(given(row, "return_value")))
    raised = carried_column(_("errors"), _raised)
