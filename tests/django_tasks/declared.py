"""Tasks of ``django.tasks`` (or its backport), as a project declares them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from uuid import uuid4

import django
from asgiref.sync import sync_to_async
from celery.exceptions import WorkerShutdown, WorkerTerminate
from django.db import transaction

from outbox_app import idempotent
from outbox_app.aliases import outbox_alias

if django.VERSION >= (6,):
    from django.tasks import exceptions, signals, task, task_backends
else:
    from django_tasks import exceptions, signals, task, task_backends

__all__ = ["exceptions", "signals", "task_backends"]


class GreenletExit(BaseException):
    """As gevent raises it; it is told by its name, and gevent may not be installed."""


@task()
def add(x: Any, y: Any = 0) -> Any:
    return x + y


@task()
async def add_async(x: Any, y: Any = 0) -> Any:
    return x + y


@task(takes_context=True)
def attempt(context: Any) -> list[Any]:
    return [context.attempt, context.task_result.id, context.task_result.status]


@task()
def fail(message: str = "no stock") -> None:
    raise ValueError(message)


class Empty(ValueError):
    """It has a length of 0, and so counts as false."""

    def __len__(self) -> int:
        return 0


@task()
def fail_empty() -> None:
    raise Empty


@task()
def leave(code: Any) -> None:
    sys.exit(code)


@task()
def interrupt() -> None:
    raise KeyboardInterrupt


@task()
def end(error: str) -> None:
    raise {each.__name__: each for each in (WorkerShutdown, WorkerTerminate, GreenletExit)}[error]


@task()
def returns_no_json() -> Any:
    return object()


@task()
def large(size: int) -> str:
    return "x" * size


@task()
def effect(label: str) -> str:
    """Write a row on the alias of the outbox; return its name."""
    from django.contrib.auth.models import Group

    return Group.objects.using(outbox_alias()).create(name=f"{label} {uuid4()}").name


@task()
@idempotent
def effect_once(label: str) -> str:
    return effect.func(label)


@task()
@idempotent
async def effect_once_async(label: str) -> str:
    return await sync_to_async(effect.func)(label)


def away() -> None:
    raise ConnectionRefusedError("the mail server is away")


@task()
@idempotent
def effect_and_callback(label: str) -> str:
    transaction.on_commit(away, using=outbox_alias())
    return effect.func(label)


@task()
def die(path: str) -> str:
    """Die at the first attempt, of which the file is the trace."""
    with open(path, "a") as file:
        file.write("attempt\n")
    with open(path) as file:
        if len(file.readlines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def plain() -> None:
    pass


renamed = task()(plain)
