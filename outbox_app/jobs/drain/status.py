"""The state of the outbox, as the commands and the admin show it.

The number of statements of a function depends only on the number of Celery apps, not on the rows.
Rows are counted up to ``MANY`` and no further, through indexes, and lists are cut: nothing here
counts or sorts a large table. Queries for waiting rows go app by app and shard by shard, so that
they can use the index ``(app, shard, available_at, id)``, in which ready rows and held rows are
apart. The figures are read one after the other, not at one moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce

from ...conf import SHARDS
from ...database.clock import DatabaseNow
from ...models import Incident, Lease, Process, StagedJob, counting
from .batch import apps_with_rows


@dataclass(frozen=True, slots=True)
class Backlog:
    """The ready jobs: how many, and the age of the oldest."""

    #: The number of ready rows, counted up to counting.MANY.
    rows: int
    #: For how many seconds the oldest row has been ready or due: since it was staged, or since its
    #: hold ended. 0 if there is none.
    oldest_seconds: float

    @property
    def shown(self) -> str:
        return counting.shown_count(self.rows)


@dataclass(frozen=True, slots=True)
class Held:
    """Jobs that wait for their time, each figure counted up to counting.MANY.

    Sent ones do not count, except those that the drain looks at with its next batches.
    """

    #: Jobs whose time has come: they leave with the next batches.
    due: int
    within_the_hour: int
    later: int

    @property
    def rows(self) -> int:
        return self.due + self.within_the_hour + self.later


@dataclass(frozen=True, slots=True)
class DrainerStatus:
    """One drainer, by the database's clock."""

    drainer: Process
    #: The numbers of the shards that it owns, in order.
    owned: list[int]
    silent_seconds: float

    @property
    def shards(self) -> int:
        return len(self.owned)

    @property
    def is_silent(self) -> bool:
        """Whether its lease has run out, so that others may take its shards."""
        return self.silent_seconds > self.drainer.lease_seconds


def backlog(*, using: str) -> Backlog:
    """Return the backlog of the alias ``using``. Held rows count as late only once they are due."""
    apps = apps_with_rows(using=using)
    age = oldest_seconds(apps, using=using)
    ready = by_shard(StagedJob.objects.using(using).ready(), apps)
    return Backlog(rows=counting.counted(ready), oldest_seconds=age)


def held(*, using: str) -> Held:
    """Return how many jobs are held on the alias ``using``, by when they are due."""
    rows = by_shard(StagedJob.objects.using(using), apps_with_rows(using=using))
    soon = DatabaseNow() + timedelta(hours=1)
    return Held(
        due=counting.counted(rows.filter(available_at__lte=DatabaseNow())),
        within_the_hour=_not_sent(
            rows.filter(available_at__gt=DatabaseNow(), available_at__lte=soon)
        ),
        later=_not_sent(rows.filter(available_at__gt=soon)),
    )


def _not_sent(rows: QuerySet[StagedJob]) -> int:
    """Count the rows that were not sent among the first MANY, which an index finds."""
    # Not ``filter(sent_at=None)``, which would read all sent rows to find a few others.
    first = rows.order_by()[: counting.MANY + 1]
    count: dict[str, int] = first.aggregate(all=Count("id"), sent=Count("sent_at"))
    return count["all"] - count["sent"]


def drainers(*, using: str) -> list[DrainerStatus]:
    """Return the drainers of the alias ``using``, by host and process id."""
    owned: dict[Any, list[int]] = {}
    leases = Lease.objects.using(using).filter(resource="jobs", owner__isnull=False)
    for owner, part in leases.order_by("part").values_list("owner", "part"):
        owned.setdefault(owner, []).append(part)
    rows = Process.objects.using(using).filter(resource="jobs").order_by("host", "pid", "id")
    return [
        DrainerStatus(
            drainer=row,
            owned=owned.get(row.id, []),
            silent_seconds=max(0.0, (row.now - row.heartbeat_at).total_seconds()),
        )
        # Only SHARDS drainers can have a shard to own.
        for row in rows.annotate(now=DatabaseNow())[: 2 * SHARDS]
    ]


def unowned_shards(drainers: list[DrainerStatus]) -> list[int]:
    owned = {shard for status in drainers for shard in status.owned}
    return [shard for shard in range(SHARDS) if shard not in owned]


def incidents(*, using: str) -> list[Incident]:
    return list(Incident.objects.using(using).order_by("-id")[: counting.LISTED])


def by_shard(jobs: QuerySet[StagedJob], apps: list[str]) -> QuerySet[StagedJob]:
    """Return the jobs of these Celery apps, by conditions that let the database use the index."""
    return jobs.filter(app__in=apps, shard__in=range(SHARDS))


def oldest_seconds(apps: list[str], *, using: str) -> float:
    """Return for how many seconds the oldest job of these apps has been ready or due, or 0."""
    rows = StagedJob.objects.using(using)
    # The order of the index, in the form that the planner of each database recognises.
    by_id = ["id"] if connections[using].vendor == "mysql" else ["available_at", "id"]
    first = _first_of_each_shard(rows.filter(available_at=None), apps, by_id)
    first += _first_of_each_shard(rows.due(), apps, ["available_at", "id"])
    times = rows.filter(id__in=first).annotate(
        since=Coalesce("available_at", "staged_at"), now=DatabaseNow()
    )
    oldest = times.order_by("since").values_list("since", "now").first()
    return max(0.0, (oldest[1] - oldest[0]).total_seconds()) if oldest else 0.0


def _first_of_each_shard(
    waiting: QuerySet[StagedJob], apps: list[str], order: list[str]
) -> list[int]:
    """Return the first id of each shard: one index seek for each, which reads no other rows."""
    shards = Lease.objects.using(waiting.db).filter(resource="jobs")
    first: list[int | None] = []
    for app in apps:
        rows = waiting.filter(app=app, shard=OuterRef("part")).order_by(*order)
        seek = shards.annotate(first=Subquery(rows.values("id")[:1]))
        first += seek.values_list("first", flat=True)
    if not first:  # no drainer has ever run, so no shard is listed
        first += waiting.order_by("id").values_list("id", flat=True)[:1]
    return [id for id in first if id is not None]
