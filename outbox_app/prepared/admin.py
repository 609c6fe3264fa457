"""Prepared events: what their senders said, and what a person decides.

Confirm and cancel are guesses unless a person knows the outcome of the sender's transaction; the
question names the risk.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..admin.actions import BulkAction, ConfirmedActionsAdmin
from ..admin.base import column
from ..admin.filters import AgeFilter, ColumnFilter, by_index, column_filter
from ..admin.job import carried_column
from ..admin.payload import data_of
from ..text import shown
from . import operations
from .models import PreparedEvent

State = PreparedEvent.State


def _decide(rows: Any, state: str, values: dict[str, Any], by: str) -> str:
    decided, failed = operations.decide(rows, state, by=by, reason=values["reason"])
    if state == State.CONFIRMED:
        text = ngettext("%d event was confirmed.", "%d events were confirmed.", decided)
    else:
        text = ngettext("%d event was cancelled.", "%d events were cancelled.", decided)
    return " ".join([text % decided, *(shown(each, 300) for each in failed)])


def _check(rows: Any, values: dict[str, Any], by: str) -> str:
    count = operations.check(rows)
    text = ngettext("Asked now: %d event.", "Asked now: %d events.", count) % count
    return f"{text} {gettext('manage.py run_prepared receives the answers.')}"


ACTIONS = (
    BulkAction(
        "check_selected",
        "check_preparedevent",
        _("Ask senders now"),
        _("Ask the sender now"),
        _(
            "A process of manage.py run_prepared asks the senders what became of the transactions, "
            "and decides by their answers. Events that are already decided do not change."
        ),
        _check,
        listed_only=True,
    ),
    BulkAction(
        "confirm_selected",
        "confirm_preparedevent",
        _("Confirm prepared events"),
        _("Confirm the event"),
        _(
            "The events are published, and their jobs staged. This cannot be undone. It is a "
            "guess, unless you know that the sender's transaction has committed: if it was rolled "
            "back, the event never happened. Events that are already decided do not change."
        ),
        lambda rows, values, by: _decide(rows, State.CONFIRMED, values, by),
        listed_only=True,
    ),
    BulkAction(
        "cancel_selected",
        "cancel_preparedevent",
        _("Cancel prepared events"),
        _("Cancel the event"),
        _(
            "The events are never published. This cannot be undone. It is a guess, unless you know "
            "that the sender's transaction was rolled back: if it has committed, its event is "
            "lost. Events that are already decided do not change."
        ),
        lambda rows, values, by: _decide(rows, State.CANCELLED, values, by),
        destroys=True,
        listed_only=True,
    ),
    BulkAction(
        "extend_selected",
        "extend_preparedevent",
        _("Extend prepared events"),
        _("Extend the event"),
        _(
            "The senders are asked for another day before the policy of the events decides. "
            "Undecided events are prepared again."
        ),
        lambda rows, values, by: operations.extend(rows, by=by, reason=values["reason"]),
        outcome=ngettext_lazy("%d event was extended.", "%d events were extended."),
        listed_only=True,
    ),
)


class PreparedStateFilter(ColumnFilter):
    parameter_name = "state"
    title = _("state")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(State.choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        found = super().queryset(request, queryset)
        if found is not None and self.value() in PreparedEvent.OPEN:
            return by_index(request, found, found.order_by("prepared_at"))
        return found


class PreparedAgeFilter(AgeFilter):
    parameter_name = "older"
    lookup = "prepared_at__lte"
    ages = [
        ("1h", _("Older than an hour")),
        ("3h", _("Older than 3 hours")),
        ("24h", _("Older than 24 hours")),
        ("3d", _("Older than 3 days")),
        ("7d", _("Older than 7 days")),
    ]


@admin.register(PreparedEvent)
class PreparedEventAdmin(ConfirmedActionsAdmin):
    list_display = ["__str__", "sender", "why", "prepared_at", "decide_by"]
    list_filter = [PreparedStateFilter, column_filter("sender", _("sender")), PreparedAgeFilter]
    not_listed = ("content",)
    search_fields = ["event_id"]
    search_help_text = _("The whole event id.")
    payload_permission = "outbox_prepared.view_payload_preparedevent"
    why = column(_("why"), lambda row: shown(row.last_answer or row.reason, 120) or "-")
    shown_content = carried_column(_("content"), lambda row: data_of(row.content))
    bulk_actions = ACTIONS
    fieldsets = [
        (None, {"fields": ["state", "type", "stream", "topic", "log", "sender", "event_id",
                           "prepared_at"]}),
        (_("What its sender says"), {"fields": ["asked", "answered", "unreachable", "last_answer",
                                                "next_check_at"]}),
        (_("Decision"), {"fields": ["policy", "decide_by", "decided_at", "decided_by", "reason"]}),
        (_("Content"), {"fields": ["shown_content"]}),
    ]  # fmt: skip
