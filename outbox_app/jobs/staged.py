"""Staged jobs, taken back and put off by the project, or decided on by a person.

``cancel`` and ``reschedule`` take one job, in the transaction of the caller. A person cancels jobs,
releases them before their time, or moves them to dead: in batches, each a transaction of its own.
What is done to a row is conditional on the row being there: of a drainer and a person who want it
at the same moment, one gets it. A drainer that is publishing a job finishes that, as no message can
be taken back. A job that is moved to dead then leaves a dead row although it was published: nothing
is lost, and requeueing it is an incident as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any

from celery import Celery, current_app
from django.db import connections, transaction
from django.db.models import QuerySet
from django.utils.timezone import is_naive

from ..aliases import outbox_alias
from ..exceptions import InvalidJob, NotAtomic
from ..models import DatabaseNow, DeadJob, StagedJob, TaskResult, counting
from ..models.clock import stored
from ..process.lock_wait import atomic_with_lock_wait
from ..process.wakeup import JOBS, wake_after_commit
from ..signals import job_dead
from ..text import get_logger, storable
from ..transactions import after_commit, is_atomic, lacks_autocommit
from .bulk import BulkResult, Moment, run_for
from .drain.batch import apps_with_rows
from .drain.incidents import LOCK_SECONDS
from .immediate import leave_out
from .message import Message
from .staging.insert import shard_of
from .staging.producer import held_until
from .staging.sending import celery_app
from .staging.validation import check_eta

logger = get_logger("outbox_app.staged")

#: The column in whose order rows are decided on.
ORDER = "id"
#: What stands for the class of the exception where a person has moved a job to dead.
MOVED = "moved by a person"
#: Jobs of one task id that are looked at, at most.
FEW = 1000


def cancel(
    task_id: str, *, ordering_key: str = "", using: str | None = None, app: Celery | None = None
) -> bool:
    """Take back a job: it is deleted if it is staged or dead, and Celery is asked to revoke it.

    Both happen at the commit, if a transaction is open. Workers are told in any case, as a drainer
    may be publishing the job at this moment: those that run then skip it, unless they have begun.

    Args:
        task_id: The id of the task, as its ``AsyncResult`` has it.
        ordering_key: That of the job, by which it is found.
        using: Database alias. Default: the outbox's.
        app: The Celery app whose workers are told. Default: the job's, or else the current app.

    Returns:
        Whether it was staged or dead. False: it has left, and Celery alone can stop it.

    Raises:
        NotAtomic: Autocommit is off, and no ``atomic()`` is open.
        OperationalError: kombu's, where it has left and the broker does not answer. Inside a
            transaction, and where it was deleted, that is logged.
    """
    using = using or outbox_alias()
    if lacks_autocommit(connections[using]):
        raise NotAtomic(
            f"cancel() was called with autocommit off and outside atomic() on {using!r}, where "
            f"nothing tells workers at the commit. Open transaction.atomic(using={using!r})."
        )
    in_transaction = is_atomic(using)
    found, dead = _of_task(task_id, ordering_key, using), DeadJob.objects.using(using)
    ready = TaskResult.objects.using(using).filter(status=TaskResult.Status.READY)
    # Looked for before: a DELETE of what is not there would lock its place on MySQL.
    died, results = (list(rows.filter(task_id=task_id)[:FEW]) for rows in (dead, ready))
    with transaction.atomic(using=using):
        taken = _taken(StagedJob.objects.using(using), found)
        leave_out((job.pk for job in taken), using=using)
        taken += _taken(dead, died)
        _taken(ready, results)  # without it no worker begins a task of django.tasks
    names = {job.app for job in taken}
    apps = [app] if app else [celery_app(name) or current_app for name in names] or [current_app]

    def revoke() -> None:  # no partial: where it fails, Django logs its __qualname__
        for each in apps:
            each.control.revoke(task_id)

    after_commit(revoke, using=using, robust=in_transaction or bool(taken))
    return bool(taken)


def reschedule(
    task_id: str, *, eta: datetime, ordering_key: str = "", using: str | None = None
) -> bool:
    """Change the time of a job that is held, at the commit if a transaction is open.

    Args:
        task_id: The id of the task, as its ``AsyncResult`` has it.
        eta: When it is to run, with a time zone. Earlier than HOLD_HORIZON from now: it leaves at
            once, and a worker holds it; but for quorum queues, for which it waits here.
        ordering_key: That of the job, by which it is found.
        using: Database alias. Default: the outbox's.

    Returns:
        Whether it was held. False: it runs at its old time, or has run. So does a job of task
        protocol 1 whose new time is earlier.

    Raises:
        InvalidJob: The time is further away than MAX_ETA, or has no time zone.
    """
    using = using or outbox_alias()
    if is_naive(eta):
        raise InvalidJob(f"eta {eta.isoformat()} has no time zone. Make it aware.")
    check_eta(eta)
    changed, jobs = 0, _of_task(task_id, ordering_key, using)
    with transaction.atomic(using=using):
        for job in jobs:
            rows = StagedJob.objects.using(using).filter(pk=job.pk, is_immediate=None)
            held = rows.filter(available_at__gt=DatabaseNow())
            due: datetime | None = stored(eta, using=using)
            if (envelope := _with_eta(job.envelope, eta.isoformat())) is None:
                changed += held.filter(available_at__lt=due).update(available_at=due)
                continue
            until = held_until(eta, celery_app(job.app) or current_app, using=using)
            # Not None: then it would count as waiting since it was staged.
            changed += held.update(available_at=until or DatabaseNow(), envelope=envelope)
        if changed:
            TaskResult.objects.using(using).keep_from(stored(eta, using=using), jobs)
        wake_after_commit(using, JOBS)
    return bool(changed)


def _of_task(task_id: str, ordering_key: str, using: str) -> list[StagedJob]:
    ids = ids_of_task(task_id, using=using, ordering_key=ordering_key)
    rows = StagedJob.objects.using(using).filter(pk__in=ids, task_id=task_id)
    return list(rows.order_by("id"))


def cancel_for(jobs: QuerySet[StagedJob], **options: Any) -> BulkResult:
    """Delete staged jobs: they never leave, but for one that a drainer is publishing.

    ``options``: ``until``, ``asked``, ``by`` and those of ``bulk.run_for``, as for dead jobs.
    """
    return _run(jobs, _cancel, "Staged jobs cancelled", **options)


def release_for(jobs: QuerySet[StagedJob], **options: Any) -> BulkResult:
    """Let held jobs leave now, and run when they arrive: their ``eta`` is taken away."""
    return _run(jobs.filter(available_at__isnull=False), _release, "Held jobs released", **options)


def move_to_dead_for(
    jobs: QuerySet[StagedJob], *, reason: str, by: str = "", **options: Any
) -> BulkResult:
    act = partial(_move_to_dead, reason=storable(f"{reason} ({by})" if by else reason))
    return _run(jobs, act, "Staged jobs moved to dead", by=by, **options)


def _run(
    jobs: QuerySet[StagedJob],
    act: Callable[..., int],
    what: str,
    *,
    until: int,
    asked: Moment,
    by: str = "",
    **options: Any,
) -> BulkResult:
    # By time too: the database may have lost rows, and given their ids to others.
    rows = StagedJob.objects.using(jobs.db).filter(staged_at__lte=asked)

    # ``act`` reads before its transaction: in there MariaDB may refuse to change what others have
    # deleted since it was read (1020).
    def act_on(ids: list[int]) -> int:
        return act(rows, rows.filter(pk__in=ids).order_by("id"))

    found = run_for(jobs, act_on, order=ORDER, until=until, **options)
    if found.done:
        logger.warning("%s database=%s jobs=%d by=%s", what, jobs.db, found.done, by)
    return found


def ids_of_task(task_id: str, *, using: str, ordering_key: str = "") -> list[int]:
    """Return the ids of the staged jobs with a task id, a few at most.

    Looked for among the first ``counting.MANY`` ready jobs and held jobs of its shard, which its
    key says, else its task id; and among the newest ``counting.MANY`` rows of all shards.
    """
    rows = StagedJob.objects.using(using)
    shard = shard_of(ordering_key, task_id)
    found: set[int] = set()
    for app in apps_with_rows(using=using):
        of_shard = rows.filter(app=app, shard=shard)
        found |= _named(of_shard.ready(), task_id, "id")
        found |= _named(of_shard.held(), task_id, "available_at")
    newest, _ = counting.newest(rows)
    found |= set(newest.filter(task_id=task_id).order_by().values_list("id", flat=True)[:FEW])
    return sorted(found)


def _named(part: QuerySet[StagedJob], task_id: str, column: str) -> set[int]:
    values = part.order_by(column).values_list(column, flat=True)
    beyond = list(values[counting.MANY : counting.MANY + 1])
    if beyond:
        part = part.filter(**{f"{column}__lt": beyond[0]})
    return set(part.filter(task_id=task_id).order_by().values_list("id", flat=True)[:FEW])


def _cancel(rows: QuerySet[StagedJob], jobs: QuerySet[StagedJob]) -> int:
    found = list(jobs.only("pk"))
    with atomic_with_lock_wait(LOCK_SECONDS, using=rows.db):
        return len(_taken(rows, found))


def _release(rows: QuerySet[StagedJob], jobs: QuerySet[StagedJob]) -> int:
    released, found = 0, list(jobs)
    with atomic_with_lock_wait(LOCK_SECONDS, using=rows.db):
        for job in found:
            # Not job.save(): a row that is gone by now stays gone.
            held = rows.filter(pk=job.pk, available_at__gt=DatabaseNow())
            if (envelope := _with_eta(job.envelope, None)) is not None:
                released += held.update(available_at=DatabaseNow(), envelope=envelope)
        wake_after_commit(rows.db, JOBS)
    return released


def _move_to_dead(rows: QuerySet[StagedJob], jobs: QuerySet[StagedJob], *, reason: str) -> int:
    found = list(jobs)
    with atomic_with_lock_wait(LOCK_SECONDS, using=rows.db):
        dead = [job.as_dead(error=MOVED, reason=reason) for job in _taken(rows, found)]
        DeadJob.objects.using(rows.db).bulk_create(dead)
    for each in dead:
        job_dead.send_robust(DeadJob, using=rows.db, dead=each)
    return len(dead)


def _taken(rows: QuerySet[Any], jobs: Iterable[Any]) -> list[Any]:
    """Delete rows; return those that were there.

    One by one: which of them a drainer has deleted first has to be known, and MySQL would lock
    others' rows where it scans for many.
    """
    return [job for job in jobs if rows.filter(pk=job.pk)._raw_delete(rows.db)]


def _with_eta(envelope: str, eta: str | None) -> str | None:
    """Return the envelope of a job that runs then; without a time, as soon as a worker has it.

    None for one of task protocol 1, whose time is in its body: it can only be held for longer.
    """
    try:
        message = Message.loads(envelope)
        if message.properties and "task" not in message.headers:
            return None
        message.headers["eta"] = eta
        return message.dumps()
    except (ValueError, TypeError, AttributeError):
        return envelope  # damaged: the drain says so
