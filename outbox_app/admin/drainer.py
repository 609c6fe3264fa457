"""Processes and incidents, read-only, and the overview.

The overview needs an address in the admin without a change to the project's AdminSite, so it lives
below the list of processes; the app's index and every list of ours link to it.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from .base import OutboxAdmin, column
from .filters import column_filter
from .overview import overview


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
