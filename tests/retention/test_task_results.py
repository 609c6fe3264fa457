"""``outbox_prune --results``: what is kept for how long, and what is never removed before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.utils.timezone import now

from outbox_app.models import DeadJob, StagedJob, TaskResult


@pytest.fixture
def results(alias: str) -> Any:
    """``results(days, status)``: the id of a result that is kept since so many days."""

    def make(days: int, status: str = "SUCCESSFUL") -> str:
        then = now() - timedelta(days=days)
        row = TaskResult(task_id=str(uuid4()), task="t", call="{}", status=status)
        row.enqueued_at = row.kept_from = then
        row.save(using=alias)
        return row.task_id

    return make


def left(alias: str) -> set[str]:
    return set(TaskResult.objects.using(alias).values_list("task_id", flat=True))


def test_old_ones_go_and_those_of_waiting_jobs_stay(
    alias: str, results: Any, settings: Any
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "TASK_RESULT_RETENTION_DAYS": 7}
    job: dict[str, Any] = {"shard": 1, "task": "t", "body": b"", "envelope": "{}"}
    young = results(6)
    staged, dead = results(9, "READY"), results(9, "READY")
    StagedJob.objects.using(alias).create(task_id=staged, **job)
    DeadJob.objects.using(alias).create(task_id=dead, staged_id=1, error="e", **job)
    for status in ("READY", "RUNNING", "FAILED", "SUCCESSFUL"):
        results(9, status)
    again = results(9)  # a person requeues a job whose task has run
    StagedJob.objects.using(alias).create(task_id=again, **job)

    call_command("outbox_prune", "--results", "--dry-run")
    assert len(left(alias)) == 8
    call_command("outbox_prune", "--results", "--batch-size=1")
    assert left(alias) == {young, staged, dead}
