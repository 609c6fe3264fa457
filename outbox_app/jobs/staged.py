"""Staged jobs: code cancels or reschedules one job, a person cancels many.

``cancel`` and ``reschedule`` change one job, in the transaction of the caller. A person cancels
jobs in batches, each a transaction of its own. Each change requires that the row still exists: if a
drainer and a person want a row at the same moment, one of them gets it. A drainer that is
publishing a job finishes, as no message can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from celery import Celery, current_app
from django.db import connections, transaction
from django.db.models import QuerySet
from django.utils.timezone import is_naive

from ..aliases import outbox_alias
from ..capability import all_doors
from ..database.clock import DatabaseNow, due_at
from ..database.encoding import unstorable
from ..database.lock_wait import atomic_with_lock_wait
from ..database.transactions import after_commit, is_atomic, lacks_autocommit
from ..exceptions import InvalidJob, NotAtomic
from ..models import DeadJob, StagedJob, counting
from ..process.wakeup import JOBS, wake_after_commit
from ..text import get_logger
from .bulk import BulkResult, Moment, run_for
from .drain.batch import apps_with_rows
from .drain.dead_rows import LOCK_SECONDS
from .immediate import leave_out
from .message import Message
from .runs import lock_idle
from .staging.insert import shard_of_job
from .staging.producer import held_until
from .staging.sending import celery_app
from .staging.validation import check_eta

logger = get_logger("outbox_app.staged")

#: Batches follow the order of this column.
ORDER = "id"
#: The most jobs of one task id that a query returns.
FEW = 1000


def cancel(
    task_id: str,
    *,
    ordering_key: str = "",
    using: str | None = None,
    app: Celery[Any] | None = None,
) -> bool:
    """Cancel a job: delete it if it is staged or dead, and ask Celery to revoke it.

    Both happen at the commit if a transaction is open. Celery is asked in any case, as a drainer
    may be publishing the job at this moment: running workers then skip it, unless it has begun. A
    job with a receipt is cancelled for certain until a worker begins it, without asking Celery. In
    a transaction at REPEATABLE READ or SERIALIZABLE on PostgreSQL, call it first: a job that a
    worker has begun since the first query counts as not begun.

    Args:
        task_id: The id of the task, as its ``AsyncResult`` has it.
        ordering_key: The job's ordering key, by which it is found.
        using: Database alias. Default: the outbox's.
        app: The Celery app whose workers revoke it. Default: the job's app, or the current app.

    Returns:
        Whether the job was staged or dead. False: it has left, or a worker executes it, and only
        Celery can stop it.

    Raises:
        InvalidJob: No job can have this id.
        NotAtomic: Autocommit is off, and no ``atomic()`` is open.
        OperationalError: kombu's, if the job has left and the broker does not answer. Inside a
            transaction, or if the job was deleted, the error is logged instead.
    """
    using = using or outbox_alias()
    if lacks_autocommit(connections[using]):
        raise NotAtomic(
            f"cancel() was called with autocommit off and outside atomic() on {using!r}, where "
            f"nothing tells workers at the commit. Open transaction.atomic(using={using!r})."
        )
    in_transaction = is_atomic(using)
    found, dead = _of_task(task_id, ordering_key, using), DeadJob.objects.using(using)
    # Read first: on MySQL a DELETE that finds no row would lock the gap.
    died = list(dead.filter(task_id=task_id)[:FEW])
    with transaction.atomic(using=using):
        taken: list[Any] = _taken(StagedJob.objects.using(using), found)
        is_stopped = bool(taken) and all(job.receipt is not None for job in taken)
        leave_out((job.pk for job in taken), using=using)
        taken += [job for job in died if dead.filter(pk=job.pk)._raw_delete(using)]
        for doors in all_doors():
            doors.cancel(task_id, using=using)
    names = {job.app for job in taken}
    apps = [app] if app else [celery_app(name) or current_app for name in names] or [current_app]

    pending = (each[1] for each in connections[using].run_on_commit)
    #: Apps whose broker has failed after this commit: each further attempt would take seconds.
    failed: set[Any] = next((f.failed for f in pending if hasattr(f, "failed")), set())

    def revoke() -> None:  # no partial: if it fails, Django logs its __qualname__
        for each in apps:
            if each in failed:
                logger.error("Task not revoked, its broker has just failed task_id=%s", task_id)
                continue
            failed.add(each)
            each.control.revoke(str(task_id))
            failed.discard(each)

    revoke.failed = failed  # type: ignore[attr-defined]
    if not is_stopped:
        after_commit(revoke, using=using, robust=in_transaction or bool(taken))
    return bool(taken)


def reschedule(
    task_id: str, *, eta: datetime, ordering_key: str = "", using: str | None = None
) -> bool:
    """Change the time of a job that is held, at the commit if a transaction is open.

    Args:
        task_id: The id of the task, as its ``AsyncResult`` has it.
        eta: When the job is to run, with a time zone. If that is less than HOLD_HORIZON away, the
            job leaves at once and a worker holds it; with quorum queues it stays held here.
        ordering_key: The job's ordering key, by which it is found.
        using: Database alias. Default: the outbox's.

    Returns:
        Whether the job was held. False: it runs at its old time, has run, or is dead.

    Raises:
        InvalidJob: The time is further away than 366 days, or has no time zone; or no job can have
            this id.
    """
    using = using or outbox_alias()
    if not isinstance(eta, datetime) or is_naive(eta):
        raise InvalidJob(f"eta must be a datetime with a time zone; got {eta!r}.")
    check_eta(eta)
    changed, jobs = 0, _of_task(task_id, ordering_key, using)
    with transaction.atomic(using=using):
        for job in jobs:
            rows = StagedJob.objects.using(using).filter(pk=job.pk, is_immediate=None, sent_at=None)
            held = rows.filter(available_at__gt=DatabaseNow())
            envelope = _with_eta(job.envelope, eta.isoformat())
            celery = celery_app(job.app) or current_app
            until = held_until(eta, celery, using=using, until_due=job.receipt is not None)
            # Not None: the job would count as waiting since it was staged.
            changed += held.update(available_at=until or DatabaseNow(), envelope=envelope)
        if changed:
            kept_from = due_at(max(eta, datetime.now(UTC)), using=using)
            for doors in all_doors():
                doors.postpone(jobs, kept_from, using=using)
        wake_after_commit(using, JOBS)
    return bool(changed)


def _of_task(task_id: str, ordering_key: str, using: str) -> list[StagedJob]:
    if not isinstance(task_id, str | UUID):  # the id of a result is what the task was given
        raise InvalidJob(f"task_id must be a string, as in result.id; got {task_id!r}.")
    if why := unstorable(str(task_id), using=using):
        raise InvalidJob(f"task_id {str(task_id)[:60]!r} {why}")
    ids = ids_of_task(str(task_id), using=using, ordering_key=ordering_key)
    rows = StagedJob.objects.using(using).filter(pk__in=ids, task_id=task_id)
    return list(rows.order_by("id"))


def cancel_for(
    jobs: QuerySet[StagedJob], *, until: int, asked: Moment, by: str = "", **options: Any
) -> BulkResult:
    """Delete staged jobs: none of them leaves, except one that a drainer is publishing.

    A job with a receipt that a worker executes stays.

    ``options`` are those of ``bulk.run_for``, as for dead jobs.
    """
    # Filter by time, too: the database may have lost rows and given their ids to other jobs.
    rows = StagedJob.objects.using(jobs.db).filter(staged_at__lte=asked)

    def act(ids: list[int]) -> int:
        # Read before the transaction: inside it MariaDB may refuse to change rows that others have
        # deleted since they were read (1020).
        found = list(rows.filter(pk__in=ids).order_by("id").only("pk", "receipt"))
        with atomic_with_lock_wait(LOCK_SECONDS, using=rows.db, read_committed=True):
            return len(_taken(rows, found))

    found = run_for(jobs, act, order=ORDER, until=until, **options)
    if found.done:
        logger.warning("Staged jobs cancelled database=%s jobs=%d by=%s", jobs.db, found.done, by)
    return found


def ids_of_task(task_id: str, *, using: str, ordering_key: str = "") -> list[int]:
    """Return the ids of the staged jobs with a task id, a few at most.

    The search covers the first ``counting.MANY`` ready and held jobs of the shard, which follows
    from the key, else from the task id; and the newest ``counting.MANY`` rows of all shards.
    """
    rows = StagedJob.objects.using(using)
    shard = shard_of_job(ordering_key, task_id)
    found: set[int] = set()
    for app in apps_with_rows(using=using):
        of_shard = rows.filter(app=app, shard=shard)
        found |= _named(of_shard.ready(), task_id, "id")
        found |= _named(of_shard.held(), task_id, "available_at")
        found |= _named(of_shard.sent(), task_id, "available_at")
    newest, _ = counting.newest(rows)
    found |= set(newest.filter(task_id=task_id).order_by().values_list("id", flat=True)[:FEW])
    return sorted(found)


def _named(part: QuerySet[StagedJob], task_id: str, column: str) -> set[int]:
    values = part.order_by(column).values_list(column, flat=True)
    beyond = list(values[counting.MANY : counting.MANY + 1])
    if beyond:
        part = part.filter(**{f"{column}__lt": beyond[0]})
    return set(part.filter(task_id=task_id).order_by().values_list("id", flat=True)[:FEW])


def _taken(rows: QuerySet[StagedJob], jobs: Iterable[StagedJob]) -> list[StagedJob]:
    """Delete rows; return those that still existed, and that no worker executes.

    Each row takes a DELETE of its own, which tells whether a drainer was first. One DELETE for many
    rows may scan the table on MySQL, and lock the rows of others.
    """
    jobs = list(jobs)
    awaited = {job.pk for job in jobs if job.receipt is not None}
    idle = lock_idle(awaited, using=rows.db) if awaited else set()
    free = [job for job in jobs if job.pk not in awaited or job.pk in idle]
    return [job for job in free if rows.filter(pk=job.pk)._raw_delete(rows.db)]


def _with_eta(envelope: str, eta: str) -> str:
    try:
        message = Message.loads(envelope)
        message.headers["eta"] = eta
        return message.dumps()
    except (ValueError, TypeError, AttributeError):
        return envelope  # a damaged envelope: the drain reports it
