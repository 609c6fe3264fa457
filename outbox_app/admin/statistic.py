"""Statistics, read-only: by name and source, the newest minute first.

With a name they come in the order of their index; without, the last written come first. Other than
the table of a log, this one is small: see ``operations.statistics``.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..models import Statistic
from ..operations.text import one_line
from ..pipeline.statistic_names import NAMES
from .base import OutboxAdmin
from .filters import ColumnFilter, column_filter


class NameFilter(ColumnFilter):
    """By name: those of every log, and of the newest rows."""

    parameter_name = "name"
    title = _("name")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Offer the known names too: those of the newest rows may be a few only."""
        found = dict(super().lookups(request, model_admin))
        return sorted({**{name: name for name in NAMES}, **found}.items())


class StatisticAdmin(OutboxAdmin):
    """Figures about minutes."""

    list_display = ["minute", "source", "name", "dimension", "short_label", "value", "written_at"]
    list_display_links = None
    list_filter = [NameFilter, column_filter("source", _("source"))]
    actions = None

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """By the index where a name is asked for: it ends in what is unique."""
        if request.GET.get("name"):
            return ("-name", "-minute", "-source", "-dimension", "-label")
        return ("-id",)

    @admin.display(description=_("label"))
    def short_label(self, row: Statistic) -> str:
        """The label, on one line."""
        return one_line(row.label, 120)
