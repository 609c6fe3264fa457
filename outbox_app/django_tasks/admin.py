"""Results of tasks of ``django.tasks``, read-only.

Arguments, return values and errors are payload: the page of a result shows them to those who have
the permission, and the list does not show them.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from ..admin.base import OutboxAdmin, column, stored_value
from ..admin.filters import column_filter
from ..admin.job import carried_column
from ..admin.masking import masked_text
from ..admin.payload import TextBlock, json_of, parsed
from ..text import LIMIT, shown
from .models import TaskResult


def _workers(row: Any) -> str:
    text = stored_value(row, "worker_ids")
    try:
        return shown(", ".join(parsed(text)), 300)
    except TypeError:  # the row was edited by hand
        return shown(text, 300)


def _raised(row: Any) -> TextBlock:
    text = stored_value(row, "errors")
    try:
        traces = "\n".join(each["traceback"][-LIMIT:] for each in parsed(text))
    except (TypeError, KeyError):  # the row was edited by hand
        return json_of(text)
    return TextBlock("", masked_text(shown(traces))) if traces else TextBlock("-")


@admin.register(TaskResult)
class TaskResultAdmin(OutboxAdmin):
    list_display = ["task", "status", "enqueued", "finished_at", "task_id"]
    list_filter = [column_filter("status", _("status")), column_filter("task", _("task"))]
    sortable_by = ["enqueued"]
    enqueued = column(_("enqueued at"), lambda row: row.enqueued_at, ordering="id")
    not_listed = ("call", "return_value", "errors", "worker_ids")
    search_fields = ["task_id"]
    search_help_text = _("The whole id of the result.")
    indexed_by = "q"
    payload_permission = "outbox_django_tasks.view_payload_taskresult"
    fields = ["task", "task_id", "status", "attempts", "enqueued_at", "started_at",
              "last_attempted_at", "finished_at", "called", "returned", "raised"]  # fmt: skip
    attempts = column(_("workers"), _workers)
    called = carried_column(_("call"), lambda row: json_of(stored_value(row, "call")))
    returned = carried_column(
        _("return value"), lambda row: json_of(stored_value(row, "return_value"))
    )
    raised = carried_column(_("errors"), _raised)
