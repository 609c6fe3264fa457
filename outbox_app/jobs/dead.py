"""Dead jobs: a person requeues or discards them.

Both actions go through their rows in batches, each a transaction of its own, in the order in which
the jobs were staged. A row is requeued once however many people ask at the same moment, and a
stopped run can be started again for the rest. An action takes only rows that were dead when the
call began, by id and by time: a job that dies again at once is not requeued for ever, and a job
that has got the id of a lost row (after a fail-over, TRUNCATE … RESTART IDENTITY) is left alone. A
requeued job is a new row with the same message and task id; the drain treats it as any other row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from celery import current_app
from django.db.models import Max, Min, QuerySet

from ..conf import outbox_settings
from ..models import DatabaseNow, DeadJob, StagedJob, TaskResult
from ..models.counting import counted
from ..process.lock_wait import atomic_with_lock_wait
from ..text import get_logger
from . import bulk
from .bulk import BATCH_SIZE, BulkResult, Moment, run_for
from .drain.incidents import LOCK_SECONDS, record_requeue
from .message import Message, moment
from .staging import insert
from .staging.producer import held_until
from .staging.sending import celery_app

logger = get_logger("outbox_app.dead")

#: Batches follow the order of this column.
ORDER = "staged_id"


def find_dead(
    *,
    using: str,
    ids: Iterable[int] | None = None,
    task: str | None = None,
    error: str | None = None,
    reason: str | None = None,
    queue: str | None = None,
    ordering_key: str | None = None,
    app: str | None = None,
    older_than: timedelta | None = None,
    newer_than: timedelta | None = None,
) -> QuerySet[DeadJob]:
    """Return the dead jobs that match all of the given conditions.

    Args:
        using: Database alias.
        ids: Ids of dead jobs.
        task, error, queue, ordering_key, app: The exact value of the column.
        reason: A part of the reason.
        older_than, newer_than: Bounds of the time since the job died, by the database's clock.
    """
    wanted: dict[str, Any] = {
        "id__in": None if ids is None else list(ids),
        "task": task,
        "error": error,
        "reason__contains": reason,
        "queue": queue,
        "ordering_key": ordering_key,
        "app": app,
        "died_at__lt": None if older_than is None else DatabaseNow() - older_than,
        "died_at__gte": None if newer_than is None else DatabaseNow() - newer_than,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return DeadJob.objects.using(using).filter(**given)


def decided(by: str, reason: str) -> str:
    return f"{by} (reason: {reason})" if reason else by


def requeue_dead(
    jobs: QuerySet[DeadJob], *, using: str, batch_size: int = BATCH_SIZE, by: str = ""
) -> int:
    """Stage dead jobs again, and record an incident: they may have been published before.

    If dead jobs block their ordering key (``OUTBOX["DEAD_KEY"]``), the later dead jobs of the key
    are requeued in the same transaction: if they stayed dead, they would block the key.

    Args:
        jobs: The dead jobs, for example from ``find_dead``.
        using: Database alias.
        batch_size: Rows of one transaction.
        by: Who decided, and why, for the incident: see ``decided``.

    Returns:
        How many jobs were requeued, without those that were gone by then.

    Raises:
        InvalidJob: A message does not fit the database's packet any more. The earlier batches are
            requeued.
    """
    return _to_the_end(requeue_for, jobs.using(using), batch_size=batch_size, by=by)


def discard_dead(
    jobs: QuerySet[DeadJob], *, using: str, batch_size: int = BATCH_SIZE, by: str = ""
) -> int:
    """Delete dead jobs, which are then never sent; return how many were deleted.

    Takes the arguments of ``requeue_dead``; ``by`` goes to the log.
    """
    return _to_the_end(discard_for, jobs.using(using), batch_size=batch_size, by=by)


def requeue_for(
    jobs: QuerySet[DeadJob], *, until: int, asked: Moment, by: str = "", **options: Any
) -> BulkResult:
    """Stage the dead jobs again whose id is at most ``until`` and that had died by ``asked``.

    ``options`` (the time limit, the place to resume at) go to ``bulk.run_for``.
    """
    act = partial(_requeue_batch, until=until, asked=asked, using=jobs.db, by=by, incidents=[])
    return run_for(jobs, act, order=ORDER, until=until, **options)


def discard_for(
    jobs: QuerySet[DeadJob], *, until: int, asked: Moment, by: str = "", **options: Any
) -> BulkResult:
    """Delete dead jobs. Takes what ``requeue_for`` takes."""
    act = partial(_discard_batch, asked=asked, using=jobs.db)
    found = run_for(jobs, act, order=ORDER, until=until, **options)
    if found.done:
        logger.warning("Dead jobs discarded database=%s jobs=%d by=%s", jobs.db, found.done, by)
    return found


def _to_the_end(decide: Callable[..., BulkResult], jobs: QuerySet[DeadJob], **options: Any) -> int:
    newest = DeadJob.objects.using(jobs.db).order_by("-id").annotate(now=DatabaseNow())
    until, asked = newest.values_list("id", "now").first() or (0, DatabaseNow())
    few = counted(jobs, limit=bulk.STEP) <= bulk.STEP
    found = decide(jobs, until=until, asked=asked, whole=few, **options)
    if found.error:
        raise found.error
    return found.done


def _requeue_batch(
    ids: list[int], *, until: int, asked: Moment, using: str, by: str, incidents: list[int]
) -> int:
    with atomic_with_lock_wait(LOCK_SECONDS, using=using):
        jobs = list(_locked(asked, using=using).filter(pk__in=ids))
        if outbox_settings().DEAD_KEY == "block":
            jobs += _followers(jobs, until=until, asked=asked, using=using)
        if not jobs:
            return 0
        jobs.sort(key=lambda job: (job.staged_id, job.pk))
        DeadJob.objects.using(using).filter(pk__in=[job.pk for job in jobs]).delete()
        staged = [StagedJob(**job.copied()) for job in jobs]
        for job in staged:  # the same shard, unless the row was edited by hand
            job.shard = insert.shard_of(job.ordering_key, job.task_id)
            job.available_at = _held_until(job, using=using)
        insert.write(staged, using=using, with_ids=True)  # wakes the drainers after the commit
        ready = [job for job in staged if job.available_at is None]
        TaskResult.objects.using(using).keep_from(DatabaseNow(), ready)
        incident = record_requeue(
            shards={job.shard for job in staged},
            ids=_written(staged, using=using),
            by=by,
            same_as=incidents[-1] if incidents else None,
            using=using,
        )
    incidents.append(incident)  # only now: a rollback would undo the incident
    return len(staged)


def _held_until(job: StagedJob, *, using: str) -> datetime | None:
    app = celery_app(job.app) or current_app
    try:
        eta = moment(Message.loads(job.envelope).headers.get("eta"), app)
    except Exception:  # a damaged envelope: the drain reports it
        return None
    return held_until(eta, app, using=using)


def _discard_batch(ids: list[int], *, asked: Moment, using: str) -> int:
    with atomic_with_lock_wait(LOCK_SECONDS, using=using):
        locked = list(_locked(asked, using=using).filter(pk__in=ids).values_list("pk", flat=True))
        return DeadJob.objects.using(using).filter(pk__in=locked).delete()[0]


def _locked(asked: Moment, *, using: str) -> QuerySet[DeadJob]:
    # If two people act at the same moment, the second one waits here, and then finds the rows gone.
    # The order by id makes deadlocks between two batches rare. SQLite locks at BEGIN.
    jobs = DeadJob.objects.using(using).filter(died_at__lte=asked)
    return jobs.order_by("id").select_for_update()


def _followers(jobs: list[DeadJob], *, until: int, asked: Moment, using: str) -> list[DeadJob]:
    """Return the dead jobs of the same ordering keys that were staged after ``jobs``."""
    first: dict[str, int] = {}
    for job in jobs:
        if job.ordering_key:
            key = job.ordering_key
            first[key] = min(job.staged_id, first.get(key, job.staged_id))
    taken = {job.pk for job in jobs}
    of_keys = _locked(asked, using=using).filter(ordering_key__in=first, id__lte=until)
    return [
        job for job in of_keys if job.pk not in taken and job.staged_id > first[job.ordering_key]
    ]


def _written(staged: list[StagedJob], *, using: str) -> list[int]:
    """Return ids of rows that this transaction wrote, at least the lowest and the highest."""
    ids = [job.pk for job in staged]
    if None in ids:  # MySQL, unlike MariaDB, does not return the ids
        rows = StagedJob.objects.using(using).filter(
            shard__in={job.shard for job in staged}, task_id__in=[job.task_id for job in staged]
        )
        ids = list(rows.aggregate(first=Min("id"), last=Max("id")).values())
    return ids
