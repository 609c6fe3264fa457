"""Which rows an action is about, and its line in the admin's log: who, why, with what outcome.

A batched action writes a line for each POST. If the web server's process is killed during a POST,
that POST has no line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.http import HttpRequest
from django.utils.translation import gettext as _

from ..text import shown

if TYPE_CHECKING:
    from .actions import BulkAction


@dataclass(frozen=True, slots=True)
class Selection:
    ids: list[str]
    #: Whether all rows that match the filter are selected. The ids are ignored then.
    across: bool
    #: The query string of the list, with the filter.
    query: str

    @classmethod
    def of(cls, request: HttpRequest) -> Selection:
        across = request.POST.get("select_across") == "1"
        ids = request.POST.getlist(ACTION_CHECKBOX_NAME)
        return cls(ids[:1] if across else ids, across, request.GET.urlencode())

    def __str__(self) -> str:
        return (self.query or "-") if self.across else ", ".join(self.ids)


def log(request: HttpRequest, rows: Any, action: BulkAction, outcome: str, reason: str) -> None:
    selection = Selection.of(request)
    single = len(selection.ids) == 1 and not selection.across
    alias = getattr(request, "outbox_database", "")  # of several databases with such an id
    message = _("%(outcome)s Action: %(action)s. Rows: %(rows)s. Reason: %(reason)s") % {
        "outcome": outcome,
        "action": action.name,
        "rows": f"{selection}{alias and f' on {alias!r}'}",
        "reason": reason,
    }
    LogEntry.objects.create(
        user_id=request.user.pk,  # type: ignore[misc]
        content_type=get_content_type_for_model(rows.model),
        # The history page of a row finds the line by this id.
        object_id=selection.ids[0] if single else None,
        object_repr=outcome[:200],
        action_flag=DELETION if action.destroys else CHANGE,
        change_message=shown(message),
    )
