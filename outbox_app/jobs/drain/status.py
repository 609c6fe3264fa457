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

from django.db.models import Count, Max, QuerySet

from ...conf import SHARDS
from ...models import DatabaseNow, DeadJob, Incident, Lease, Process, StagedJob
from . import backlog as waiting
from .batch import apps_with_rows

#: Counting stops here.
MANY = waiting.MANY
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

    drainer: Process
    #: Numbers of the shards that it owns, in their order.
    owned: list[int]
    silent_seconds: float

    @property
    def shards(self) -> int:
        """How many shards it owns."""
        return len(self.owned)

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
    return waiting.counted(rows, limit=MANY)


def backlog(*, using: str) -> Backlog:
    """Return the backlog of the alias ``using``: ready rows only, held ones are not late."""
    apps = apps_with_rows(using=using)
    age = waiting.oldest_seconds(apps, using=using)
    return Backlog(rows=counted(waiting.ready_rows(apps, using=using)), oldest_seconds=age)


def held(*, using: str) -> Held:
    """Return how many jobs are held on the alias ``using``, by when they are due."""
    rows = waiting.by_shard(StagedJob.objects.using(using), apps_with_rows(using=using))
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
    owned: dict[Any, list[int]] = {}
    leases = Lease.objects.using(using).filter(resource="jobs", owner__isnull=False)
    for owner, part in leases.order_by("part").values_list("owner", "part"):
        owned.setdefault(owner, []).append(part)
    rows = (
        Process.objects.using(using)
        .filter(resource="jobs")
        .annotate(now=DatabaseNow())
        .order_by("host", "pid", "id")
    )
    return [
        DrainerStatus(
            drainer=row,
            owned=owned.get(row.id, []),
            silent_seconds=max(0.0, (row.now - row.heartbeat_at).total_seconds()),
        )
        for row in rows[: 2 * SHARDS]  # more than SHARDS have nothing to do
    ]


def unowned_shards(drainers: list[DrainerStatus]) -> list[int]:
    """Return the shards that none of these drainers owns. What is in them does not leave."""
    owned = {shard for status in drainers for shard in status.owned}
    return [shard for shard in range(SHARDS) if shard not in owned]


def incidents(*, using: str) -> list[Incident]:
    """Return the latest incidents of the alias ``using``, the newest first."""
    return list(Incident.objects.using(using).order_by("-id")[:LISTED])


def dead_groups(dead: QuerySet[DeadJob]) -> DeadGroups:
    """Return how many of these dead jobs there are of each task and error."""
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
