"""Real workers on Redis: a message that arrives twice, and a worker killed in a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
from celery import chain
from django.db import transaction

from outbox_app.celery import OutboxCelery
from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import CallbackFailed
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, StagedJob
from tests.celery_worker import Worker
from tests.jobs.brokers.redis_proxy import RedisProxy
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app(make_app: Callable[..., OutboxCelery], redis_url: str) -> OutboxCelery:
    """The app that sends; its results are in Redis."""
    return make_app(redis_url, result_backend=redis_url)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A Redis client, by which tasks and tests communicate."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def start_worker(
    alias: str,
    redis_url: str,
    environment: Callable[[str], dict[str, str]],
    tmp_path: Path,
) -> Iterator[Callable[[OutboxCelery], Worker]]:
    """``start_worker(app)``: a worker with two processes, for the messages of the app."""
    workers: list[Worker] = []

    def start(app: OutboxCelery) -> Worker:
        queue = app.conf.task_default_queue
        worker = Worker.start(
            "tests.jobs.inbox.worker",
            f"-c2 -Q {queue}",
            log=tmp_path / f"worker-{len(workers)}.log",
            environment={
                **environment(alias),
                "INBOX_BROKER": app.conf.broker_url,
                "INBOX_QUEUE": queue,
                "INBOX_REDIS": redis_url,
            },
        )
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture
def worker(start_worker: Callable[[OutboxCelery], Worker], app: OutboxCelery) -> Worker:
    """A worker for ``app``."""
    return start_worker(app)


def publish_twice(app: OutboxCelery, name: str, *args: Any) -> str:
    """Publish one message twice; return its job id."""
    job_id = str(uuid4())
    message = app.amqp.as_task_v2(job_id, name, args)
    with app.producer_pool.acquire() as producer:
        for _ in range(2):
            app.amqp.send_task_message(producer, name, message)
    return job_id


def until(condition: Callable[[], bool], worker: Worker) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + patience(60)
    while not condition():
        assert time.monotonic() < deadline, worker.log.read_text()
        time.sleep(0.05)


def until_repeated(worker: Worker, *, times: int) -> None:
    """Return when the worker has been given so many jobs whose effects were there."""
    until(lambda: worker.log.read_text().count("Job was handled already") >= times, worker)


def test_a_message_that_arrives_twice_is_executed_once(app, worker, effects, noted):
    jobs = [publish_twice(app, "work", f"work{i}") for i in range(20)]

    until_repeated(worker, times=20)
    assert effects() == sorted(f"work{i}" for i in range(20))
    assert noted() == sorted(jobs)


def test_its_processes_say_together_that_no_drainer_runs(alias, app, worker, client, effects):
    """See ``monitoring.no_drainer``: the pool has two processes, and one of them says it."""
    with transaction.atomic(using=alias):
        app.send_task("work", ("waits",))
    long_ago = DatabaseNow() - timedelta(minutes=2)
    StagedJob.objects.using(alias).update(staged_at=long_ago)
    for i in range(20):
        app.send_task("work", (f"work{i}",))

    until(lambda: len(effects()) == 20, worker)
    until(lambda: "No drainer runs" in worker.log.read_text(), worker)
    [line] = [each for each in worker.log.read_text().splitlines() if "No drainer runs" in each]
    assert "WARNING/ForkPoolWorker-" in line


def test_a_job_that_is_drained_twice_is_executed_once(alias, app, worker, effects):
    """As after a drainer that was killed between publishing a row and deleting it."""
    with transaction.atomic(using=alias):
        result = app.send_task("work", ("work",))
    row = StagedJob.objects.using(alias).get()
    assert Drain(using=alias).run(once=True).published == 1
    row.save(using=alias, force_insert=True)
    assert Drain(using=alias).run(once=True).published == 1

    until_repeated(worker, times=1)
    assert result.get(timeout=patience(60)).startswith("work ")
    assert effects() == ["work"]


def test_a_process_killed_inside_the_task(app, worker, client, effects, noted):
    """The worker's main process notices, and gives the message back."""
    result = app.send_task("dies_inside", ("work",))

    assert result.get(timeout=patience(60)).startswith("work ")
    assert client.get("attempts") == "2"
    assert (effects(), noted()) == (["work"], [result.id])


