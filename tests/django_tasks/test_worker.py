"""A real drain and real workers: priorities, a process that dies in a task, a job sent twice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import forking
from tests.django_tasks import declared
from tests.patience import eventually
from tests.servers.mysql import MARIADB
from tests.servers.processes import forget_process, kill_trees, spawn

pytestmark = pytest.mark.django_db(transaction=True)

BROKERS = {"default": "redis_url", "postgres": "redis_url", MARIADB: "rabbitmq_url"}


@pytest.fixture
def app(alias: str, make_app: Any, current: Any, request: Any) -> Any:
    """An app for each broker. RabbitMQ's queue has priorities."""
    app = make_app(request.getfixturevalue(BROKERS[alias]), task_queue_max_priority=10)
    current(app)
    return app


@pytest.fixture
def start_worker(alias: str, app: Any, environment: Any, tmp_path: Path) -> Iterator[Any]:
    """``start_worker()``: a worker with one process, which prefetches one message at a time."""
    started: list[Any] = []

    def start() -> Path:
        queue = app.conf.task_default_queue
        command = f"-m celery -A tests.django_tasks.worker worker -c1 -l INFO -Q {queue}"
        log = tmp_path / f"worker-{len(started)}.log"
        process = spawn(
            [sys.executable, *command.split(), "--without-gossip", "--without-mingle"],
            log=log,
            folder=Path(__file__).resolve().parents[2],
            environment={
                **environment(alias),
                "DJANGO_SETTINGS_MODULE": "tests.django_tasks.settings",
                "TASKS_BROKER": app.conf.broker_url,
                "TASKS_QUEUE": queue,
            },
            user=None,
            popen=forking.Popen,
        )
        started.append(process)
        return log

    yield start
    for process in started:
        kill_trees([process.pid])
        process.wait()
        forget_process(process.pid)


@pytest.mark.usefixtures("backend")
def test_from_enqueue_to_the_result(
    alias: str, start_worker: Callable[[], Path], tmp_path: Path
) -> None:
    with transaction.atomic(using=alias):
        low, middle, high = (
            declared.add.using(priority=priority).enqueue(1, y=2) for priority in (-50, 0, 100)
        )
        # Its effect is there, and its result is not, when the process is killed.
        dies = declared.die.using(priority=-90).enqueue(str(tmp_path / "attempts"))
        fails = declared.fail.using(priority=-95).enqueue()
        last = declared.effect.using(priority=-100).enqueue("once")
    rows = list(StagedJob.objects.using(alias).all())
    Drain(using=alias).run(once=True)
    # As after a drainer that was killed between publishing a row and deleting it.
    StagedJob.objects.using(alias).bulk_create([row for row in rows if row.task_id == last.id])
    Drain(using=alias).run(once=True)
    log = start_worker()

    results = [low, middle, high, dies, fails, last]

    def ended() -> bool:
        for result in results:
            result.refresh()
        is_repeated = log.exists() and "has finished already" in log.read_text()
        return is_repeated and all(result.is_finished for result in results)

    eventually(ended, str(log))
    assert [each.status for each in results] == [*["SUCCESSFUL"] * 4, "FAILED", "SUCCESSFUL"]
    assert (high.return_value, dies.return_value) == (3, "survived")
    assert [each.attempts for each in results] == [1, 1, 1, 2, 1, 1]
    assert high.started_at < middle.started_at < low.started_at < dies.started_at
    assert fails.errors[0].exception_class is ValueError
    assert [each.name for each in Group.objects.using(alias).all()] == [last.return_value]


WITHOUT = """
import sys
sys.modules["django_tasks"] = sys.modules["outbox_app.django_tasks.backend"] = None
import django
django.setup()
from celery import current_app
import outbox_app.django_tasks
assert "outbox_app.run_task" in current_app.tasks
try:
    outbox_app.django_tasks.OutboxBackend
except ImportError:
    print("done")
"""


def test_a_worker_without_django_tasks_loads_the_module(environment: Any) -> None:
    command = [sys.executable, "-c", WITHOUT]
    ran = forking.run(command, env=environment("default"), capture_output=True, text=True)
    assert ran.stdout == "done\n", ran.stderr
