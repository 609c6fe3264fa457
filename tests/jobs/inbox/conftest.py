"""Fixtures of the inbox's tests: deliveries as a worker makes them, and effects to count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from django.contrib.auth.models import Group

from outbox_app.models import InboxEntry
from tests.jobs.inbox.worker import Delivery, deliver


@pytest.fixture
def app(make_app: Callable[..., Celery]) -> Celery:
    """An OutboxCelery with a result backend, so that tasks store their results."""
    return make_app("memory://", result_backend="cache+memory://")


@pytest.fixture
def task(app: Celery) -> Callable[..., Any]:
    """``app.task``, for this app alone (by default Celery adds a task to all other apps).

    The task is created at once, as in a worker: Celery's lazy tasks are not thread-safe.
    """
    return partial(app.task, shared=False, lazy=False)


@pytest.fixture
def twice() -> Callable[..., tuple[Delivery, Delivery]]:
    """``twice(task, *args, **request)``: deliver one message twice, one after the other."""

    def run(task: Any, *args: Any, **request: Any) -> tuple[Delivery, Delivery]:
        job_id = str(uuid4())
        return deliver(task, job_id, *args, **request), deliver(task, job_id, *args, **request)

    return run


@pytest.fixture
def effects(alias: str) -> Callable[[], list[str]]:
    """``effects()``: the rows that tasks have written, without their unique suffixes."""

    def read() -> list[str]:
        names = Group.objects.using(alias).values_list("name", flat=True)
        return sorted(name.partition(" ")[0] for name in names)

    return read


@pytest.fixture
def noted(alias: str) -> Callable[[], list[str]]:
    """``noted()``: the job ids in the inbox."""
    return lambda: sorted(InboxEntry.objects.using(alias).values_list("job_id", flat=True))