def test_a_whole_worker_killed_inside_the_task(
    make_app, start_worker, rabbitmq_url, redis_url, client, effects, noted
):
    """RabbitMQ notices, and gives the message to the next worker."""
    app = make_app(rabbitmq_url, result_backend=redis_url)
    worker = start_worker(app)
    result = app.send_task("hangs_inside", ("work",))
    until(lambda: client.get("attempts") == "1", worker)
    worker.kill()
    start_worker(app)

    assert result.get(timeout=patience(60)).startswith("work ")
    assert client.get("attempts") == "2"
    assert (effects(), noted()) == (["work"], [result.id])


def test_a_process_killed_after_the_commit(app, worker, client, effects, noted):
    """Celery never heard of the first result, but a chain goes on with it."""
    result = chain(app.signature("dies_after", ("work",)), app.signature("follow")).apply_async()

    followed = result.get(timeout=patience(60))
    [name] = client.lrange("names", 0, -1)
    label = f"followed:{name.partition(' ')[2]}"
    assert result.parent.get(timeout=patience(60)) == name
    assert followed.startswith(label)
    assert effects() == [label, "work"]
    assert noted() == sorted([result.parent.id, result.id])


def test_what_kombu_loses_between_redis_and_a_worker(
    alias, app, make_app, start_worker, redis_url, client, effects, noted
):
    """A worker is killed after Redis has given it a message, and before it has read the answer.

    kombu records a message as unacknowledged only then, so it is nowhere: see not-promised.md. The
    trace of such a job has the drainer's LPUSH, and nothing of the worker.
    """
    queue = app.conf.task_default_queue

    def execute(label: str) -> str:
        with transaction.atomic(using=alias):
            job = app.send_task("work", (label,))
        assert Drain(using=alias).run(once=True).published == 1
        return job.id

    def has(job_id: str) -> list[str]:
        return [line["command"].split()[0] for line in trace if job_id in line["command"]]

    def kill(command: str, reply: bytes) -> bool:
        if is_taken := command == "BRPOP" and b"correlation_id" in reply:
            victim.kill()
        return is_taken

    address = urlsplit(redis_url)
    with RedisProxy(address.hostname, address.port) as way, client.monitor() as monitor:
        url = redis_url.replace(f":{address.port}", f":{way.port}")
        victim = start_worker(make_app(url, task_default_queue=queue))
        until(lambda: "ready." in victim.log.read_text(), victim)
        way.swallows = kill
        lost = execute("lost")
        until(lambda: victim.process.poll() is not None, victim)
        survivor = start_worker(app)
        found = execute("found")
        until(lambda: noted() == [found] and not client.hlen("unacked"), survivor)
        client.echo("end")
        trace = list(takewhile(lambda line: line["command"] != "ECHO end", monitor.listen()))

    assert effects() == ["found"]
    assert not StagedJob.objects.using(alias).exists()
    assert not DeadJob.objects.using(alias).exists()
    assert not client.llen(queue)
    assert has(lost) == ["LPUSH"]
    assert has(found)[:2] == ["LPUSH", "HSET"]


def test_a_process_killed_between_the_commit_and_a_callback(app, worker, client, effects, noted):
    """The next delivery cannot run the callback. It does not succeed as if it had."""
    result = app.send_task("dies_before_callback", ("work",))

    with pytest.raises(CallbackFailed, match=r"rpush.*does not run again.*delay\(\)"):
        result.get(timeout=patience(60))
    assert result.state == "FAILURE"
    assert not client.exists("mails")
    assert (effects(), noted()) == (["work"], [result.id])
    assert "Job was handled already" in worker.log.read_text()
