"""What workers do with the jobs that the broker has taken, by queue and task: only with receipts.

One statement reads at most ``counting.MANY`` rows, in the order of the index, whole shards at a
time. Shards are drawn by the task id, so those read have their share of each queue and task.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from django.db import connections

from ..database.clock import later_sql, now_sql
from ..jobs.drain.batch import apps_with_rows
from ..jobs.drain.status import by_shard
from ..models import Run, StagedJob, counting

#: Whether the limit of a sent row was over once. A retry of the task begins it anew.
LATE = "(publishes > 1 OR sent_at < {limit_ago})"
_SQL = f"""
    SELECT queue, task, COUNT(*), COUNT(sent_at),
        COUNT(CASE WHEN lease_until > {{now}} THEN 1 END),
        COUNT(CASE WHEN publishes > 1 THEN 1 END),
        COUNT(CASE WHEN sent_at IS NOT NULL AND staged_id IS NULL AND {LATE} THEN 1 END)
    FROM ({{rows}}) j LEFT JOIN {{runs}} ON staged_id = j.id GROUP BY queue, task
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers of jobs that the broker has taken, and no worker has ended yet."""

    #: Jobs that no worker executes now.
    waiting: int = 0
    running: int = 0
    #: Those of both that were published more than once.
    again: int = 0
    #: Waiting jobs that no worker has started within their limit.
    not_started: int = 0

    def __add__(self, other: Sent) -> Sent:
        names = [each.name for each in fields(Sent)]
        return Sent(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class SentJobs:
    """The jobs that were sent, and have a receipt."""

    #: By queue and task, the most that were not started first, and then the most.
    groups: dict[tuple[str, str], Sent] = field(default_factory=dict)
    #: False if only a part of the rows was read.
    complete: bool = True

    @property
    def total(self) -> Sent:
        return sum(self.groups.values(), Sent())

    @property
    def not_started(self) -> dict[str, int]:
        """The number of jobs that were not started within their limit, by queue."""
        found: dict[str, int] = {}
        for (queue, _), each in self.groups.items():
            if each.not_started:
                found[queue] = found.get(queue, 0) + each.not_started
        return found

    def shown(self, count: int) -> str:
        return f"{count}{'' if self.complete else '+'}"


def sent_jobs(*, using: str) -> SentJobs:
    """Return the jobs of the alias ``using`` that were sent, and have a receipt."""
    apps = apps_with_rows(using=using)
    if not apps:
        return SentJobs()
    rows: Any = by_shard(StagedJob.objects.using(using), apps)
    rows = rows.filter(available_at__isnull=False).order_by()
    read = rows.values("id", "queue", "task", "sent_at", "publishes", "receipt")
    read = read[: counting.MANY + 1].query
    connection: Any = connections[using]
    inner, params = read.get_compiler(using).as_sql()
    sql = _SQL.format(
        rows=inner,
        runs=connection.ops.quote_name(Run._meta.db_table),
        now=now_sql(using),
        limit_ago=later_sql("-receipt", using),
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        found = cursor.fetchall()
    groups = {
        (queue, task): Sent(sent - running, running, again, late)
        for queue, task, _, sent, running, again, late in found
        if sent
    }
    most = sorted(
        groups.items(), key=lambda each: (-each[1].not_started, -each[1].waiting, each[0])
    )
    return SentJobs(dict(most), sum(count for _, _, count, *_ in found) <= counting.MANY)
