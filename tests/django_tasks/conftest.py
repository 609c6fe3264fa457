"""A Celery app, which is the current one, and the backend in the setting TASKS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import _state

from outbox_app.celery import OutboxCelery
from tests.jobs.inbox.worker import Delivery, deliver

BACKEND = {"BACKEND": "outbox_app.django_tasks.OutboxBackend", "QUEUES": ["default", "mails"]}


@pytest.fixture
def current() -> Iterator[Callable[[Any], None]]:
    """``current(app)``: make an app the current one, for shared tasks, until the test ends."""
    before = _state._tls.current_app
    yield lambda app: app.set_current()
    _state._set_current_app(before)


@pytest.fixture
def app(make_app: Any, current: Any) -> OutboxCelery:
    app: OutboxCelery = make_app()
    current(app)
    return app


@pytest.fixture
def backend(settings: Any, app: OutboxCelery) -> Any:
    """The backend "default". Its Celery app uses an in-memory broker."""
    from tests.django_tasks.declared import task_backends

    settings.TASKS = {"default": BACKEND}
    return task_backends["default"]


@pytest.fixture
def run(backend: Any, app: OutboxCelery) -> Callable[..., Delivery]:
    """``run(result)``: handle the message of a result as a worker does."""

    def run(result: Any, **request: Any) -> Delivery:
        task = app.tasks["outbox_app.run_task"]
        return deliver(task, result.id, result.id, hostname="worker@here", **request)

    return run
