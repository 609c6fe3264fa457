"""``manage.py check``: entries of TASKS that cannot work, and entries without findings."""

from __future__ import annotations

import pytest

from outbox_app.celery import OutboxCelery
from tests.django_tasks.declared import task_backends


def ids() -> list[str]:
    return [str(message.id) for message in task_backends["default"].check()]


@pytest.mark.usefixtures("backend")
def test_a_good_configuration() -> None:
    assert ids() == []


@pytest.mark.usefixtures("backend")
def test_queues_that_the_app_does_not_declare(app: OutboxCelery) -> None:
    app.conf.task_queues = {"others": {}}
    assert ids() == ["outbox.W043"]
    [message] = task_backends["default"].check()
    assert "has the queues mails, which" in message.msg
    app.conf.task_queues = {"mails": {}}
    assert ids() == []
