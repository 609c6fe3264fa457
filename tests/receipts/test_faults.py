"""Workers that are killed, stopped or told to revoke, brokers that lose, jobs that come twice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staged import cancel
from outbox_app.models import DeadJob, Incident, Run, StagedJob
from tests.patience import eventually
from tests.servers.processes import continue_tree, stop_tree

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow, pytest.mark.timeout(240)]

#: One broker for each database; the cases that a broker takes part in are in test_cases.
BROKERS = {"default": "redis_url", "postgres": "redis_url", "mariadb": "rabbitmq_url"}
BROKERS["mysql"] = BROKERS["mariadb"]


@pytest.fixture
def app(alias: str, receipts: None, make_jobs_app: Any, request: Any) -> Any:
    return make_jobs_app(request.getfixturevalue(BROKERS[alias]))


@pytest.fixture
def stage(alias: str, app: Any) -> Any:
    """``stage(name)``: a job whose label is the name of its task."""

    def stage(name: str) -> Any:
        with transaction.atomic(using=alias):
            return app.tasks[name].delay(name)

    return stage


def turn_back(alias: str) -> None:
    """Let the limit of all sent jobs be over."""
    long_ago = DatabaseNow() - timedelta(seconds=1)
    StagedJob.objects.using(alias).sent().update(available_at=long_ago)


def ready(worker: Any) -> None:
    eventually(lambda: worker.log.exists() and "ready." in worker.log.read_text(), "a worker")


def test_a_process_that_dies_with_a_message_that_was_acknowledged(
    alias, app, stage, start_worker, left, client
):
    """Celery reports a failure. The limit brings the job back, with an incident."""
    ready(start_worker(app))
    stage("dies")
    assert Drain(using=alias).run(once=True).published == 1
    eventually(lambda: client.get("ran:dies") == "1", "the first run")
    runs = Run.objects.using(alias)
    eventually(lambda: runs.filter(lease_until__lt=DatabaseNow()).exists(), "its lease ends")
    turn_back(alias)
    assert Drain(using=alias).run(once=True).published == 1
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "the second run")
    assert client.get("ran:dies") == "2"
    eventually(lambda: left() == {"Incident": 1}, "the run goes after the row")
    assert Incident.objects.using(alias).get().kind == "no_receipt"


def test_a_job_that_kills_each_process_is_dead_after_its_attempts(
    alias, app, stage, start_worker, draining, left, client
):
    start_worker(app)
    stage("always_dies")
    eventually(lambda: DeadJob.objects.using(alias).exists(), "it is dead", seconds=80)
    assert client.get("ran:always_dies") == "3"
    eventually(lambda: left() == {"DeadJob": 1}, "the run goes after the row")


def test_a_job_that_was_published_twice_is_executed_once(
    alias, app, stage, start_worker, left, client
):
    """As after a drainer that was killed between a publish and its UPDATE."""
    stage("waits")
    for _ in range(2):
        assert Drain(using=alias).run(once=True).published == 1
        StagedJob.objects.using(alias).update(available_at=None, sent_at=None, publishes=None)
    worker = start_worker(app)
    eventually(
        lambda: worker.log.exists() and "executed by another worker" in worker.log.read_text(),
        "the copy is skipped",
    )
    client.rpush("go:waits", "go")
    eventually(lambda: not left(), "the job ends")
    assert client.get("ran:waits") == "1"


def test_revoked_and_terminated(alias, app, stage, start_worker, draining, left, client):
    worker = start_worker(app)
    running = stage("waits")
    eventually(lambda: client.get("ran:waits") == "1", "it runs")
    app.control.revoke(running.id, terminate=True, signal="SIGKILL")
    eventually(lambda: not left(), f"it has ended: {worker.log}")
    later = "b" * 32
    app.control.revoke(later)
    with transaction.atomic(using=alias):
        app.tasks["plain"].apply_async(("revoked",), task_id=later)
    eventually(lambda: not left(), f"it is revoked: {worker.log}")
    assert client.get("ran:revoked") is None


def test_a_job_that_is_cancelled_when_its_message_waits(
    alias, app, stage, start_worker, left, client
):
    job = stage("plain")
    Drain(using=alias).run(once=True)
    assert cancel(job.id, using=alias, app=app)
    worker = start_worker(app)
    eventually(
        lambda: worker.log.exists() and "ended or was cancelled" in worker.log.read_text(),
        "the message is skipped",
    )
    assert client.get("ran:plain") is None
    assert not left()


def test_a_hard_limit_that_is_over_while_it_watches_another_run(
    alias, app, stage, start_worker, left, client
):
    """The worker has not begun the job, so its limit is no end of it."""
    job = stage("hard")
    row = StagedJob.objects.using(alias).get()
    runs = Run.objects.using(alias)
    run = {"staged_id": row.pk, "token": "other", "worker": "w9", "attempts": 1, "retries": 0}
    an_hour = DatabaseNow() + timedelta(hours=1)
    runs.create(**run, started_at=DatabaseNow(), lease_until=an_hour)
    assert Drain(using=alias).run(once=True).published == 1
    worker = start_worker(app)
    over = f"exceeded for hard[{job.id}]"
    eventually(lambda: worker.log.exists() and over in worker.log.read_text(), "its limit is over")
    assert client.get("ran:hard") is None
    runs.update(lease_until=DatabaseNow() - timedelta(seconds=1))
    turn_back(alias)
    assert Drain(using=alias).run(once=True).published == 1
    eventually(lambda: set(left()) == {"Incident"}, "it runs to its limit")
    assert client.get("ran:hard") == "1"


# RabbitMQ would hand the second message to the stopped worker, too, until its heartbeats end.
@pytest.mark.parametrize("alias", ["default", "postgres"], indirect=True)
def test_a_worker_that_is_stopped_for_longer_than_its_lease(
    alias, app, stage, start_worker, left, client
):
    """Another one executes the job; what the first one makes of it changes no row of others."""
    stopped = start_worker(app, count=1)
    stage("waits")
    Drain(using=alias).run(once=True)
    eventually(lambda: client.get("ran:waits") == "1", "it runs")
    stop_tree(stopped.process.pid)
    runs = Run.objects.using(alias)
    eventually(lambda: runs.filter(lease_until__lt=DatabaseNow()).exists(), "its lease ends")
    start_worker(app, count=1)
    turn_back(alias)
    assert Drain(using=alias).run(once=True).published == 1
    eventually(lambda: client.get("ran:waits") == "2", "it runs again")
    client.rpush("go:waits", "go", "go")
    eventually(lambda: set(left()) == {"Incident"}, "the second run ends")
    continue_tree(stopped.process.pid)
    assert client.get("ran:waits") == "2"
