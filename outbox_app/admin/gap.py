"""Gaps: what is missing, since when, how often it was looked for, and what was decided.

Skipping one is a person's act, with a reason, and is recorded on the gap itself too.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.translation import gettext, gettext_lazy, ngettext

from ..exceptions import NotSkippable
from ..models import Gap
from ..operations.gaps import skip_gap
from ..operations.status import LISTED
from ..operations.text import shown
from .asking import AskingAdmin, Decision, RequiredReason
from .filters import column_filter


def _skip(rows: Any, values: dict[str, Any], by: str) -> str:
    count, refused = 0, []
    for id in rows.order_by("id").values_list("id", flat=True)[:LISTED]:
        try:
            skip_gap(id, by=by, reason=values["reason"], using=rows.db)
            count += 1
        except NotSkippable as error:
            refused.append(shown(error, 300))
    done = ngettext("%d gap was skipped.", "%d gaps were skipped.", count) % count
    return " ".join([done, *refused])


class GapAdmin(AskingAdmin):
    """Gaps that readers have noticed."""

    list_display = ["id", "kind", "state", "found_by", "partition", "log", "stream", "first",
                    "last", "seen_at", "attempts", "settled_by", "short_reason"]  # fmt: skip
    list_filter = [
        column_filter("state", gettext_lazy("state")),
        column_filter("kind", gettext_lazy("kind")),
        column_filter("subscription", gettext_lazy("subscription")),
    ]
    sortable_by = ["id"]
    decisions = (
        Decision(
            "skip_selected",
            "skip_gap",
            gettext_lazy("Skip gaps"),
            gettext_lazy(
                "What is missing is given up: the subscription goes on without it. If it comes "
                "later, it is not handled. What an audit has found is accepted: later audits leave "
                "it out. At most 50 at a time."
            ),
            _skip,
            RequiredReason,
        ),
    )

    @admin.display(description=gettext_lazy("found by"))
    def found_by(self, row: Gap) -> str:
        """The subscription, or the audit."""
        return shown(row.subscription, 80) or gettext("an audit")

    @admin.display(description=gettext_lazy("reason"))
    def short_reason(self, row: Gap) -> str:
        """The beginning of the reason."""
        return shown(row.reason, 120)
