"""Real workers: the results of staged jobs, and the messages that a worker sends itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from django.contrib.auth.models import Group
from django.db import transaction
from django.utils import timezone
from kombu import pools

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import forking
from tests.jobs.staging import project
from tests.patience import eventually, patience

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start(tmp_path, environment) -> Iterator[Callable[..., OutboxCelery]]:
    """``start(alias, broker=…, backend=…, outside=…)``: start a worker; returns its client."""
    workers: list[subprocess.Popen[bytes]] = []
    apps: list[OutboxCelery] = []

    def run(alias: str, *, broker: str, backend: str, outside: str = "send") -> OutboxCelery:
        options = {"name": f"app-{uuid4().hex[:8]}", "broker": broker, "backend": backend}
        variables = project.variables(using=alias, outside=outside, **options)
        command = "celery -A tests.jobs.staging.project worker --pool solo --without-mingle "
        command += "--without-gossip --without-heartbeat --loglevel INFO"
        log = tmp_path / "worker.log"
        with log.open("wb") as output:
            worker = forking.Popen(
                [sys.executable, "-m", *command.split()],
                cwd=ROOT,
                env={**environment(alias), **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        workers.append(worker)
        eventually(lambda: " ready." in log.read_text() or worker.poll() is not None)
        assert worker.poll() is None, log.read_text()
        apps.append(project.make(using=alias, **options))
        return apps[-1]

    yield run
    for worker in workers:
        worker.kill()
        worker.wait()
    for app in apps:
        close(app)


def close(app: OutboxCelery) -> None:
    backend = app._backend
    if hasattr(backend, "result_consumer"):
        backend.result_consumer.stop()
    if hasattr(backend, "client"):
        backend.result_consumer.subscribed_to.clear()
        backend.client.connection_pool.disconnect()
    pools.reset()
    app.close()


# Each takes the app's tasks and returns a result, whose value follows.
RESULTS = {
    "task": (lambda t: t["add"].delay(1, 2), 3),
    "chain": (lambda t: chain(t["add"].s(1, 2), t["add"].s(3), t["double"].s()).delay(), 12),
    "group": (lambda t: group(t["add"].s(i, i) for i in range(3)).delay(), [0, 2, 4]),
    "group of chains": (
        lambda t: group(chain(t["add"].s(1, 1), t["double"].s()), t["add"].s(5, 5)).delay(),
        [4, 10],
    ),
    "chord": (lambda t: chord([t["add"].s(1, 1), t["add"].s(2, 2)], t["total"].s()).delay(), 6),
    "group in a chain": (
        lambda t: chain(
            t["add"].s(1, 1), group(t["add"].s(1), t["add"].s(2)), t["total"].s(), t["double"].s()
        ).delay(),
        14,
    ),
    "chain that ends in a group": (
        lambda t: chain(t["add"].s(1, 1), group(t["add"].s(1), t["add"].s(2))).delay(),
        [3, 4],
    ),
    "map": (lambda t: t["double"].map([1, 2, 3]).delay(), [2, 4, 6]),
}


# The setting OUTSIDE of the worker makes no difference to what follows a task.
@pytest.mark.parametrize(
    ("alias", "outside"),
    [("default", "refuse"), ("postgres", "stage"), ("mariadb", "send")],
    indirect=["alias"],
)
def test_results_arrive_and_what_follows_a_task_is_sent(outside, alias, start, redis_url):
    app = start(alias, broker=redis_url, backend=redis_url, outside=outside)
    with transaction.atomic(using=alias):
        results = {name: send(app.tasks) for name, (send, _) in RESULTS.items()}
        app.tasks["add"].apply_async((1, 2), link=app.tasks["double"].s())
        linked = app.tasks["add"].apply_async((1, 2), link=app.tasks["note"].si("linked"))
        app.tasks["failing"].apply_async(link_error=app.tasks["note"].si("failed"))

    # Nothing drains after this: what follows a task would stay where it was staged.
    Drain(using=alias).run(once=True)

    for i, (name, (_, value)) in enumerate(RESULTS.items()):
        if i % 2:
            assert results[name].get(timeout=patience(60)) == value, name
        else:  # waiting in a transaction of another purpose
            with transaction.atomic(using=alias):
                assert results[name].get(timeout=patience(60)) == value, name
    assert linked.get(timeout=patience(60)) == 3
    written = Group.objects.using(alias).filter(name__in=["linked", "failed"])
    eventually(lambda: written.count() == 2)
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.parametrize(
    ("alias", "backend"),
    [("default", "file"), ("postgres", "redis"), ("mariadb", "redis")],
    indirect=["alias"],
)
def test_retry_and_replace_are_sent_though_their_transaction_is_rolled_back(
    backend, alias, start, redis_url, tmp_path
):
    backend_url = redis_url if backend == "redis" else f"file://{tmp_path}"
    app = start(alias, broker=redis_url, backend=backend_url)
    values = {"task": 4, "chain": 5, "group": [4, 5], "chord": 9, "group in a chain": 9}
    with transaction.atomic(using=alias):
        retried = app.tasks["retrying"].delay(17)
        replaced = {how: app.tasks["replacing"].delay(how, 3) for how in values}
    Drain(using=alias).run(once=True)

    assert retried.get(timeout=patience(60)) == 17
    for how, value in values.items():
        assert replaced[how].get(timeout=patience(60)) == value, how
    assert [group.name for group in Group.objects.using(alias).all()] == ["attempt 2"]
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_what_a_task_calls_follows_the_rules(alias, start, redis_url):
    app = start(alias, broker=redis_url, backend=redis_url, outside="stage")
    tasks = app.tasks
    with transaction.atomic(using=alias):
        tasks["staging"].delay(1)
        outside = tasks["outside"].delay(2)
        body = chord([tasks["add"].s(1, 1), tasks["add"].s(2, 2)], tasks["total"].s()).delay()
    Drain(using=alias).run(once=True)

    assert body.get(timeout=patience(60)) == 6
    jobs = StagedJob.objects.using(alias)
    eventually(lambda: jobs.count() == 2)
    assert outside.get(timeout=patience(60)) in jobs.values_list("task_id", flat=True)
    assert {job.task for job in jobs.all()} == {"add"}

    with transaction.atomic(using=alias):  # remote control is no job
        assert eventually(lambda: app.control.ping(timeout=0.5))
        app.control.revoke("nobody")
        assert eventually(lambda: app.control.inspect(timeout=0.5).registered())
    assert jobs.count() == 2


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_an_early_result_is_kept_in_the_reply_queue(alias, start, rabbitmq_url):
    app = start(alias, broker=rabbitmq_url, backend="rpc://")
    with transaction.atomic(using=alias):
        result = app.tasks["add"].delay(1, 2)
    Drain(using=alias).run(once=True)

    with app.connection_for_read() as connection:  # the worker answers before anybody waits
        reply_queue = app.backend.binding(connection.default_channel)
        eventually(lambda: reply_queue.queue_declare(passive=True).message_count)

    assert result.get(timeout=patience(60)) == 3


@pytest.mark.parametrize("alias", ["default"], indirect=True)
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_a_job_that_expired_before_it_left_is_revoked_by_a_worker(
    broker, alias, start, redis_url, request
):
    app = start(alias, broker=request.getfixturevalue(f"{broker}_url"), backend=redis_url)
    add, past = app.tasks["add"], timezone.now() - timedelta(seconds=5)
    with transaction.atomic(using=alias):
        late = add.apply_async((1, 2), expires=past)
        part = add.s(1, 1).set(expires=past)
        body = chord([part, add.s(2, 2)], app.tasks["total"].s()).delay()
    assert Drain(using=alias).run(once=True).published == 3

    with pytest.raises(TaskRevokedError):
        late.get(timeout=patience(60))
    with pytest.raises((ChordError, TaskRevokedError)):
        body.get(timeout=patience(60))
    assert late.state == "REVOKED"
