"""Dead jobs: a person requeues or discards them.

Both actions go through their rows in batches, each a transaction of its own, in the order in which
the jobs were staged. A row is requeued once however many people ask at the same moment, and a
stopped run can be started again for the rest. An action takes only rows that were dead when the
call began, by id and by time: a job that dies again at once is not requeued for ever, and a job
that has got the id of a lost row (after a fail-over, TRUNCATE … RESTART IDENTITY) is left alone. A
requeued job is a new row with the same message and task id; the drain treats it as any other row.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from celery import current_app
from django.db.models import QuerySet

from ..aliases import outbox_alias
from ..capability import all_doors
from ..conf import outbox_settings
from ..database.clock import DatabaseNow
from ..database.lock_wait import atomic_with_lock_wait
from ..models import DeadJob, StagedJob
from ..models.counting import counted
from ..text import get_logger
from . import bulk
from .bulk import BulkResult, Moment, run_for
from .drain.dead_rows import LOCK_SECONDS
from .drain.incidents import record_requeue
from .message import Message, moment
from .staging import insert
from .staging.producer import held_until
from .staging.sending import celery_app

logger = get_logger("outbox_app.dead")

#: Batches follow the order of this column.
ORDER = "staged_id"


def requeue_dead(
    jobs: QuerySet[DeadJob], *, by: str = "", reason: str = "", **options: Any
) -> BulkResult:
    """Stage dead jobs again, and record an incident: they may have been published before.

    If dead jobs block their ordering key (``OUTBOX["DEAD_KEY"]``), the later dead jobs of the key
    are requeued in the same transaction: if they stayed dead, they would block the key.

    Args:
        jobs: The dead jobs, such as ``DeadJob.objects.filter(task="shop.send")``. Without
            ``using()`` they are on the outbox's alias.
        by: Who decided, for the incident.
        reason: Why, for the incident.
        options: For a part of a decision: ``until``, the highest id that belongs to it; ``asked``,
            the time by which the jobs had died; and those of ``bulk.run_for``, with the time limit.

    Returns:
        ``done``, the number of jobs that were requeued, without those that were gone by then; with
        ``until`` also the place where the next call resumes, and the error that stopped this one.

    Raises:
        InvalidJob: A message does not fit the database's packet any more. The earlier batches are
            requeued.
    """
    act = partial(_requeue_batch, incidents=[])
    return _decide(act, jobs, by=by, reason=reason, **options)


def discard_dead(
    jobs: QuerySet[DeadJob], *, by: str = "", reason: str = "", **options: Any
) -> BulkResult:
    """Delete dead jobs, which are then never sent.

    Takes the arguments of ``requeue_dead``; ``by`` and ``reason`` go to the log.
    """
    return _decide(_discard_batch, jobs, by=by, reason=reason, **options)


def _decide(
    act: Callable[..., int],
    jobs: QuerySet[DeadJob],
    *,
    by: str,
    reason: str,
    until: int | None = None,
    asked: Moment | None = None,
    **options: Any,
) -> BulkResult:
    if not jobs._db:  # type: ignore[attr-defined]  # the routers may name a replica
        jobs = jobs.using(outbox_alias())
    is_part = until is not None
    if until is None:
        newest = DeadJob.objects.using(jobs.db).order_by("-id").annotate(now=DatabaseNow())
        until, asked = newest.values_list("id", "now").first() or (0, DatabaseNow())
        options["whole"] = counted(jobs, limit=bulk.STEP) <= bulk.STEP
    rows = DeadJob.objects.using(jobs.db).filter(id__lte=until, died_at__lte=asked)
    # If two people act at the same moment, the second one waits here, and then finds the rows gone.
    # The order by id makes deadlocks between two batches rare. SQLite locks at BEGIN.
    locked = rows.order_by("id").select_for_update()
    act = partial(act, locked, by=f"{by} (reason: {reason})" if reason else by)
    found = run_for(jobs, act, order=ORDER, until=until, **options)
    if found.error and not is_part:
        raise found.error
    return found


def _requeue_batch(
    locked: QuerySet[DeadJob], ids: list[int], *, by: str, incidents: list[int]
) -> int:
    using = locked.db
    with atomic_with_lock_wait(LOCK_SECONDS, using=using):
        jobs = list(locked.filter(pk__in=ids))
        if outbox_settings().DEAD_KEY == "block":
            jobs += _followers(jobs, locked)
        if not jobs:
            return 0
        jobs.sort(key=lambda job: (job.staged_id, job.pk))
        DeadJob.objects.using(using).filter(pk__in=[job.pk for job in jobs]).delete()
        staged = [StagedJob(**job.copied()) for job in jobs]
        for job in staged:  # the same shard, unless the row was edited by hand
            job.shard = insert.shard_of_job(job.ordering_key, job.task_id)
            job.available_at = _held_until(job, using=using)
        insert.write(staged, using=using, with_ids=True)  # wakes the drainers after the commit
        ready = [job for job in staged if job.available_at is None]
        for doors in all_doors():
            doors.postpone(ready, DatabaseNow(), using=using)
        incident = record_requeue(
            shards={job.shard for job in staged},
            ids=[job.pk for job in staged],
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
    return held_until(eta, app, using=using, until_due=job.receipt is not None)


def _discard_batch(locked: QuerySet[DeadJob], ids: list[int], *, by: str) -> int:
    using = locked.db
    with atomic_with_lock_wait(LOCK_SECONDS, using=using):
        found = list(locked.filter(pk__in=ids).values_list("pk", flat=True))
        done = DeadJob.objects.using(using).filter(pk__in=found).delete()[0]
    if done:
        logger.warning("Dead jobs discarded database=%s jobs=%d by=%s", using, done, by)
    return done


def _followers(jobs: list[DeadJob], locked: QuerySet[DeadJob]) -> list[DeadJob]:
    """Return the dead jobs of the same ordering keys that were staged after ``jobs``."""
    first: dict[str, int] = {}
    for job in jobs:
        if job.ordering_key:
            key = job.ordering_key
            first[key] = min(job.staged_id, first.get(key, job.staged_id))
    taken = {job.pk for job in jobs}
    of_keys = locked.filter(ordering_key__in=first)
    return [
        job for job in of_keys if job.pk not in taken and job.staged_id > first[job.ordering_key]
    ]
