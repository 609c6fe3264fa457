"""Jobs: staged ones wait for the broker, dead ones for a person; inbox, incidents, task results.

A row of ``StagedJob`` exists if and only if the transaction that staged it committed and the broker
has not taken it yet. The row holds the finished message as bytes; nothing here decodes it. A row of
``TaskResult`` is inserted with each job of ``django.tasks``, and updated by the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from django.db import models
from django.db.models import Exists, OuterRef
from django.utils.translation import gettext_lazy as _

from ..conf import SHARDS
from ..fields import CharField, TextField
from .clock import DatabaseNow


class JobMessage(models.Model):
    """The columns that staged and dead jobs have in common."""

    id = models.BigAutoField(primary_key=True)
    shard = models.PositiveSmallIntegerField(_("shard"))
    ordering_key = CharField(_("ordering key"), max_length=255, blank=True, default="")
    app = CharField(_("Celery app"), max_length=255, blank=True, default="")
    task = CharField(_("task"), max_length=255)
    task_id = CharField(_("task id"), max_length=255)
    queue = CharField(_("queue"), max_length=255, blank=True, default="")
    #: The encoded body, exactly the bytes that the broker gets.
    body = models.BinaryField(_("body"))
    #: The rest of the message, as kombu's JSON in ASCII: see ``jobs.message.Message``.
    envelope = TextField(_("envelope"))

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def size(self) -> int:
        return len(self.body) + len(self.envelope)

    def copied(self) -> dict[str, Any]:
        """Return the columns, without the id, to copy when the job moves to another table."""
        columns = JobMessage._meta.get_fields()
        return {f.name: getattr(self, f.name) for f in columns if f.name != "id"}


class StagedJobQuerySet(models.QuerySet["StagedJob"]):
    """Staged jobs by state, judged by the database's clock."""

    def ready(self) -> StagedJobQuerySet:
        """Jobs that may be published now, in the order of publication."""
        return self.filter(available_at=None).order_by("shard", "id")

    def held(self) -> StagedJobQuerySet:
        """Jobs with a time before which they are not published, due or not."""
        return self.filter(available_at__isnull=False)

    def due(self) -> StagedJobQuerySet:
        return self.filter(available_at__lte=DatabaseNow())


class StagedJob(JobMessage):
    """A committed job on its way to the broker."""

    #: The time until which the job is held; NULL if it is ready.
    available_at = models.DateTimeField(_("held until"), null=True, blank=True)
    staged_at = models.DateTimeField(_("staged at"), db_default=DatabaseNow(), editable=False)
    #: True if it is held for the process that staged it, which publishes it after its commit.
    is_immediate = models.BooleanField(_("immediate"), null=True, editable=False)
    #: The mode of the call, which is not stored. Only tests stage a job in another mode.
    mode = "stage"

    objects = StagedJobQuerySet.as_manager()

    class Meta:
        db_table = "outbox_stagedjob"
        verbose_name = _("staged job")
        verbose_name_plural = _("staged jobs")
        permissions = [
            ("cancel_stagedjob", _("Can cancel staged jobs")),
            ("release_stagedjob", _("Can release held jobs")),
            ("bury_stagedjob", _("Can move staged jobs to dead")),
            ("view_payload_stagedjob", _("Can see the messages of staged jobs")),
        ]
        indexes = [
            # One index serves ready rows (NULL, in id order) and held ones (by time), app by app
            # and shard by shard: a million held rows cost the ready ones nothing.
            models.Index(fields=["app", "shard", "available_at", "id"], name="outbox_staged_ready"),
        ]
        constraints = [
            # No drainer owns a shard above the last: a row there would never be published.
            models.CheckConstraint(condition=models.Q(shard__lt=SHARDS), name="outbox_staged_shard")
        ]

    def as_dead(self, *, error: str, reason: str) -> DeadJob:
        """Return this job as a dead job, not saved."""
        known = {"staged_id": self.pk, "staged_at": self.staged_at}
        return DeadJob(**self.copied(), **known, error=error, reason=reason)


class DeadJob(JobMessage):
    """A job the system has given up on, kept with its reason until a person decides."""

    staged_id = models.BigIntegerField(_("staged id"))
    staged_at = models.DateTimeField(_("staged at"), null=True)
    died_at = models.DateTimeField(_("died at"), db_default=DatabaseNow(), db_index=True)
    #: The class of the exception: the part of the reason by which rows are grouped.
    error = CharField(_("error"), max_length=255)
    #: The message of the exception, or what the person wrote who moved the job.
    reason = TextField(_("reason"))

    class Meta:
        db_table = "outbox_deadjob"
        verbose_name = _("dead job")
        verbose_name_plural = _("dead jobs")
        permissions = [
            ("requeue_deadjob", _("Can requeue dead jobs")),
            ("discard_deadjob", _("Can discard dead jobs")),
            ("view_payload_deadjob", _("Can see the messages of dead jobs")),
        ]
        indexes = [
            models.Index(fields=["error", "task"], name="outbox_dead_error"),
            models.Index(fields=["ordering_key"], name="outbox_dead_key"),
            # Dead jobs are requeued in this order.
            models.Index(fields=["staged_id"], name="outbox_dead_staged"),
            models.Index(fields=["task_id"], name="outbox_dead_task_id"),
        ]


