"""Fixtures of the machine."""

from __future__ import annotations

import pytest
from celery.signals import after_task_publish

from tests import tasks

from .brokers import QUEUE, SwitchedBatch
from .model_state import Stage


@pytest.fixture(autouse=True)
def receiver():
    """Connect a receiver to ``after_task_publish``, so that the drain sends the signal."""

    def receive(**kwargs):
        pass

    after_task_publish.connect(receive)
    yield
    after_task_publish.disconnect(receive)


@pytest.fixture
def make_stage(alias, make_app, monkeypatch):
    monkeypatch.setattr("outbox_app.jobs.drain.publisher.RedisBatch", SwitchedBatch)

    def make(url, transport, reset=lambda refuses: None):
        apps = [
            make_app(
                url,
                broker_transport=f"tests.machine.brokers:{transport}",
                task_default_queue=QUEUE,
            )
            for _ in range(2)
        ]
        # By name, as drainers go through them, so that runs repeat.
        apps.sort(key=lambda app: app.main)
        tasks_ = [app.task(name=f"note-{i}")(tasks.note) for i, app in enumerate(apps)]
        return Stage(
            alias,
            tasks_,
            reset,
            concurrent_writers=alias != "default",
        )

    return make
