"""The Celery app of the worker processes, and its tasks: each counts in Redis how often it ran."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import redis
from celery import Task
from celery.exceptions import Ignore, Reject

from outbox_app import idempotent
from outbox_app.celery import OutboxCelery

REDIS = os.environ.get("RECEIPTS_REDIS", "redis://")


def client() -> redis.Redis:
    return redis.Redis.from_url(REDIS, decode_responses=True)


def count(label: str) -> int:
    """Count an execution; return the number of executions."""
    with client() as counts:
        return int(counts.incr(f"ran:{label}"))


class Called(Task):
    """A class with a ``__call__`` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count("called")
        return super().__call__(*args, **kwargs)


def declare(app: OutboxCelery) -> OutboxCelery:
    """Declare the tasks, for this app alone."""

    def task(**options: Any) -> Any:
        return app.task(shared=False, **options)

    @task(name="plain")
    def plain(label: str) -> str:
        count(label)
        return label

    @task(name="follow")
    def follow(given: Any, label: str) -> str:
        count(label)
        return label

    @task(name="sent", receipt=0)
    def sent(given: Any, label: str) -> str:
        count(label)
        return label

    @task(name="bound", bind=True)
    def bound(self: Any, label: str) -> str:
        count(label)
        return str(self.request.id)

    @task(name="of_class", base=Called)
    def of_class(label: str) -> None:
        count(label)

    @task(name="of_celery", base=Task)
    def of_celery(label: str) -> None:
        count(label)

    @task(name="fails")
    def fails(label: str) -> None:
        count(label)
        raise ValueError("fails")

    @task(name="retries", bind=True)
    def retries(self: Any, label: str) -> None:
        count(label)
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    @task(name="autoretries", autoretry_for=[ValueError], max_retries=2, default_retry_delay=0)
    def autoretries(label: str) -> None:
        count(label)
        raise ValueError("again")

    @task(name="ignored")
    def ignored(label: str) -> None:
        count(label)
        raise Ignore

    @task(name="rejected", acks_late=True)
    def rejected(label: str) -> None:
        count(label)
        raise Reject("no", requeue=False)

    @task(name="requeued", acks_late=True)
    def requeued(label: str) -> None:
        if count(label) == 1:
            raise Reject("later", requeue=True)

    @task(name="replaced", bind=True)
    def replaced(self: Any, label: str) -> None:
        count(label)
        raise self.replace(plain.s(f"{label}-by"))

    @task(name="soft", soft_time_limit=1)
    def soft(label: str) -> None:
        count(label)
        time.sleep(60)

    @task(name="hard", time_limit=1)
    def hard(label: str) -> None:
        count(label)
        time.sleep(60)

    @task(name="waits")
    def waits(label: str) -> None:
        count(label)
        with client() as signals:
            signals.blpop(f"go:{label}")

    @task(name="once")
    @idempotent
    def once(label: str) -> None:
        count(label)

    @task(name="dies")
    def dies(label: str) -> None:
        if count(label) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @task(name="dies_late", acks_late=True, reject_on_worker_lost=True)
    def dies_late(label: str) -> None:
        if count(label) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @task(name="always_dies", acks_late=True, reject_on_worker_lost=True)
    def always_dies(label: str) -> None:
        count(label)
        os.kill(os.getpid(), signal.SIGKILL)

    return app


app = declare(
    OutboxCelery(
        os.environ.get("RECEIPTS_APP", "receipts"),
        set_as_current=False,
        broker=os.environ.get("RECEIPTS_BROKER", "memory://"),
        backend=REDIS,
    )
)
app.conf.task_default_queue = app.main
