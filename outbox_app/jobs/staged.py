"""Staged jobs, decided on by a person: cancelled, released before their time, moved to dead.

In batches, each a transaction of its own. What is done to a row is conditional on the row being
there: of a drainer and a person who want it at the same moment, one gets it. A drainer that is
publishing a job finishes that, as no message can be taken back. A job that is moved to dead then
leaves a dead row although it was published: nothing is lost, and requeueing it is an incident as
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from ..conf import SHARDS
from ..models import DeadJob, StagedJob, counting
from ..process.wakeup import JOBS, wake_after_commit
from ..signals import job_dead
from ..text import get_logger, storable
from .bulk import BulkResult, Moment, run_for
from .drain.batch import apps_with_rows
from .message import Message
from .staging.insert import shard_of

logger = get_logger("outbox_app.staged")

#: The column in whose order rows are decided on.
ORDER = "id"
#: What stands for the class of the exception where a person has moved a job to dead.
MOVED = "moved by a person"
#: Rows that are found by an index are listed one by one up to this number.
FEW = 1000


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
    act = partial(act, asked=asked, using=jobs.db)
    found = run_for(jobs, act, order=ORDER, until=until, **options)
    if found.done:
        logger.warning("%s database=%s jobs=%d by=%s", what, jobs.db, found.done, by)
    return found


def held_few(jobs: QuerySet[StagedJob]) -> list[int] | None:
    """Return the ids of held jobs, by the index, where they are few; None where they are not."""
    through = jobs.filter(app__in=apps_with_rows(using=jobs.db), shard__in=range(SHARDS))
    ids = list(through.order_by().values_list("id", flat=True)[: FEW + 1])
    return ids if len(ids) <= FEW else None


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
        for part, column in (
            (of_shard.filter(available_at=None), "id"),
            (of_shard.filter(available_at__isnull=False), "available_at"),
        ):
            found |= _named(part, task_id, column)
    newest, _ = counting.newest(rows)
    found |= set(newest.filter(task_id=task_id).order_by().values_list("id", flat=True)[:FEW])
    return sorted(found)


def _named(part: QuerySet[StagedJob], task_id: str, column: str) -> set[int]:
    values = part.order_by(column).values_list(column, flat=True)
    beyond = list(values[counting.MANY : counting.MANY + 1])
    if beyond:
        part = part.filter(**{f"{column}__lt": beyond[0]})
    return set(part.filter(task_id=task_id).order_by().values_list("id", flat=True)[:FEW])


def _cancel(ids: list[int], *, asked: Moment, using: str) -> int:
    with transaction.atomic(using=using):
        return len(_taken(ids, asked=asked, using=using))


def _release(ids: list[int], *, asked: Moment, using: str) -> int:
    released = 0
    with transaction.atomic(using=using):
        for job in _rows(ids, asked=asked, using=using):
            # Not job.save(): a row that is gone by now stays gone.
            held = StagedJob.objects.using(using).filter(pk=job.pk, available_at__isnull=False)
            released += held.update(available_at=None, envelope=_without_eta(job.envelope))
        wake_after_commit(using, JOBS)
    return released


def _move_to_dead(ids: list[int], *, asked: Moment, using: str, reason: str) -> int:
    with transaction.atomic(using=using):
        found = _rows(ids, asked=asked, using=using)
        taken = _taken([job.pk for job in found], asked=asked, using=using)
        why = {"error": MOVED, "reason": reason}
        moved = [job for job in found if job.pk in taken]
        dead = [
            DeadJob(**job.copied(), staged_id=job.pk, staged_at=job.staged_at, **why)
            for job in moved
        ]
        DeadJob.objects.using(using).bulk_create(dead)
    for job in dead:
        job_dead.send_robust(DeadJob, using=using, dead=job)
    return len(dead)


def _rows(ids: list[int], *, asked: Moment, using: str) -> list[StagedJob]:
    rows = StagedJob.objects.using(using).filter(staged_at__lte=asked)
    return list(rows.filter(pk__in=ids).order_by("id"))


def _taken(ids: Iterable[int], *, asked: Moment, using: str) -> set[int]:
    """Delete rows; return the ids of those that were there.

    One by one: which of them a drainer has deleted first has to be known, and MySQL would lock
    others' rows where it scans for many.
    """
    rows = StagedJob.objects.using(using).filter(staged_at__lte=asked)
    return {id for id in sorted(ids) if rows.filter(pk=id)._raw_delete(using)}


def _without_eta(envelope: str) -> str:
    """Return the envelope of a job that a worker runs as soon as it has it."""
    try:
        message = Message.loads(envelope)
        if not message.headers.get("eta"):
            return envelope
        message.headers["eta"] = None
        return message.dumps()
    except (ValueError, TypeError, AttributeError):
        return envelope  # damaged: the drain says so
