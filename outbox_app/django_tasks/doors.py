"""What the backend of ``django.tasks`` adds to the core: the retention of results.

A result is kept as long as its job is staged or dead, however old it is. The age counts from
``kept_from``, which moves when the task begins and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from ..aliases import outbox_alias
from ..capability import Doors, is_on
from ..models import StagedJob
from ..retention.rows import Kept, prune
from .conf import TaskSettings
from .models import TaskResult


class TasksDoors(Doors):
    name = "tasks"
    rank = 70
    settings = TaskSettings

    def cancel(self, task_id: str, *, using: str) -> None:
        """Delete the result: without it a worker does not run the task."""
        if not is_on(using, TaskResult):
            return
        rows = TaskResult.objects.using(using)
        # Read first: on MySQL a DELETE that finds no row would lock the gap.
        for row in rows.filter(task_id=task_id, status=TaskResult.Status.READY):
            rows.filter(pk=row.pk, status=TaskResult.Status.READY)._raw_delete(using)

    def postpone(self, jobs: Iterable[StagedJob], moment: Any, *, using: str) -> None:
        if is_on(using, TaskResult):
            TaskResult.objects.using(using).keep_from(moment, jobs)

    def kept(self) -> Mapping[str, Kept]:
        results = (
            "remove results of django.tasks (table outbox_taskresult), except those whose job is "
            "still staged or dead"
        )
        return {
            "results": Kept(
                *(TaskResult, "kept_from", outbox_alias, "TASK_RESULT_RETENTION_DAYS", results),
                parts=_in_two,
            )
        }

    def removals(self, using: str) -> Mapping[str, Callable[..., int]]:
        return {"results": partial(prune, "results", using)} if is_on(using, TaskResult) else {}


def _in_two(rows: Any, before: datetime, *, dry_run: bool) -> Iterable[Any]:
    """In one query PostgreSQL would scan the jobs for each row."""
    ready = rows.filter(status=TaskResult.Status.READY)
    return [rows.exclude(status=TaskResult.Status.READY), ready.settled()]


DOORS = TasksDoors()
