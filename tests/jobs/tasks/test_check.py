"""``manage.py check``: entries of TASKS that cannot work, and entries without findings."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.celery import OutboxCelery
from tests.jobs.tasks.conftest import BACKEND
from tests.jobs.tasks.declared import add, task_backends


def ids() -> list[str]:
    return [str(message.id) for message in task_backends["default"].check()]


@pytest.mark.usefixtures("backend")
def test_a_good_configuration() -> None:
    assert ids() == []


@pytest.mark.parametrize(
    ("creates", "found"), [(True, ["outbox.W043"]), (False, ["outbox.E049"])], ids=["", "refused"]
)
@pytest.mark.usefixtures("backend")
def test_queues_that_the_app_does_not_declare(
    app: OutboxCelery, creates: bool, found: list[str]
) -> None:
    app.conf.update(task_create_missing_queues=creates, task_queues={"others": {}})
    assert ids() == found
    [message] = task_backends["default"].check()
    assert "has the queues mails, which" in message.msg
    app.conf.task_queues = {"mails": {}}
    assert ids() == []


def test_options(backend: Any, settings: Any) -> None:
    settings.TASKS = {"default": {**BACKEND, "OPTIONS": {"RETRIES": 3}}}
    assert ids() == ["outbox.W042"]


def test_priorities_on_rabbitmq(backend: Any, app: OutboxCelery) -> None:
    app.conf.update(broker_url="amqp://", broker_write_url="amqp://")
    assert ids() == []  # no task has one
    add.using(priority=5)
    add.using(queue_name="mails")  # another one without does not change that
    assert ids() == ["outbox.W044"]
    app.conf.task_queue_max_priority = 10
    assert ids() == []
