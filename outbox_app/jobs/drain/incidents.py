"""Incidents: causes of extra publishes, each with the shards and the ids that it may concern.

They are for people: the drain adds them, and never reads any.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from django.db import transaction
from django.db.models import Max, Min, Q

from ...database.clock import DatabaseNow
from ...database.encoding import replaced
from ...models import Incident, StagedJob
from ...signals import incident_recorded
from ...text import storable
from .batch import Row, release


def record_takeover(owner: str, shards: set[int], *, using: str, by: str) -> None:
    """Record that shards were taken from a drainer whose lease had run out.

    That drainer may have published any row that is in these shards now, and may still be sending
    some. If it lives and publishes a row that commits later, it records this: ``record_loss``.
    Rows with a receipt that were sent, and are not due, do not count: it cannot have sent them.
    """
    rows = StagedJob.objects.using(using)
    if None in (ids := list(rows.aggregate(first=Min("id"), last=Max("id")).values())):
        return
    if rows.sent().exists():
        due = rows.filter(Q(sent_at=None) | Q(available_at__lte=DatabaseNow()))
        ids = list(due.aggregate(first=Min("id"), last=Max("id")).values())
    if None not in ids:
        detail = f"Taken over by {by}: the lease of {owner} had run out."
        kind = Incident.Kind.TAKEOVER
        record_incident(kind, shards=shards, ids=ids, drainer=owner, detail=detail, using=using)


def record_run_out(rows: Sequence[Row], *, using: str, by: str) -> None:
    """Record that holds of immediate delivery ran out, before the drain publishes the rows."""
    detail = f"Taken over by {by}: the process that committed did not say whether it sent them."
    with transaction.atomic(using=using):
        shards, ids = {row.shard for row in rows}, [row.id for row in rows]
        record_incident(Incident.Kind.UNKNOWN, shards=shards, ids=ids, detail=detail, using=using)
        # No longer immediate: one incident is enough, however often the drain tries the rows.
        release([(row.id, row.task_id) for row in rows], using=using)


def record_requeue(
    *, shards: set[int], ids: Collection[int], by: str, same_as: int | None = None, using: str
) -> int:
    """Record that a person has requeued jobs, in the transaction that requeues them.

    ``same_as``: the incident of the previous batch of the same call, which is then widened. Returns
    the id of the incident.
    """
    detail = "Dead jobs requeued" + (f" by {by}." if by else ".")
    same = Incident.objects.using(using).filter(kind="requeue", detail=_kept(detail, using))
    before = same.filter(pk=same_as).first() if same_as else None
    if not before:
        kind = Incident.Kind.REQUEUE
        return record_incident(kind, shards=shards, ids=ids, detail=detail, using=using).pk
    before.first_id = min(*ids, before.first_id)
    before.last_id = max(*ids, before.last_id)
    before.shards = sorted({*shards, *before.shards})
    before.save(using=using, update_fields=["first_id", "last_id", "shards"])
    return before.pk


def record_incident(
    kind: str, *, shards: set[int], ids: Collection[int], detail: str, drainer: str = "", using: str
) -> Incident:
    """Record a cause of extra publishes, with the shards and the ids that it may concern."""
    incident = Incident.objects.using(using).create(
        kind=kind,
        drainer=drainer[:300],
        shards=sorted(shards),
        first_id=min(ids),
        last_id=max(ids),
        detail=_kept(detail, using),
    )
    tell = partial(incident_recorded.send_robust, Incident, using=using, incident=incident)
    transaction.on_commit(tell, using=using)  # a receiver that fails undoes nothing
    return incident


def _kept(text: str, using: str) -> str:
    return replaced(storable(text), using=using)
