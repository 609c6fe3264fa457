"""The runs of jobs with receipts, as those who act on a row see them: what a worker executes stays.

A worker that begins a job locks its row for the moment in which it inserts the run (see
``receipts.ledger``). So a process that locks the row first, and then looks for a run, knows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db import connections

from ..database.clock import DatabaseNow
from ..models import Run, StagedJob


def running(ids: Collection[int], *, using: str) -> set[int]:
    """Return the ids of jobs that a worker executes now: the lease of their run is not over."""
    runs = Run.objects.using(using).filter(staged_id__in=ids, lease_until__gt=DatabaseNow())
    return set(runs.values_list("staged_id", flat=True))


def lock_idle(ids: Collection[int], *, using: str) -> set[int]:
    """Lock rows, in a transaction, until its end; return the ids of those that nothing executes.

    Their runs, of workers that were lost, are deleted. At REPEATABLE READ PostgreSQL hides a run
    that was begun since the first query of the transaction.
    """
    rows: Any = StagedJob.objects.using(using).filter(pk__in=ids).order_by("pk")
    locked = set(rows.select_for_update().values_list("pk", flat=True))
    runs = Run.objects.using(using).filter(staged_id__in=locked)
    if connections[using].vendor == "mysql":
        # A locking read: at REPEATABLE READ, others show what was committed before. Elsewhere it
        # would only let renewals of leases wait.
        runs = runs.select_for_update()
    alive = set(runs.filter(lease_until__gt=DatabaseNow()).values_list("staged_id", flat=True))
    idle = locked - alive
    Run.objects.using(using).filter(staged_id__in=idle).delete()
    return idle
