"""Dead jobs summed up: by task and error, and over the last hours and days.

Each summary counts the newest ``counting.MANY`` dead jobs in one statement, and reads the reasons
of the newest job of each row in another. Ages are measured by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Q, QuerySet

from ..database.clock import DatabaseNow
from ..models import DeadJob, counting

#: The windows by name. The admin's filter and its URLs use the names.
WINDOWS = {
    "1h": timedelta(hours=1),
    "3h": timedelta(hours=3),
    "24h": timedelta(hours=24),
    "3d": timedelta(days=3),
    "7d": timedelta(days=7),
}
#: The most pairs of task and error that a summary reads, the most frequent first.
PAIRS = 1000


@dataclass(slots=True)
class DeadRow:
    """Dead jobs of one task, or with one error."""

    name: str
    #: How many died in each of ``WINDOWS``, in their order.
    counts: tuple[int, ...]
    #: How many dead jobs there are, whenever they died.
    total: int = 0
    #: The id of the newest dead job, and its reason in the exception's own words.
    newest: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeadMatrix:
    """Dead jobs by task and by error, the most frequent first."""

    tasks: list[DeadRow]
    errors: list[DeadRow]
    #: How many dead jobs there are, counted up to MANY + 1.
    total: int
    #: False if only the newest MANY jobs were counted, or if there are more rows than are listed.
    complete: bool
    #: How many died in the last hour, including jobs of tasks that are not listed.
    lately: int = 0


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead jobs of one task with one error, and the reason of the newest one."""

    task: str
    error: str
    count: int
    newest: datetime
    reason: str


def dead_matrix(*, using: str) -> DeadMatrix:
    dead, cut = counting.newest(DeadJob.objects.using(using))
    within = {
        f"within_{name}": Count("id", filter=Q(died_at__gte=DatabaseNow() - age))
        for name, age in WINDOWS.items()
    }
    pairs, more = _pairs(dead, PAIRS, **within)
    tasks, errors = _summed(pairs, 0), _summed(pairs, 1)
    reasons = _reasons({row.newest for row in (*tasks, *errors)}, using=using)
    for row in (*tasks, *errors):
        row.reason = reasons.get(row.newest, "")
    return DeadMatrix(
        tasks=tasks[: counting.LISTED],
        errors=errors[: counting.LISTED],
        total=(counting.counted(dead) if more else sum(pair[2] for pair in pairs)) + cut,
        complete=not cut and not more and max(len(tasks), len(errors)) <= counting.LISTED,
        lately=sum(row.counts[0] for row in tasks),
    )


def _summed(pairs: list[Any], place: int) -> list[DeadRow]:
    """Return the rows of the tasks (place 0) or of the errors (1)."""
    rows: dict[str, DeadRow] = {}
    for pair in pairs:
        _, _, total, newest, *counts = pair
        row = rows.setdefault(pair[place], DeadRow(pair[place], (0,) * len(WINDOWS)))
        row.counts = tuple(map(sum, zip(row.counts, counts, strict=True)))
        row.total += total
        row.newest = max(row.newest, newest)
    return sorted(rows.values(), key=lambda row: (-row.total, row.name))


def dead_groups(dead: QuerySet[DeadJob]) -> tuple[list[DeadGroup], bool]:
    """Return these dead jobs grouped by task and error, the most frequent group first.

    Return also whether that is all: there are at most MANY dead jobs, in at most LISTED groups.
    """
    dead, cut = counting.newest(dead)
    pairs, more = _pairs(dead, counting.LISTED, newest_at=Max("died_at"))
    reasons = _reasons({newest for _, _, _, newest, _ in pairs}, using=dead.db)
    groups = [
        DeadGroup(task, error, count, newest_at, reasons.get(newest, ""))
        for task, error, count, newest, newest_at in pairs
    ]
    return groups, not cut and not more


def _pairs(dead: QuerySet[DeadJob], limit: int, **more: Any) -> tuple[list[Any], bool]:
    """Return the most frequent pairs of task and error, and whether there are more."""
    pairs = dead.order_by().values_list("task", "error")
    counts = pairs.annotate(total=Count("id"), newest=Max("id"), **more)
    found = list(counts.order_by("-total", "task", "error")[: limit + 1])
    return found[:limit], len(found) > limit


def _reasons(ids: set[int], *, using: str) -> dict[int, str]:
    return dict(DeadJob.objects.using(using).filter(id__in=ids).values_list("id", "reason"))
