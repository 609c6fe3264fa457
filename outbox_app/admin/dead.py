"""Dead jobs: why they died, and the two things a person can do about it.

Requeue and discard show which tasks and errors they are about before they do anything, and do not
take jobs that died after that.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..jobs import dead
from ..jobs.dead_summary import WINDOWS, DeadMatrix, DeadRow, dead_groups
from ..models import DeadJob, counting
from ..monitoring.figures import number
from ..text import one_line, shown
from .actions import BulkAction
from .base import address, class_name, column
from .filters import AgeFilter, column_filter
from .job import MESSAGE_FIELDS, JobAdmin
from .masking import masked_line
from .tables import COUNT, SHORT, WORDS, Group, Table, link

REQUEUE = BulkAction(
    "requeue_selected",
    "requeue_deadjob",
    _("Requeue dead jobs"),
    _("Requeue the job"),
    _(
        "The jobs are staged again with the same task ids, in the order in which they were first "
        "staged. A worker may receive a job that it has already executed."
    ),
    run_for=dead.requeue_dead,
    outcome=ngettext_lazy("%d dead job was requeued.", "%d dead jobs were requeued."),
)
DISCARD = BulkAction(
    "discard_selected",
    "discard_deadjob",
    _("Discard dead jobs for good"),
    _("Discard the job for good"),
    _("The jobs are deleted and never sent. This cannot be undone."),
    run_for=dead.discard_dead,
    outcome=ngettext_lazy("%d dead job was discarded.", "%d dead jobs were discarded."),
    destroys=True,
)


@admin.register(DeadJob)
class DeadJobAdmin(JobAdmin):
    list_display = ["task", "short_error", "short_reason", "died", "task_id"]
    list_filter = [
        AgeFilter,
        column_filter("error", _("error")),
        column_filter("task", _("task")),
        column_filter("queue", _("queue")),
    ]
    sortable_by = ["died"]
    payload_permission = "outbox_app.view_payload_deadjob"
    short_error = column(_("error"), lambda job: class_name(job.error))
    short_reason = column(_("reason"), lambda job: shown(job.reason, 120))
    # Ids follow the order in which jobs died.
    died = column(_("died at"), lambda job: job.died_at, ordering="id")
    bulk_actions = (REQUEUE, DISCARD)
    fieldsets = [
        (_("Why it is dead"), {"fields": ["called", "error", "reason", "died_at"]}),
        (_("Job"), {"fields": ["task", "task_id", "queue", "ordering_key", "app", "shard",
                               "staged_id", "staged_at"]}),
        (_("Message"), {"fields": MESSAGE_FIELDS}),
    ]  # fmt: skip

    def summary(self, preview: Any) -> Table:
        groups, is_all = dead_groups(preview)
        columns = {gettext("Count"): COUNT, gettext("Task"): "", gettext("Error"): "",
                   gettext("Newest reason"): WORDS, gettext("Newest"): SHORT}  # fmt: skip
        rows = [
            (
                group.count,
                one_line(group.task, 100),
                one_line(group.error, 100),
                masked_line(group.reason, 200),
                group.newest,
            )
            for group in groups
        ]
        group = Group(columns, rows)
        return Table(gettext("By task and error"), [group], note=_more(is_all))


def matrix_table(site: str, matrix: DeadMatrix) -> Table:
    """Return dead jobs by task and by error; each count links to the list of its jobs."""
    cells = {**dict.fromkeys([*WINDOWS, gettext("All")], COUNT), gettext("Newest reason"): WORDS}
    groups = [
        Group({heading: "", **cells}, [_dead_row(site, row, column) for row in rows])
        for heading, column, rows in (
            (gettext("Task"), "task", matrix.tasks),
            (gettext("Error"), "error", matrix.errors),
        )
    ]
    note = _more(matrix.complete)
    return Table(gettext("Dead jobs"), groups, address(site, "outbox_app.deadjob"), note=note)


def _dead_row(site: str, row: DeadRow, column: str) -> tuple[Any, ...]:
    every = {column: row.name}
    counts = [
        link(address(site, "outbox_app.deadjob", **every, died=window), count) if count else 0
        for window, count in zip(WINDOWS, row.counts, strict=True)
    ]
    total = link(address(site, "outbox_app.deadjob", **every), row.total)
    name = class_name(row.name) if column == "error" else one_line(row.name, 100)
    return name, *counts, total, masked_line(row.reason, 200)


def _more(is_all: bool) -> str:
    if is_all:
        return ""
    words = gettext("There are more. Shown: the most frequent of the newest %(many)s jobs.")
    return words % {"many": number(counting.MANY)}
