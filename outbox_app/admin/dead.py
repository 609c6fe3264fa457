"""Dead jobs: why they died, and the two things a person can do about it.

Requeue and discard are actions on the selected rows or on all that match the filter. Each has its
own permission, asks first (how many, of what, why), takes what it has asked about and nothing that
died since, and leaves a line in the admin's log. By GET nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ..jobs import dead
from ..jobs.bulk import BulkResult
from ..jobs.dead_summary import dead_groups
from ..models import counting
from .actions import Batched, BulkAction
from .base import column
from .filters import AgeFilter, column_filter
from .job import MESSAGE_FIELDS, JobAdmin
from .sections import listed


def _decided(decide: Callable[..., BulkResult]) -> Callable[..., BulkResult]:
    return lambda rows, *, reason, by, **options: decide(
        rows, by=dead.decided(by, reason), **options
    )


REQUEUE = BulkAction(
    "requeue_selected",
    "requeue_deadjob",
    _("Requeue dead jobs"),
    _("Requeue the job"),
    _(
        "They are staged again with the same task ids, in the order in which they were staged "
        "first. A worker may get a job that it had already."
    ),
    batched=Batched(
        _decided(dead.requeue_for),
        dead.ORDER,
        lambda n: ngettext("%d dead job was requeued.", "%d dead jobs were requeued.", n) % n,
    ),
)
DISCARD = BulkAction(
    "discard_selected",
    "discard_deadjob",
    _("Discard dead jobs for good"),
    _("Discard the job for good"),
    _("They are deleted and never sent. This cannot be undone."),
    batched=Batched(
        _decided(dead.discard_for),
        dead.ORDER,
        lambda n: ngettext("%d dead job was discarded.", "%d dead jobs were discarded.", n) % n,
    ),
    destroys=True,
)


class DeadJobAdmin(JobAdmin):
    list_display = ["id", "task", "error", "short_reason", "died_at", "queue", "task_id"]
    list_filter = [
        AgeFilter,
        column_filter("error", _("error")),
        column_filter("task", _("task")),
        column_filter("queue", _("queue")),
    ]
    sortable_by = ["id"]  # which is the order in which they died
    payload_permission = "view_payload_deadjob"
    short_reason = column(_("reason"), lambda job: Truncator(job.reason).chars(120))
    bulk_actions = (REQUEUE, DISCARD)
    fieldsets = [
        (_("Why it is dead"), {"fields": ["error", "reason", "died_at"]}),
        (_("Job"), {"fields": ["task", "task_id", "queue", "ordering_key", "app", "shard",
                               "staged_id", "staged_at"]}),
        (_("Message"), {"fields": MESSAGE_FIELDS}),
    ]  # fmt: skip

    def about(self, request: HttpRequest, preview: Any, action: BulkAction) -> dict[str, Any]:
        found = listed(dead_groups(preview))
        return {**super().about(request, preview, action), "dead": found, "most": counting.MANY}
