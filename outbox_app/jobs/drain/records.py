"""What the drain writes besides deleting rows: dead jobs and incidents.

A row moves to the dead table in one transaction, and only if it was still there: of two drainers
that hold it, one moves it. Incidents are for people: the drain adds them, and never reads any.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction
from django.db.models import Max, Min

from ...conf import outbox_settings
from ...exceptions import KeyBlocked
from ...models import DeadJob, Incident, StagedJob
from ...signals import incident_recorded, job_dead
from ...text import storable
from .batch import Row


def bury(row: Row, error: BaseException, *, using: str) -> DeadJob | None:
    """Move a row to the dead table, with the exception's own words.

    Returns:
        The dead job, or None where the row was gone: somebody else has moved or published it.
    """
    with transaction.atomic(using=using):
        # By its task id as well: see ``batch.delete``.
        staged = StagedJob.objects.using(using).filter(pk=row.id, task_id=row.task_id)
        found = staged.first()
        # The one step that is conditional: of two drainers that hold the row, one deletes it.
        if found is None or not staged._raw_delete(using):
            return None
        kind = type(error)
        dead = DeadJob.objects.using(using).create(
            **found.copied(),
            staged_id=found.pk,
            staged_at=found.staged_at,
            error=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")[:255],
            reason=storable(str(error)) or repr(error),
        )
    job_dead.send_robust(DeadJob, using=using, dead=dead)
    return dead


def bury_blocked(rows: Sequence[Row], *, using: str) -> list[Row]:
    """Where a dead job blocks its ordering key, let the key's later jobs die after it.

    They stay in order, in sight, and cost the drain nothing; a person requeues the key as a whole.

    Returns:
        The rows that may leave.
    """
    keys = {row.ordering_key for row in rows if row.ordering_key}
    if outbox_settings().DEAD_KEY != "block" or not keys:
        return list(rows)
    dead = DeadJob.objects.using(using).filter(ordering_key__in=keys)
    blocked = dict(dead.order_by("-staged_id").values_list("ordering_key", "staged_id"))
    free = []
    for row in rows:
        if row.ordering_key in blocked:
            error = KeyBlocked(
                f"Ordering key {row.ordering_key!r} is blocked by the dead job with staged id "
                f"{blocked[row.ordering_key]}. Requeue or discard that one, then requeue this one."
            )
            bury(row, error, using=using)
        else:
            free.append(row)
    return free


def record_takeover(owner: str, shards: Sequence[int], *, using: str, by: str) -> None:
    """Write down that shards were taken from a drainer whose lease had run out.

    It may have published any row of theirs that is there now, and may yet do so with those in its
    hand. If it lives and publishes one that commits later, it records that itself: see ``debts``.
    """
    ids = StagedJob.objects.using(using).aggregate(first=Min("id"), last=Max("id"))
    if ids["first"] is None:
        return
    record_incident(
        Incident.Kind.TAKEOVER,
        using=using,
        shards=shards,
        first_id=ids["first"],
        last_id=ids["last"],
        drainer=owner,
        detail=f"Taken over by {by} after the lease of drainer {owner} had run out.",
    )


def record_requeue(
    *,
    using: str,
    shards: Sequence[int],
    first_id: int,
    last_id: int,
    by: str,
    same_as: int | None = None,
) -> int:
    """Write down that a person has requeued jobs, in the transaction that does it.

    Args:
        using: Database alias.
        shards, first_id, last_id: Of the new rows.
        by: Who decided.
        same_as: The incident of the batch before, where both are one call: it is widened.

    Returns:
        The id of the incident.
    """
    detail = "Dead jobs requeued" + (f" by {by}." if by else ".")
    same = Incident.objects.using(using).filter(kind="requeue", detail=storable(detail))
    before = same.filter(pk=same_as).first() if same_as else None
    if before:
        before.first_id = min(first_id, before.first_id)
        before.last_id = max(last_id, before.last_id)
        before.shards = sorted({*shards, *before.shards})
        before.save(using=using, update_fields=["first_id", "last_id", "shards"])
        return before.pk
    incident = record_incident(
        Incident.Kind.REQUEUE,
        using=using,
        shards=shards,
        first_id=first_id,
        last_id=last_id,
        detail=detail,
    )
    return incident.pk


def record_incident(
    kind: str,
    *,
    using: str,
    shards: Sequence[int],
    first_id: int,
    last_id: int,
    drainer: str = "",
    detail: str = "",
) -> Incident:
    """Write down a cause of extra publishes, with the shards and the ids it may concern."""
    incident = Incident.objects.using(using).create(
        kind=kind,
        drainer=drainer[:300],
        shards=sorted(shards),
        first_id=first_id,
        last_id=last_id,
        detail=storable(detail),
    )
    incident_recorded.send_robust(Incident, using=using, incident=incident)
    return incident
