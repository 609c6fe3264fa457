"""Jobs: staged ones wait for the broker, dead ones for a person; inbox and incidents.

A row of ``StagedJob`` exists if and only if the transaction that staged it committed and the broker
has not taken it yet; with a receipt, until a worker has executed it. The row holds the finished
message as bytes; nothing here decodes it.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models.expressions import RawSQL
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..conf import SHARDS
from ..database.clock import DatabaseNow, later_sql
from ..fields import CharField, TextField

require_app("outbox_app")


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
    #: For how many seconds a worker may leave it unstarted until it is sent again. NULL: it has no
    #: receipt, and its row goes when the broker has taken it.
    receipt = models.PositiveIntegerField(_("receipt"), null=True, blank=True, editable=False)

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
        """Jobs with a time before which they are not published, due or not; no sent ones."""
        return self.filter(available_at__isnull=False, sent_at=None)

    def due(self) -> StagedJobQuerySet:
        """Held jobs whose time has come, and sent ones that nothing has started in time."""
        return self.filter(available_at__lte=DatabaseNow())

    def sent(self) -> StagedJobQuerySet:
        """Jobs with a receipt that the broker has taken: they wait for a worker, or run."""
        return self.filter(sent_at__isnull=False)

    def not_started(self) -> StagedJobQuerySet:
        """Sent jobs that no worker has started within their limit."""
        limit_ago = RawSQL(later_sql("-receipt", self.db), [], models.DateTimeField())
        late = models.Q(publishes__gt=1) | models.Q(sent_at__lt=limit_ago)
        runs = Run.objects.filter(staged_id=models.OuterRef("pk"))
        return self.sent().filter(~models.Exists(runs), late)


class StagedJob(JobMessage):
    """A committed job on its way to the broker."""

    #: The time until which the job is held; NULL if it is ready. For a job that was sent: when the
    #: drain looks whether a worker has started it.
    available_at = models.DateTimeField(_("held until"), null=True, blank=True)
    staged_at = models.DateTimeField(_("staged at"), db_default=DatabaseNow(), editable=False)
    #: True if it is held for the process that staged it, which publishes it after its commit.
    is_immediate = models.BooleanField(_("immediate"), null=True, editable=False)
    #: When the broker took it, and how often it did; NULL: never. Only jobs with a receipt stay.
    sent_at = models.DateTimeField(_("sent at"), null=True, editable=False)
    publishes = models.PositiveSmallIntegerField(_("publishes"), null=True, editable=False)
    #: The mode of the call, which is not stored. Only tests stage a job in another mode.
    mode = "stage"

    objects = StagedJobQuerySet.as_manager()

    class Meta:
        app_label = "outbox_app"
        db_table = "outbox_stagedjob"
        verbose_name = _("staged job")
        verbose_name_plural = _("staged jobs")
        permissions = [
            ("cancel_stagedjob", _("Can cancel staged jobs")),
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


class Run(models.Model):
    """A worker executes a job with a receipt: see ``outbox_app.receipts``.

    The row goes with that of the job. It has no foreign key, which would cost each deletion of a
    job without a receipt a look-up.
    """

    #: The id of the staged row. A task id would not do: a caller may choose the same one twice.
    staged_id = models.BigIntegerField(_("staged id"), primary_key=True)
    worker = CharField(_("worker"), max_length=255)
    #: Names this attempt: only the worker process that made it renews or ends it.
    token = CharField(_("token"), max_length=32, editable=False)
    #: How often a worker has started it without an end, this time included.
    attempts = models.PositiveSmallIntegerField(_("attempts"))
    #: The number of the retry, from the message.
    retries = models.PositiveIntegerField(_("retries"))
    started_at = models.DateTimeField(_("started at"))
    #: Another worker may start the job after this time. The worker that runs it moves it on.
    lease_until = models.DateTimeField(_("lease until"))

    class Meta:
        app_label = "outbox_app"
        db_table = "outbox_run"
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.staged_id} on {self.worker}"


class DeadJob(JobMessage):
    """A job the system has given up on, kept with its reason until a person decides."""

    staged_id = models.BigIntegerField(_("staged id"))
    staged_at = models.DateTimeField(_("staged at"), null=True)
    died_at = models.DateTimeField(_("died at"), db_default=DatabaseNow(), db_index=True)
    #: The class of the exception: the part of the reason by which rows are grouped.
    error = CharField(_("error"), max_length=255)
    #: The message of the exception.
    reason = TextField(_("reason"))

    class Meta:
        app_label = "outbox_app"
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
        app_label = "outbox_app"
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
        UNKNOWN = "unknown", _("may have been sent twice: the end of a send is unknown")
        REQUEUE = "requeue", _("requeued by a person")
        CONTRADICTION = "contradiction", _("told to confirm and to cancel")
        NO_RECEIPT = "no_receipt", _("sent again: no worker has started or finished it")

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
        app_label = "outbox_app"
        db_table = "outbox_incident"
        verbose_name = _("incident")
        verbose_name_plural = _("incidents")

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.first_id}-{self.last_id}"
