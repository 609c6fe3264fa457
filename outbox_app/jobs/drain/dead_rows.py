"""Rows that go to the dead table: those that can never be sent, and those behind such a row.

A row moves in one transaction, and only if it still exists: if two drainers hold it, one of them
moves it.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections
from django.db.models import Min

from ...conf import outbox_settings
from ...database.encoding import replaced
from ...database.lock_wait import atomic_with_lock_wait
from ...exceptions import KeyBlocked
from ...models import DeadJob, StagedJob
from ...signals import job_dead
from ...text import storable
from ..runs import lock_idle
from .batch import Row

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
    if row.publishes:  # a retry counts from 1 again
        staged = staged.filter(publishes=row.publishes)
    found = staged.first()  # before the transaction: see ``staged.cancel_for``
    skips = not waits and connections[using].features.has_select_for_update_skip_locked
    with atomic_with_lock_wait(LOCK_SECONDS, using=using, read_committed=True):
        if skips and not staged.select_for_update(skip_locked=True).values_list("pk"):
            return None
        # A worker may begin it at this moment, as its message may still come.
        if found and found.publishes and not lock_idle([row.id], using=using):
            return None
        # The one conditional step: if two drainers hold the row, one of them deletes it.
        if found is None or not staged._raw_delete(using):
            return None
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")[:255]
        dead = found.as_dead(
            error=name, reason=replaced(storable(str(error) or repr(error)), using=using)
        )
        dead.save(using=using, force_insert=True)
    job_dead.send_robust(DeadJob, using=using, dead=dead)
    return dead


def blocked_by_dead(rows: Sequence[Row], *, using: str) -> list[tuple[Row, Exception]]:
    """Return the rows whose ordering key is blocked by an earlier dead job: they are moved to dead.

    There they stay in order, in sight, and cost the drain nothing; a person requeues the whole key.
    """
    # A job that was sent before has left in its place: it may be sent again.
    rows = [row for row in rows if not row.publishes]
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
