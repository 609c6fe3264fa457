"""``outbox_prune --results``: how long each result is kept, and which are never removed before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections
from django.utils.timezone import now

from outbox_app import reschedule
from outbox_app.django_tasks.models import RUN_TASK, TaskResult
from outbox_app.jobs.dead import requeue_dead
from outbox_app.models import DeadJob, StagedJob
from tests.faults.tools import on


@pytest.fixture
def results(alias: str) -> Any:
    """``results(days, status)``: the id of a result that is so many days old."""

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


@on("postgres")
def test_the_jobs_are_not_read_again_for_each_result(alias: str, results: Any) -> None:
    results(99, "READY")
    plans = []

    def explained(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "outbox_stagedjob" in sql:
            execute(f"EXPLAIN {sql}", params, many, context)
            plans.append(str(context["cursor"].fetchall()))
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(explained):
        call_command("outbox_prune", "--results")
    assert plans
    assert [plan for plan in plans if "Anti Join" not in plan] == []


@on("mariadb")
def test_rows_that_never_began_are_not_passed_again_with_each_batch(
    alias: str, results: Any
) -> None:
    """They go after the others: a large number of them would make each batch long."""
    for _ in range(200):
        results(99, "READY")
        results(99)

    def rows_read() -> int:
        with connections[alias].cursor() as cursor:
            cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read_next'")
            return int(cursor.fetchone()[1])

    before = rows_read()
    call_command("outbox_prune", "--results", "--batch-size=10")
    assert left(alias) == set()
    assert rows_read() - before < 1000


def test_all_that_is_old_goes_in_any_order_of_coming(alias: str, results: Any) -> None:
    old = [results(days) for days in (9, 12, 8, 30, 12, 12)]
    twelve = TaskResult.objects.using(alias).filter(task_id__in=[old[1], *old[4:]])
    twelve.update(kept_from=now() - timedelta(days=12))
    call_command("outbox_prune", "--results", "--older-than=7", "--batch-size=1")
    assert left(alias) == set()


def test_what_was_requeued_or_put_off_is_kept_as_if_it_had_been_called_then(
    alias: str, results: Any
) -> None:
    job: dict[str, Any] = {"shard": 1, "task": RUN_TASK, "body": b"", "envelope": "{}"}
    requeued, put_off, _gone = (results(40, "READY") for _ in range(3))
    DeadJob.objects.using(alias).create(task_id=requeued, staged_id=1, error="e", **job)
    held = StagedJob(task_id=put_off, available_at=now() + timedelta(hours=5), **job)
    held.save(using=alias)
    requeue_dead(DeadJob.objects.using(alias).all(), by="ann")
    assert reschedule(put_off, eta=now() + timedelta(hours=4), using=alias)
    StagedJob.objects.using(alias).all().delete()  # they have left
    call_command("outbox_prune", "--results")
    assert left(alias) == {requeued, put_off}


def test_what_begins_while_a_batch_is_removed_stays(alias: str, results: Any) -> None:
    id = results(40, "RUNNING")

    def begin(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("DELETE"):
            wrappers.remove(begin)
            TaskResult.objects.using(alias).update(kept_from=now())
        return execute(sql, *rest)

    wrappers = connections[alias].execute_wrappers
    wrappers.append(begin)
    call_command("outbox_prune", "--results")
    assert begin not in wrappers
    assert left(alias) == {id}
