"""The backlog: staged jobs, what blocks them, and what a person can do about them.

A job that a drainer is publishing during an action leaves all the same; the question says so.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import display_for_value
from django.http import HttpRequest
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..database.clock import DatabaseNow
from ..jobs import staged
from ..jobs.drain import status
from ..jobs.drain.status import Held
from ..models import Run, StagedJob, counting
from ..receipts.status import SentJobs
from ..text import duration, one_line, shown
from .actions import BulkAction
from .base import address, column
from .filters import StateFilter, column_filter
from .job import MESSAGE_FIELDS, JobAdmin
from .masking import masked_line
from .tables import COUNT, WORDS, Group, Table, link

CANCEL = BulkAction(
    "cancel_selected",
    "cancel_stagedjob",
    _("Cancel staged jobs"),
    _("Cancel the job"),
    _(
        "The jobs are deleted and never sent. This cannot be undone. A job that a drainer is "
        "publishing at this moment is sent all the same."
    ),
    run_for=lambda rows, reason, **options: staged.cancel_for(rows, **options),
    outcome=ngettext_lazy("%d staged job was cancelled.", "%d staged jobs were cancelled."),
    destroys=True,
)


@admin.register(StagedJob)
class StagedJobAdmin(JobAdmin):
    list_display = ["task", "ordering_key", "available", "staged", "task_id"]
    list_filter = [
        StateFilter,
        column_filter("task", _("task")),
        column_filter("queue", _("queue")),
        column_filter("ordering_key", _("ordering key")),
    ]
    sortable_by = ["staged"]
    payload_permission = "outbox_app.view_payload_stagedjob"
    bulk_actions = (CANCEL,)
    staged = column(_("staged at"), lambda job: job.staged_at, ordering="id")
    # In one column, as a sent job is available no more, and the list fits a narrow screen.
    available = column(_("available at"), lambda job: at_worker(job) or job.available_at)
    worker = column(_("worker"), lambda job: at_worker(job) or "-")
    blocked_reason = column(_("what it waits for"), lambda job: blocked_reason(job))
    fieldsets = [
        (None, {"fields": ["called", "blocked_reason", "task", "task_id", "queue", "ordering_key",
                           "app", "shard", "staged_at", "available_at", "worker", "sent_at",
                           "receipt"]}),
        (_("Message"), {"fields": MESSAGE_FIELDS}),
    ]  # fmt: skip

    def measure(self, rows: list[Any]) -> None:
        sent = [row for row in rows if row.sent_at]
        found = Run.objects.using(sent[0]._state.db).annotate(now=DatabaseNow()) if sent else ()
        runs = {run.pk: run for run in found and found.filter(pk__in=[row.pk for row in sent])}
        for row in sent:
            row.run = runs.get(row.pk)

    def ids_of_task(self, request: HttpRequest, task_id: str, using: str) -> list[int]:
        """Search the parts of the table that may have the task id: it has no index of task ids.

        A job with an ordering key that is not among the newest rows is found only if the list is
        filtered by that key.
        """
        key = request.GET.get("ordering_key", "")
        return staged.ids_of_task(task_id, using=using, ordering_key=key)


def at_worker(job: Any) -> str:
    """Return what workers do with a job that was sent, else nothing."""
    if not job.sent_at:
        return ""
    words = gettext("waiting for a worker")
    if run := job.run:
        values = {
            "worker": one_line(run.worker, 100),
            "time": display_for_value(run.started_at, ""),
        }
        words = gettext("running on %(worker)s since %(time)s") % values
        if run.lease_until <= run.now:
            words = gettext("lost by %(worker)s, which started it at %(time)s") % values
        if run.attempts > 1:
            words += gettext(", attempt %(attempts)d") % {"attempts": run.attempts}
    if (job.publishes or 0) > 1:
        words += gettext(", sent %(publishes)d times") % {"publishes": job.publishes}
    return words


def sent_table(site: str, sent: SentJobs) -> Table:
    columns = {gettext("Queue"): WORDS, gettext("Task"): WORDS, gettext("Waiting"): COUNT,
               gettext("Running"): COUNT, gettext("Sent again"): COUNT,
               gettext("Not started within the limit"): COUNT}  # fmt: skip
    listed = list(sent.groups.items())[: counting.LISTED]
    rows = [
        (
            one_line(queue, 100) or "-",
            link(address(site, "outbox_app.stagedjob", state="sent", queue=queue, task=task),
                 one_line(task, 100)),
            each.waiting, each.running, each.again, each.not_started,
        )
        for (queue, task), each in listed
    ]  # fmt: skip
    group = Group(columns, rows, [bool(each.not_started) for _, each in listed])
    note = "" if sent.complete else gettext("Counted in a part of the table.")
    every = address(site, "outbox_app.stagedjob", state="sent")
    return Table(gettext("Jobs with a receipt, at the workers"), [group], every, note=note)


def blocked_reason(job: StagedJob) -> str:
    using = str(job._state.db)
    if words := at_worker(job):
        return f"{words[:1].upper()}{words[1:]}."
    held = StagedJob.objects.using(using).filter(pk=job.pk, available_at__gt=DatabaseNow())
    if job.available_at and held.exists():
        moment = display_for_value(job.available_at, "-")
        return gettext("Until %(moment)s it is held.") % {"moment": moment}
    drainers = status.drainers(using=using)
    owner = next((each for each in drainers if job.shard in each.owned), None)
    if not drainers:
        return gettext("Waiting for a drainer: none is running.")
    if owner is None:
        return gettext("Waiting for a drainer: none owns shard %(shard)d.") % {"shard": job.shard}
    values = {
        "drainer": shown(owner.drainer, 100),
        "time": duration(owner.silent_seconds),
        "trouble": masked_line(owner.drainer.trouble, 1000),
    }
    if owner.is_silent:
        return gettext("%(drainer)s, which owns its shard, is silent for %(time)s.") % values
    if owner.drainer.trouble:
        return gettext("%(drainer)s, which owns its shard, is in trouble: %(trouble)s") % values
    return gettext("Nothing. %(drainer)s will take it in one of its next batches.") % values


def held_table(site: str, held: Held) -> Table:
    rows = [
        (gettext("due now"), counting.shown_count(held.due)),
        (gettext("due within the hour"), counting.shown_count(held.within_the_hour)),
        (gettext("due later"), counting.shown_count(held.later)),
    ]
    every = address(site, "outbox_app.stagedjob", state="held")
    group = Group({gettext("Due"): "", gettext("Jobs"): ""}, rows)
    return Table(gettext("Held jobs, by when they are due"), [group], every)
