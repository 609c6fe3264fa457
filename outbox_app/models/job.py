"""Jobs: ``StagedJob`` waits for the broker, ``DeadJob`` for a person; what was done, and why twice.

A row of ``StagedJob`` exists if and only if the transaction that staged it committed and the broker
has not taken it yet: INSERT and DELETE are all that a delivered job costs. The row holds the
finished message as bytes; nothing here decodes it. Order, leases and publishing live in ``jobs``.
A row of ``TaskResult`` is written with a job of ``django.tasks``, and changed by its worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from ..conf import SHARDS
from .clock import DatabaseNow


class JobMessage(models.Model):
    """The columns that a job keeps for life, staged or dead."""

    id = models.BigAutoField(primary_key=True)
    shard = models.PositiveSmallIntegerField(_("shard"))
    ordering_key = models.CharField(_("ordering key"), max_length=255, blank=True, default="")
    app = models.CharField(_("Celery app"), max_length=255, blank=True, default="")
    task = models.CharField(_("task"), max_length=255)
    task_id = models.CharField(_("task id"), max_length=255)
    queue = models.CharField(_("queue"), max_length=255, blank=True, default="")
    #: The encoded body, exactly the bytes that the broker gets.
    body = models.BinaryField(_("body"))
    #: Everything else of the message, as kombu's JSON in ASCII: see ``jobs.message.Message``.
    envelope = models.TextField(_("envelope"))

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def size(self) -> int:
        return len(self.body) + len(self.envelope)

    def copied(self) -> dict[str, Any]:
        """Return the columns to copy when the job changes its table, by name, without the id."""
        names = [f.attname for f in JobMessage._meta.get_fields() if f.name != "id"]  # type: ignore[union-attr]
        return {name: getattr(self, name) for name in names}


class StagedJobQuerySet(models.QuerySet["StagedJob"]):
    """States of staged jobs, by the database's clock."""

    def ready(self) -> StagedJobQuerySet:
        """Jobs that may leave now, in the order in which they leave."""
        return self.filter(available_at=None).order_by("shard", "id")

    def held(self) -> StagedJobQuerySet:
        """Jobs that wait for their time, due or not."""
        return self.filter(available_at__isnull=False)

    def due(self) -> StagedJobQuerySet:
        return self.filter(available_at__lte=DatabaseNow())


class StagedJob(JobMessage):
    """A committed job on its way to the broker."""

    #: NULL: ready. Else held until then.
    available_at = models.DateTimeField(_("held until"), null=True, blank=True)
    staged_at = models.DateTimeField(_("staged at"), db_default=DatabaseNow(), editable=False)
    #: Held because the process that staged it publishes it right after the commit. Null: it is not.
    is_immediate = models.BooleanField(_("immediate"), null=True, editable=False)
    #: The mode of its call, not stored: only a test stages one of another mode.
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
            # No drainer owns a shard beyond the last: such a row would wait for ever, unseen.
            models.CheckConstraint(condition=models.Q(shard__lt=SHARDS), name="outbox_staged_shard")
        ]

    def as_dead(self, *, error: str, reason: str) -> DeadJob:
        """Return the dead job that this one becomes, not yet saved."""
        message = self.copied()
        return DeadJob(
            **message, staged_id=self.pk, staged_at=self.staged_at, error=error, reason=reason
        )


class DeadJob(JobMessage):
    """A job the system has given up on, kept with its reason until a person decides."""

    #: The id that the row had as a staged job.
    staged_id = models.BigIntegerField(_("staged id"))
    staged_at = models.DateTimeField(_("staged at"), null=True)
    died_at = models.DateTimeField(_("died at"), db_default=DatabaseNow(), db_index=True)
    #: Class of the exception: the part of the reason that is the same for many rows.
    error = models.CharField(_("error"), max_length=255)
    #: The exception in its own words.
    reason = models.TextField(_("reason"))

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
            # In this order they are requeued.
            models.Index(fields=["staged_id"], name="outbox_dead_staged"),
            models.Index(fields=["task_id"], name="outbox_dead_task_id"),
        ]


class InboxEntry(models.Model):
    """A job that was executed, once.

    A worker inserts the id in the same transaction as the effects, so the id is there if and only
    if they are. The primary key makes two deliveries at the same moment wait for one another.
    """

    job_id = models.CharField(_("job id"), max_length=255, primary_key=True)
    task = models.CharField(_("task"), max_length=255)
    handled_at = models.DateTimeField(_("handled at"), db_default=DatabaseNow(), db_index=True)
    #: What the task returned, in kombu's JSON, where it may be asked for; empty for None.
    result = models.TextField(_("result"), blank=True, default="")

    class Meta:
        db_table = "outbox_inbox"
        verbose_name = _("inbox entry")
        verbose_name_plural = _("inbox entries")

    def __str__(self) -> str:
        return f"{self.task}[{self.job_id}]"


