"""What the drain writes besides deletions: dead jobs and incidents; and what it still has to write.

A row moves to the dead table in one transaction, and only if it still exists: if two drainers hold
it, one of them moves it. Incidents are for people: the drain adds them, and never reads any.
``Unsettled`` keeps deletions and incidents until they are written, through any failure. Meanwhile
the drainer reads nothing, gives up no shard and hands nothing back: a row that was published must
not be read again, and an extra publish must not happen before its incident is written. If a drainer
is killed, the incident of its shards' takeover covers what it had kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.models import Max, Min

from ...conf import outbox_settings
from ...database.encoding import replaced
from ...database.lock_wait import atomic_with_lock_wait
from ...exceptions import KeyBlocked
from ...models import DeadJob, Incident, StagedJob
from ...signals import incident_recorded, job_dead
from ...text import storable
from .batch import Row, delete, release

#: Seconds for which a decision waits for a row that another transaction has locked, at most.
LOCK_SECONDS = 2.0


def move_to_dead(
    row: Row, error: BaseException, *, using: str, waits: bool = True
) -> DeadJob | None:
    """Move a row to the dead table, unless another process has moved or published it.

    Without ``waits`` a row that another transaction has locked is left, if the database can do so.
    """
    # By its task id as well: see ``batch.delete``.
    staged = StagedJob.objects.using(using).filter(pk=row.id, task_id=row.task_id)
    found = staged.first()  # before the transaction: see ``staged._run``
    skips = not waits and connections[using].features.has_select_for_update_skip_locked
    with atomic_with_lock_wait(LOCK_SECONDS, using=using):
        if skips and not staged.select_for_update(skip_locked=True).values_list("pk"):
            return None
        # The one conditional step: if two drainers hold the row, one of them deletes it.
        if found is None or not staged._raw_delete(using):
            return None
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")[:255]
        dead = found.as_dead(error=name, reason=_kept(str(error) or repr(error), using))
        dead.save(using=using, force_insert=True)
    job_dead.send_robust(DeadJob, using=using, dead=dead)
    return dead


def blocked_by_dead(rows: Sequence[Row], *, using: str) -> list[tuple[Row, Exception]]:
    """Return the rows whose ordering key is blocked by an earlier dead job: they are moved to dead.

    There they stay in order, in sight, and cost the drain nothing; a person requeues the whole key.
    """
    keys = {row.ordering_key for row in rows if row.ordering_key}
    if outbox_settings().DEAD_KEY != "block" or not keys:
        return []
    dead = DeadJob.objects.using(using).filter(ordering_key__in=keys)
    first = dict(dead.values_list("ordering_key").annotate(Min("staged_id")))
    return [
        (
            row,
            KeyBlocked(
                f"Ordering key {row.ordering_key!r} is blocked by the dead job with staged id "
                f"{first[row.ordering_key]}. Requeue or discard that one, then requeue this one."
            ),
        )
        for row in rows
        if first.get(row.ordering_key, row.id) < row.id
    ]


def record_takeover(owner: str, shards: set[int], *, using: str, by: str) -> None:
    """Record that shards were taken from a drainer whose lease had run out.

    That drainer may have published any row that is in these shards now, and may still be sending
    some. If it lives and publishes a row that commits later, it records this: ``record_loss``.
    """
    ids = StagedJob.objects.using(using).aggregate(first=Min("id"), last=Max("id")).values()
    if None not in ids:
        detail = f"Taken over by {by} after the lease of drainer {owner} had run out."
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


class Unsettled:
    """Deletions and incidents that one drainer has still to write."""

    def __init__(self, *, using: str) -> None:
        self.using = using
        self._published: list[tuple[int, str]] = []
        self._incidents: list[dict[str, Any]] = []
        #: Published rows that cannot be deleted, as another transaction has locked them: their ids,
        #: with their shards.
        self.locked: dict[int, int] = {}
        #: Rows sent since the last heartbeat: their shards, the first and the last id.
        self._shards: set[int] = set()
        self._span: list[int] = []

    def sent(self, rows: Sequence[Row]) -> None:
        """Delete, with the next flush, rows that the broker has taken.

        Note them until the next heartbeat: another drainer may own their shards by now.
        """
        self._published += [(row.id, row.task_id) for row in rows]
        if rows:
            self._shards.update(row.shard for row in rows)
            ids = [*self._span, *(row.id for row in rows)]
            self._span = [min(ids), max(ids)]

    def record_unknown(self, rows: Sequence[Row], *, drainer: str, detail: str) -> None:
        """Record an incident with the next flush: the broker may have taken these rows."""
        shards, ids = {row.shard for row in rows}, [row.id for row in rows]
        self._record(Incident.Kind.UNKNOWN, shards, ids, drainer=drainer, detail=detail)

    def note_heartbeat(self) -> None:
        """Forget the rows sent so far: the shards had not been taken over when they were sent."""
        self._shards, self._span = set(), []

    def record_loss(self, *, drainer: str) -> None:
        """Record that the shards were lost: their next owner may have sent the same rows."""
        if not self._span:
            return
        detail = "Sent after its last heartbeat by a drainer that had lost its shards and lived."
        kind = Incident.Kind.TAKEOVER
        self._record(kind, self._shards, self._span, drainer=drainer, detail=detail)
        self.note_heartbeat()

    def _record(self, kind: str, shards: set[int], ids: list[int], **words: str) -> None:
        self._incidents.append({"kind": kind, "shards": shards, "ids": ids, **words})

    def flush(self) -> None:
        """Write the incidents, then delete. After a ``django.db.Error`` the rest is kept.

        Rows that another transaction has locked are kept, too: this drainer does not read them
        again, and an incident records that the next owner of their shards may do so.
        """
        while self._incidents:
            record_incident(**self._incidents[0], using=self.using)
            del self._incidents[0]
        left: list[tuple[int, str, int]] = []
        if delete(self._published, using=self.using) < len(self._published):
            published = dict(self._published)
            rows = StagedJob.objects.using(self.using).filter(pk__in=published)
            there = rows.values_list("id", "task_id", "shard")
            left = [row for row in there if row[:2] in published.items()]
        known, self.locked = self.locked, {id: shard for id, _, shard in left}
        self._published = [row[:2] for row in left]
        if new := {id: shard for id, shard in self.locked.items() if id not in known}:
            detail = "Published while another transaction had locked them, to cancel them, say."
            self._record(Incident.Kind.UNKNOWN, {*new.values()}, [*new], detail=detail)
            self.flush()


def _kept(text: str, using: str) -> str:
    return replaced(storable(text), using=using)