class InboxEntry(models.Model):
    """A job that was executed: its worker inserts the row in the transaction of the effects.

    The primary key makes two simultaneous deliveries wait for one another.
    """

    job_id = CharField(_("job id"), max_length=255, primary_key=True)
    task = CharField(_("task"), max_length=255)
    handled_at = models.DateTimeField(_("handled at"), db_default=DatabaseNow(), db_index=True)
    #: The task's return value in kombu's JSON, if callers may ask for it; empty for None.
    result = TextField(_("result"), blank=True, default="")
    #: JSON: the ``on_commit`` callbacks at risk that did not run to their end; empty if all did.
    callbacks = TextField(_("callbacks"), blank=True, default="")

    class Meta:
        db_table = "outbox_inbox"
        verbose_name = _("inbox entry")
        verbose_name_plural = _("inbox entries")

    def __str__(self) -> str:
        return f"{self.task}[{self.job_id}]"


class Incident(models.Model):
    """One cause for which jobs may have been published more than once (promise P5).

    After a drainer is killed it is unknown which rows the broker has taken already. A job that was
    published twice outside all incidents is a bug.
    """

    class Kind(models.TextChoices):
        TAKEOVER = "takeover", _("shards taken over from a dead drainer")
        UNKNOWN = "unknown", _("outcome of a publish unknown")
        REQUEUE = "requeue", _("requeued by a person")
        CONTRADICTION = "contradiction", _("prepared event: told to confirm and to cancel")

    id = models.BigAutoField(primary_key=True)
    kind = CharField(_("kind"), max_length=20, choices=Kind.choices)
    created_at = models.DateTimeField(_("recorded at"), db_default=DatabaseNow(), db_index=True)
    drainer = CharField(_("drainer"), max_length=300, blank=True, default="")
    shards = models.JSONField(_("shards"), default=list)
    #: The range of ids of staged jobs that may be affected, both ends included.
    first_id = models.BigIntegerField(_("first id"))
    last_id = models.BigIntegerField(_("last id"))
    detail = TextField(_("detail"), blank=True, default="")

    class Meta:
        db_table = "outbox_incident"
        verbose_name = _("incident")
        verbose_name_plural = _("incidents")

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.first_id}-{self.last_id}"


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
        db_table = "outbox_taskresult"
        verbose_name = _("task result")
        verbose_name_plural = _("task results")
        permissions = [("view_payload_taskresult", _("Can see arguments and results of tasks"))]

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def size(self) -> int:
        return len(self.call) + len(self.return_value)


class ShadowHalf(models.Model):
    """One half of what shadow mode compares: see ``jobs.staging.shadow``."""

    id = models.BigAutoField(primary_key=True)
    #: The two halves of a comparison have the same key.
    key = models.UUIDField(_("key"), unique=True, default=uuid4, editable=False)
    task = CharField(_("task"), max_length=255)
    #: Empty if ``delay_on_commit`` wrote the row, before its task had an id.
    task_id = CharField(_("task id"), max_length=255, blank=True, default="")
    at = models.DateTimeField(_("at"), db_default=DatabaseNow(), db_index=True, editable=False)

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class ShadowJob(ShadowHalf):
    """A row in place of a staged job: it exists if and only if its transaction committed."""

    class Meta(ShadowHalf.Meta):
        db_table = "outbox_shadowjob"


class ShadowNote(ShadowHalf):
    """A task that the broker has taken. Its own connection writes the row, so rollbacks keep it."""

    in_transaction = models.BooleanField(_("in a transaction"), default=False)
    #: Why staging would have refused the call; empty if it would have accepted it.
    refused = CharField(_("refused"), max_length=255, blank=True, default="")

    class Meta(ShadowHalf.Meta):
        db_table = "outbox_shadownote"


class ShadowResult(models.Model):
    """How often the comparison of a task had a certain outcome."""

    class Outcome(models.TextChoices):
        MATCHED = "matched", _("sent after its commit")
        EARLY = "early", _("sent before its commit")
        NEVER_SENT = "never_sent", _("committed and never sent")
        ROLLED_BACK = "rolled_back", _("sent for a rollback")
        REFUSED = "refused", _("staging would refuse the call")

    id = models.BigAutoField(primary_key=True)
    task = CharField(_("task"), max_length=255)
    outcome = CharField(_("outcome"), max_length=20, choices=Outcome.choices)
    count = models.BigIntegerField(_("count"))
    last_at = models.DateTimeField(_("last at"))
    last_task_id = CharField(_("last task id"), max_length=255, blank=True, default="")

    class Meta:
        db_table = "outbox_shadowresult"
        verbose_name = _("shadow result")
        verbose_name_plural = _("shadow results")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["task", "outcome"], name="outbox_shadow_outcome"),
        ]

    def __str__(self) -> str:
        return f"{self.task} {self.outcome}: {self.count}"