class Incident(models.Model):
    """One cause for which jobs may have been published more than once (promise P5).

    After a kill it is unknown which rows the broker had taken already. So the cause is recorded,
    with its shards and the range of ids that it may concern. A job published twice outside every
    incident is a bug.
    """

    class Kind(models.TextChoices):
        TAKEOVER = "takeover", _("shards taken over from a dead drainer")
        UNKNOWN = "unknown", _("outcome of a publish unknown")
        REQUEUE = "requeue", _("requeued by a person")
        CONTRADICTION = "contradiction", _("prepared event: told to confirm and to cancel")

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(_("kind"), max_length=20, choices=Kind.choices)
    created_at = models.DateTimeField(_("recorded at"), db_default=DatabaseNow(), db_index=True)
    drainer = models.CharField(_("drainer"), max_length=300, blank=True, default="")
    shards = models.JSONField(_("shards"), default=list)
    #: Ids of staged jobs that may be concerned, both ends included.
    first_id = models.BigIntegerField(_("first id"))
    last_id = models.BigIntegerField(_("last id"))
    detail = models.TextField(_("detail"), blank=True, default="")

    class Meta:
        db_table = "outbox_incident"
        verbose_name = _("incident")
        verbose_name_plural = _("incidents")

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.first_id}-{self.last_id}"


#: The Celery task that runs those of ``django.tasks``: see ``outbox_app.tasks``.
RUN_TASK = "outbox_app.run_task"


class TaskResultQuerySet(models.QuerySet["TaskResult"]):
    def keep_from(self, moment: Any, jobs: Iterable[StagedJob]) -> None:
        """Keep those that have not begun for as long as if they had been called at that time."""
        ids = [job.task_id for job in jobs if job.task == RUN_TASK]
        if ids:
            waiting = self.filter(status=TaskResult.Status.READY, task_id__in=ids)
            waiting.update(kept_from=moment)

    def settled(self) -> TaskResultQuerySet:
        """Those whose job is neither staged nor dead: it has left, or was discarded."""
        rows = (each.objects.filter(task_id=OuterRef("task_id")) for each in (StagedJob, DeadJob))
        staged, dead = map(Exists, rows)
        return self.exclude(Q(status=TaskResult.Status.READY) & (staged | dead))


class TaskResult(models.Model):
    """A call of a task of ``django.tasks``, and what became of it."""

    class Status(models.TextChoices):
        """As in ``django.tasks``, which Django 5.2 does not have."""

        READY = "READY", _("ready")
        RUNNING = "RUNNING", _("running")
        FAILED = "FAILED", _("failed")
        SUCCESSFUL = "SUCCESSFUL", _("successful")

    id = models.BigAutoField(primary_key=True)
    #: The id of the result, and of the job: Celery's task id.
    task_id = models.CharField(_("task id"), max_length=36, unique=True)
    #: Module and name of the function.
    task = models.CharField(_("task"), max_length=255)
    #: Alias of the backend in TASKS, queue, priority, time, and arguments.
    call = models.TextField(_("call"))
    status = models.CharField(_("status"), max_length=10, choices=Status.choices)
    enqueued_at = models.DateTimeField(_("enqueued at"))
    started_at = models.DateTimeField(_("started at"), null=True)
    last_attempted_at = models.DateTimeField(_("last attempted at"), null=True)
    finished_at = models.DateTimeField(_("finished at"), null=True)
    #: When it is due, began last, or finished: the retention counts from here.
    kept_from = models.DateTimeField(_("kept from"), db_index=True)
    return_value = models.TextField(_("return value"), default="null")
    errors = models.TextField(_("errors"), default="[]")
    #: One for each attempt.
    worker_ids = models.TextField(_("workers"), default="[]")

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
    #: The same of both halves.
    key = models.UUIDField(_("key"), unique=True, default=uuid4, editable=False)
    task = models.CharField(_("task"), max_length=255)
    #: Empty for a row that was written before its task had an id, by ``delay_on_commit``.
    task_id = models.CharField(_("task id"), max_length=255, blank=True, default="")
    at = models.DateTimeField(_("at"), db_default=DatabaseNow(), db_index=True, editable=False)

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class ShadowJob(ShadowHalf):
    """What would be a staged job: it is there if and only if its transaction committed."""

    class Meta(ShadowHalf.Meta):
        db_table = "outbox_shadowjob"


class ShadowNote(ShadowHalf):
    """The broker has taken the task. On a connection of its own: it stays after a rollback."""

    in_transaction = models.BooleanField(_("in a transaction"), default=False)
    #: Why staging would have refused the call; empty: it would not.
    refused = models.CharField(_("refused"), max_length=255, blank=True, default="")

    class Meta(ShadowHalf.Meta):
        db_table = "outbox_shadownote"


class ShadowResult(models.Model):
    """How often the comparison had an outcome for a task."""

    class Outcome(models.TextChoices):
        MATCHED = "matched", _("sent after its commit")
        EARLY = "early", _("sent before its commit")
        NEVER_SENT = "never_sent", _("committed and never sent")
        ROLLED_BACK = "rolled_back", _("sent for a rollback")
        REFUSED = "refused", _("staging would refuse the call")

    id = models.BigAutoField(primary_key=True)
    task = models.CharField(_("task"), max_length=255)
    outcome = models.CharField(_("outcome"), max_length=20, choices=Outcome.choices)
    count = models.BigIntegerField(_("count"))
    last_at = models.DateTimeField(_("last at"))
    last_task_id = models.CharField(_("last task id"), max_length=255, blank=True, default="")

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
