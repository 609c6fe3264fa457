"""Filters beside a list. They offer the values of the newest rows only.

Django's own filter for text would read all distinct values of the column, and so every row. An
address can still ask for a value that is not offered, as the overview's links do. A value that no
row can have matches no row, so that an action on all rows that match changes none.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.contrib.admin import SimpleListFilter
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..database.clock import DatabaseNow
from ..jobs.dead_summary import WINDOWS
from ..jobs.drain.batch import apps_with_rows
from ..jobs.drain.status import by_shard
from ..models import Run, counting
from ..text import one_line
from .actions import asked_at
from .base import few

#: How many rows are read for the values to offer.
NEWEST = 1000
#: How many values a filter offers.
OFFERED = 30
#: Up to this number, the rows that an index finds are listed from anywhere in the table.
FEW = 1000


class ColumnFilter(SimpleListFilter):
    parameter_name: str

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        rows = model_admin.get_queryset(request).order_by("-id")
        values = set(rows.values_list(self.parameter_name, flat=True)[:NEWEST])
        offered = [str(value) for value in sorted(values)[:OFFERED]]
        asked = self.value()
        if asked is not None and asked not in offered:
            offered.append(asked)
        labels = dict(model_admin.opts.get_field(self.parameter_name).flatchoices)
        return [(value, one_line(labels.get(value, value), 80) or "-") for value in offered]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        asked = self.value()
        if asked is None:
            return None
        with suppress(ValueError):  # the column has numbers, and the value is none
            if "\x00" not in asked:  # PostgreSQL refuses a NUL
                return queryset.filter(**{self.parameter_name: asked})
        return queryset.none()


def column_filter(name: str, heading: Any) -> type[ColumnFilter]:
    return type(f"{name}_filter", (ColumnFilter,), {"parameter_name": name, "title": heading})


class StateFilter(SimpleListFilter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("ready", _("Ready")),
            ("held", _("Held")),
            ("due", _("Held, and due by now")),
            ("sent", _("Waiting for a worker, or running")),
            ("running", _("Running")),
            ("not_started", _("Not started within the limit")),
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        match self.value():
            case None:
                return None
            case "ready":
                return queryset.filter(available_at=None)
            case "held":
                return _held(request, queryset.held())
            case "due":
                return _held(request, queryset.held().filter(available_at__lte=asked_at(request)))
            case "sent":
                return _held(request, queryset.sent())
            case "not_started":
                return _held(request, queryset.not_started())
            case "running":
                alive = Run.objects.using(queryset.db).filter(lease_until__gt=DatabaseNow())
                ids = list(alive.values_list("staged_id", flat=True)[: counting.MANY])
                return few(request, queryset, ids)
        return queryset.none()


def _held(request: HttpRequest, jobs: Any) -> Any:
    jobs = jobs.filter(available_at__isnull=False)  # sent ones have a time, too: of the next look
    return by_index(request, jobs, by_shard(jobs, apps_with_rows(using=jobs.db)).order_by())


def by_index(request: HttpRequest, rows: QuerySet[Any], indexed: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows; if an index finds only a few, from anywhere in the table."""
    # The rows may lie below millions of others, outside the range of ids that a list reads.
    ids = list(indexed.values_list("id", flat=True)[: FEW + 1])
    return few(request, rows, ids) if len(ids) <= FEW else rows


class AgeFilter(SimpleListFilter):
    """Filters by age, on the database's clock. A dead job's age counts from its death."""

    title = _("age")
    parameter_name = "died"
    lookup = "died_at__gte"
    #: Each of ``WINDOWS`` with its label.
    ages = [
        ("1h", _("In the last hour")),
        ("3h", _("In the last 3 hours")),
        ("24h", _("In the last 24 hours")),
        ("3d", _("In the last 3 days")),
        ("7d", _("In the last 7 days")),
    ]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return self.ages

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if (asked := self.value()) is None:
            return None
        age = WINDOWS.get(asked)
        return queryset.filter(**{self.lookup: asked_at(request) - age}) if age else queryset.none()
