"""Results of ``django.tasks``: a row is inserted with each job, and updated by the worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import models
from django.db.models import Exists, OuterRef
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..fields import CharField, TextField
from ..models import DeadJob, StagedJob

require_app("outbox_app.django_tasks")

#: The Celery task that runs the tasks of ``django.tasks``: see ``outbox_app.django_tasks``.
RUN_TASK = "outbox_app.run_task"


class TaskResultQuerySet(models.QuerySet["TaskResult"]):
    def keep_from(self, moment: Any, jobs: Iterable[StagedJob]) -> None:
        """Let the retention of results whose task has not begun count from this time."""
        ids = [job.task_id for job in jobs if job.task == RUN_TASK]
        if ids:
            waiting = self.filter(status=TaskResult.Status.READY, task_id__in=ids)
            waiting.update(kept_from=moment)

    def settled(self) -> TaskResultQuerySet:
        """Results whose job is neither staged nor dead: it was published, or discarded."""
        jobs = (each.objects.filter(task_id=OuterRef("task_id")) for each in (StagedJob, DeadJob))
        return self.filter(*(~Exists(rows) for rows in jobs))


class TaskResult(models.Model):
    """A call of a task of ``django.tasks``, and its result."""

    class Status(models.TextChoices):
        """The states of ``django.tasks``, which Django 5.2 does not have."""

        READY = "READY", _("ready")
        RUNNING = "RUNNING", _("running")
        FAILED = "FAILED", _("failed")
        SUCCESSFUL = "SUCCESSFUL", _("successful")

    id = models.BigAutoField(primary_key=True)
    #: The id of the result and of the job, which is Celery's task id.
    task_id = CharField(_("task id"), max_length=36, unique=True)
    #: Module and name of the function.
    task = CharField(_("task"), max_length=255)
    #: JSON of the backend's alias in TASKS, the queue, priority, time to run after, and arguments.
    call = TextField(_("call"))
    status = CharField(_("status"), max_length=10, choices=Status.choices)
    enqueued_at = models.DateTimeField(_("enqueued at"))
    started_at = models.DateTimeField(_("started at"), null=True)
    last_attempted_at = models.DateTimeField(_("last attempted at"), null=True)
    finished_at = models.DateTimeField(_("finished at"), null=True)
    #: When the task is due, last began, or finished. The retention counts from this time.
    kept_from = models.DateTimeField(_("kept from"), db_index=True)
    return_value = TextField(_("return value"), default="null")
    errors = TextField(_("errors"), default="[]")
    #: JSON list with the worker of each attempt.
    worker_ids = TextField(_("workers"), default="[]")

    objects = TaskResultQuerySet.as_manager()

    class Meta:
        app_label = "outbox_django_tasks"
        db_table = "outbox_taskresult"
        verbose_name = _("task result")
        verbose_name_plural = _("task results")
        permissions = [("view_payload_taskresult", _("Can see arguments and results of tasks"))]

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def size(self) -> int:
        return len(self.call) + len(self.return_value)
