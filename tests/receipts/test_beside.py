"""Receipts beside immediate delivery, ordering keys, and the backend of ``django.tasks``."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from django.db import connections, transaction

from outbox_app.jobs import immediate
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, StagedJob
from tests.celery_worker import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app(make_app: Any, receipts: None, redis_url: str) -> Any:
    return make_app(redis_url)


def test_one_that_leaves_right_after_the_commit(alias, app):
    with transaction.atomic(using=alias):
        app.send_task("work", (1,), immediate=True)
    job = StagedJob.objects.using(alias).get()
    assert (job.publishes, job.is_immediate, job.receipt) == (1, None, 3600)
    [message] = received(app)
    assert message.headers["outbox_row"] == f"{job.pk}@{alias}@{job.task_id}"
    assert Drain(using=alias).run(once=True).published == 0


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_a_worker_that_begins_an_immediate_job_delays_its_mark(alias, app, monkeypatch):
    mark, marked = immediate.mark_sent, []
    other: Any = connections[alias].copy()
    other.inc_thread_sharing()

    def while_locked(rows: Any, *, using: str) -> int:
        if not marked:
            other.set_autocommit(False)
            with other.cursor() as cursor:
                sql = "SELECT * FROM outbox_stagedjob WHERE id = %s LOCK IN SHARE MODE"
                cursor.execute(sql, [rows[0][0]])
        marked.append(mark(rows, using=using))
        other.rollback()
        return int(marked[-1])

    monkeypatch.setattr(immediate, "mark_sent", while_locked)
    with closing(other), transaction.atomic(using=alias):
        app.send_task("work", (1,), immediate=True)
    assert marked == [0, 1]
    assert StagedJob.objects.using(alias).get().publishes == 1


def test_jobs_of_a_key_leave_in_order_and_wait_for_no_receipt(alias, app):
    for n in range(3):
        with transaction.atomic(using=alias):
            app.send_task("work", (n,), ordering_key="k", task_id=f"t{n}")
    assert Drain(using=alias).run(once=True).published == 3
    assert [message.headers["id"] for message in received(app)] == ["t0", "t1", "t2"]


def test_a_dead_job_of_its_key_blocks_none_that_was_sent(alias, app, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    for n in range(2):
        with transaction.atomic(using=alias):
            app.send_task("work", (n,), ordering_key="k")
    assert Drain(using=alias).run(once=True).published == 2
    received(app)
    first, second = StagedJob.objects.using(alias).order_by("id")
    first.as_dead(error="E", reason="r").save(using=alias)
    first.delete(using=alias)
    StagedJob.objects.using(alias).update(available_at=second.staged_at)
    assert Drain(using=alias).run(once=True).published == 1
    assert DeadJob.objects.using(alias).count() == 1
    connections[alias].close()
