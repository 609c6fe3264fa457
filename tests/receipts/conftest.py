"""Real workers of every pool, a drainer beside them, and what is left in the tables."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import connections

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, InboxEntry, Incident, Run, StagedJob
from tests import forking
from tests.celery_worker import Worker
from tests.receipts import worker as tasks
from tests.receipts.settings import RECEIPTS


@pytest.fixture
def receipts(settings: Any) -> None:
    """Every task has a receipt, unless it says otherwise."""
    settings.OUTBOX = {**settings.OUTBOX, "RECEIPTS": RECEIPTS}


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A Redis client, in which tasks count how often they ran."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def make_jobs_app(make_app: Any, redis_url: str) -> Callable[[str], OutboxCelery]:
    """``make_jobs_app(broker_url)``: an app with the tasks of the workers."""

    def make(broker_url: str) -> OutboxCelery:
        app = make_app(broker_url, result_backend=redis_url)
        return tasks.declare(app)

    return make


@pytest.fixture
def start_worker(alias: str, redis_url: str, environment: Any, tmp_path: Path) -> Iterator[Any]:
    """``start_worker(app, pool="prefork", count=4)``: a worker for the messages of an app."""
    workers: list[Worker] = []

    def start(app: OutboxCelery, pool: str = "prefork", count: int = 4) -> Worker:
        name = f"w{len(workers)}@{app.main}"
        worker = Worker.start(
            "tests.receipts.worker",
            f"-n {name} -P {pool} -c {count} -Q {app.conf.task_default_queue}",
            log=tmp_path / f"worker-{len(workers)}.log",
            environment={
                **environment(alias),
                "DJANGO_SETTINGS_MODULE": "tests.receipts.settings",
                "RECEIPTS_APP": app.main,
                "RECEIPTS_BROKER": app.conf.broker_url,
                "RECEIPTS_REDIS": redis_url,
            },
            # gevent replaces what a fork of a prepared process has imported already.
            popen=subprocess.Popen if pool == "gevent" else forking.Popen,
        )
        workers.append(worker)
        return worker

    yield start
    for each in workers:
        each.end()


@pytest.fixture
def draining(alias: str) -> Iterator[None]:
    """A drainer runs in a thread."""
    drainer = Drain(using=alias, interval=0.05)

    def run() -> None:
        try:
            drainer.run()
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    drainer.stop()
    thread.join()


@pytest.fixture
def left(alias: str) -> Callable[[], dict[str, int]]:
    """``left()``: how many rows there are of each table that is not empty."""
    models: list[Any] = [StagedJob, Run, DeadJob, InboxEntry, Incident]

    def read() -> dict[str, int]:
        counts = {each.__name__: each.objects.using(alias).count() for each in models}
        return {name: count for name, count in counts.items() if count}

    return read
