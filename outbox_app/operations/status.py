"""How the outbox is doing: what the commands and the admin show of it.

Every function makes a number of statements that does not depend on the rows, only on the number of
Celery apps. Rows are counted up to ``MANY`` and no further, through indexes, and what is listed is
cut: nothing here counts or sorts a large table. The figures are read one after the other, not at
one moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Count, Max, OuterRef, QuerySet, Subquery

from ..conf import SHARDS
from ..delivery.batch import apps_with_rows
from ..models import DatabaseNow, DeadJob, Drainer, Incident, Lease, StagedJob

#: Counting stops here.
MANY = 100_000
#: Lists end here.
LISTED = 50


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs on their way."""

    #: Rows, counted up to MANY.
    rows: int
    #: Age of the oldest ready row, in seconds; 0 where there is none.
    oldest_seconds: float

    @property
    def shown(self) -> str:
        """The count for people: ``100000+`` where counting stopped."""
        return shown_count(self.rows)


@dataclass(frozen=True, slots=True)
class Held:
    """Jobs that wait for their time, each figure counted up to MANY."""

    #: Their time has come: they leave with the next batches.
    due: int
    within_the_hour: int
    later: int

    @property
    def rows(self) -> int:
        """All of them."""
        return self.due + self.within_the_hour + self.later


@dataclass(frozen=True, slots=True)
class DrainerStatus:
    """One drainer, by the database's clock."""

    drainer: Drainer
    shards: int
    silent_seconds: float

    @property
    def is_silent(self) -> bool:
        """Whether its lease has run out, so that others may take its shards."""
        return self.silent_seconds > self.drainer.lease_seconds


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead jobs of one task with one error."""

    task: str
    error: str
    count: int
    newest: datetime
    #: Of the newest one, in the exception's own words.
    reason: str


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """Dead jobs by task and error, the most frequent first."""

    groups: list[DeadGroup]
    #: False: only the newest MANY dead jobs were looked at, or there are more than LISTED groups.
    complete: bool


def shown_count(count: int) -> str:
    """Return a count for people: ``100000+`` where counting stopped."""
    return f"{MANY}+" if count > MANY else str(count)


def counted(rows: QuerySet[Any]) -> int:
    """Return how many rows there are, or MANY + 1 where there are more than MANY."""
    return rows.order_by()[: MANY + 1].count()


def backlog(*, using: str) -> Backlog:
    """Return the backlog of the alias ``using``: ready rows only, held ones are not late."""
    apps = apps_with_rows(using=using)
    ready = StagedJob.objects.using(using).filter(available_at=None)
    oldest = (
        ready.filter(id__in=_first_of_each_shard(ready, apps))
        .order_by("id")
        .annotate(now=DatabaseNow())
        .values_list("staged_at", "now")
        .first()
    )
    age = (oldest[1] - oldest[0]).total_seconds() if oldest else 0.0
    return Backlog(rows=counted(_by_shard(ready, apps)), oldest_seconds=max(0.0, age))


def held(*, using: str) -> Held:
    """Return how many jobs are held on the alias ``using``, by when they are due."""
    rows = _by_shard(StagedJob.objects.using(using), apps_with_rows(using=using))
    soon = DatabaseNow() + timedelta(hours=1)
    return Held(
        due=counted(rows.filter(available_at__lte=DatabaseNow())),
        within_the_hour=counted(
            rows.filter(available_at__gt=DatabaseNow(), available_at__lte=soon)
        ),
        later=counted(rows.filter(available_at__gt=soon)),
    )


def drainers(*, using: str) -> list[DrainerStatus]:
    """Return the drainers of the alias ``using``, by host and process id."""
    owned = dict(
        Lease.objects.using(using)
        .filter(resource="jobs", owner__isnull=False)
        .values_list("owner")
        .annotate(shards=Count("part"))
    )
    rows = (
        Drainer.objects.using(using)
        .filter(resource="jobs")
        .annotate(now=DatabaseNow())
        .order_by("host", "pid", "id")
    )
    return [
        DrainerStatus(
            drainer=row,
            shards=owned.get(row.id, 0),
            silent_seconds=max(0.0, (row.now - row.heartbeat_at).total_seconds()),
        )
        for row in rows[: 2 * SHARDS]  # more than SHARDS have nothing to do
    ]


def unowned_shards(drainers: list[DrainerStatus]) -> int:
    """Return how many shards none of these drainers owns. What is in them does not leave."""
    return max(0, SHARDS - sum(status.shards for status in drainers))


def incidents(*, using: str) -> list[Incident]:
    """Return the latest incidents of the alias ``using``, the newest first."""
    return list(Incident.objects.using(using).order_by("-id")[:LISTED])


def dead_groups(dead: QuerySet[DeadJob]) -> DeadGroups:
    """Return how many of these dead jobs there are of each task and error.

    Args:
        dead: Which dead jobs, on their alias. Its order does not matter.
    """
    past = list(dead.order_by("-id").values_list("id", flat=True)[MANY : MANY + 1])
    if past:
        dead = dead.filter(id__gt=past[0])
    groups = list(
        dead.order_by()
        .values_list("task", "error")
        .annotate(count=Count("id"), newest=Max("died_at"), last=Max("id"))
        .order_by("-count", "task", "error")[: LISTED + 1]
    )
    reasons = dict(
        DeadJob.objects.using(dead.db)
        .filter(id__in=[last for *_, last in groups])
        .values_list("id", "reason")
    )
    return DeadGroups(
        groups=[
            DeadGroup(task, error, count, newest, reasons.get(last, ""))
            for task, error, count, newest, last in groups[:LISTED]
        ],
        complete=not past and len(groups) <= LISTED,
    )


def _by_shard(jobs: QuerySet[StagedJob], apps: list[str]) -> QuerySet[StagedJob]:
    # Names every app and shard, so that the index (app, shard, available_at, id) serves: it holds
    # ready rows and held ones apart, and a million of the one kind cost a count of the other
    # nothing.
    return jobs.filter(app__in=apps, shard__in=range(SHARDS))


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
