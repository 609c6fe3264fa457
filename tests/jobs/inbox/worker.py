"""Tasks with an effect, deliveries of them, and the Celery app of the worker processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import redis
from celery.app.trace import build_tracer
from django.db import transaction

from outbox_app import idempotent
from outbox_app.aliases import outbox_alias
from outbox_app.celery import OutboxCelery
from outbox_app.jobs import inbox


def effect(label: str) -> str:
    """Write a row on the alias of the outbox; return its name."""
    from django.contrib.auth.models import Group

    return Group.objects.using(outbox_alias()).create(name=f"{label} {uuid4()}").name


@dataclass
class Delivery:
    """What a worker makes of a message."""

    state: str
    value: Any


def deliver(task: Any, job_id: str, *args: Any, **request: Any) -> Delivery:
    """Execute a task as a worker does when it takes a message."""
    request = {
        "id": job_id,
        "task": task.name,
        "args": args,
        "kwargs": {},
        "retries": 0,
        "delivery_info": {},
        "is_eager": False,
        **request,
    }
    value, info, *_ = build_tracer(task.name, task, app=task.app)(job_id, args, {}, request)
    return Delivery(info.state, info.retval) if info else Delivery("SUCCESS", value)


# What follows is executed in worker processes, which tests/jobs/inbox/test_worker.py starts.

REDIS = os.environ.get("INBOX_REDIS", "redis://")
BROKER = os.environ.get("INBOX_BROKER", "memory://")
app = OutboxCelery("inbox-worker", set_as_current=False, broker=BROKER, backend=REDIS)
app.conf.task_default_queue = os.environ.get("INBOX_QUEUE", "inbox")
task = partial(app.task, shared=False)


def client() -> redis.Redis:
    """The broker's database, in which tasks and tests talk to each other."""
    return redis.Redis.from_url(REDIS, decode_responses=True)


@task(name="work")
@idempotent
def work(label: str) -> str:
    return effect(label)


@task(name="follow")
@idempotent
def follow(given: str) -> str:
    return effect(f"followed:{given.partition(' ')[2]}")


@task(name="dies_inside", acks_late=True, reject_on_worker_lost=True)
@idempotent
def dies_inside(label: str) -> str:
    name = effect(label)
    if client().incr("attempts") == 1:
        die()
    return name


@task(name="hangs_inside", acks_late=True)
@idempotent
def hangs_inside(label: str) -> str:
    name = effect(label)
    if client().incr("attempts") == 1:
        client().blpop("nothing")
    return name


@task(name="dies_after", acks_late=True, reject_on_worker_lost=True)
@idempotent
def dies_after(label: str) -> str:
    name = effect(label)
    client().rpush("names", name)
    transaction.on_commit(die, using=outbox_alias(), robust=True)
    return name


@task(name="dies_before_callback", acks_late=True, reject_on_worker_lost=True)
@idempotent
def dies_before_callback(label: str) -> str:
    name = effect(label)
    inbox.CALLBACK_SECONDS = 0  # another delivery does not wait for this process
    transaction.on_commit(die, using=outbox_alias(), robust=True)
    transaction.on_commit(partial(client().rpush, "mails", name), using=outbox_alias())
    return name


def die() -> None:
    """The effects are committed, and Celery has not heard of it."""
    os.kill(os.getpid(), signal.SIGKILL)
