"""What waits in the job table: counted up to a limit, and the age of the oldest ready row.

Every query names every app and shard, so that the index ``(app, shard, available_at, id)`` serves:
it holds ready rows and held ones apart, and a million of the one kind cost a count of the other
nothing. Counting stops at a limit, so no answer takes longer because more rows wait. The number of
statements depends on the number of Celery apps only.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.models import OuterRef, QuerySet, Subquery

from ...conf import SHARDS
from ...models import DatabaseNow, Lease, StagedJob

#: Counting stops here.
MANY = 100_000


def counted(rows: QuerySet[Any], *, limit: int = MANY) -> int:
    """Return how many rows there are, or limit + 1 where there are more than ``limit``."""
    return rows.order_by()[: limit + 1].count()


def ready_rows(apps: list[str], *, using: str) -> QuerySet[StagedJob]:
    """Return the jobs of these Celery apps that may leave now, for counting."""
    return by_shard(StagedJob.objects.using(using).filter(available_at=None), apps)


def held_rows(apps: list[str], *, using: str) -> QuerySet[StagedJob]:
    """Return the jobs of these Celery apps that wait for their time, due or not, for counting."""
    return by_shard(StagedJob.objects.using(using).held(), apps)


def by_shard(jobs: QuerySet[StagedJob], apps: list[str]) -> QuerySet[StagedJob]:
    """Return the jobs of these Celery apps, in the words in which the index serves."""
    return jobs.filter(app__in=apps, shard__in=range(SHARDS))


def oldest_seconds(apps: list[str], *, using: str) -> float:
    """Return the age of the oldest ready row of these Celery apps in seconds; 0: there is none."""
    ready = StagedJob.objects.using(using).filter(available_at=None)
    oldest = (
        ready.filter(id__in=_first_of_each_shard(ready, apps))
        .order_by("id")
        .annotate(now=DatabaseNow())
        .values_list("staged_at", "now")
        .first()
    )
    if oldest is None or oldest[0] is None:  # None: a hand has written what is no time
        return 0.0
    return max(0.0, (oldest[1] - oldest[0]).total_seconds())


def _first_of_each_shard(ready: QuerySet[StagedJob], apps: list[str]) -> list[int]:
    """Return the lowest id of each shard: one seek each, past which held rows are not looked at."""
    # In both cases the order of the index, in the words in which the planner knows it again.
    order = ["id"] if connections[ready.db].vendor == "mysql" else ["available_at", "id"]
    shards = Lease.objects.using(ready.db).filter(resource="jobs")
    first: list[int | None] = []
    for app in apps:
        rows = ready.filter(app=app, shard=OuterRef("part")).order_by(*order)
        seek = shards.annotate(first=Subquery(rows.values("id")[:1]))
        first += seek.values_list("first", flat=True)
    if not first:  # no drainer has ever run, so that nobody has listed the shards
        first += ready.order_by("id").values_list("id", flat=True)[:1]
    return [id for id in first if id is not None]
