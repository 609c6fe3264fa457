"""What the page on development says of queries and of a laptop without a drainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.celery import OutboxCelery
from outbox_app.models import Process, StagedJob

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/in-development.md").read_text()


@pytest.fixture
def app() -> Any:
    app = OutboxCelery(
        "tests.in_development", broker="memory://in-development", set_as_current=False
    )
    app.conf.task_default_queue = "in-development"
    yield app
    app.close()


def numbered(number: int) -> None: ...


def waiting_in_the_broker(app: Celery) -> int:
    with app.connection_for_write() as broker:
        return int(broker.default_channel.queue_declare("in-development").message_count)


@pytest.mark.django_db
def test_each_call_inside_a_transaction_is_one_query(app: Any) -> None:
    task = app.task(name="in_development.query")(numbered)
    with transaction.atomic():
        task.delay(0)  # what a process does once
        with CaptureQueriesContext(connection) as queries:
            task.delay(1)
            task.delay(2)
    assert [re.match(r"\w+", query["sql"]).group() for query in queries] == ["INSERT"] * 2  # type: ignore[union-attr]


@pytest.mark.django_db(transaction=True)
def test_with_immediate_delivery_no_drainer_has_to_run(app: Any, settings: Any) -> None:
    """The four kinds that wait are those of the page on immediate delivery, and of its tests."""
    [setting] = re.findall(r"^OUTBOX = (\{.*\})$", PAGE, re.MULTILINE)
    settings.OUTBOX = {**settings.OUTBOX, **eval(setting)}
    task = app.task(name="in_development.sent")(numbered)
    with transaction.atomic():
        task.delay(1)
    assert (waiting_in_the_broker(app), StagedJob.objects.count()) == (1, 0)
    with transaction.atomic():
        task.apply_async((2,), countdown=1)
        task.apply_async((3,), ordering_key="shop.order:3")
    assert (waiting_in_the_broker(app), StagedJob.objects.count()) == (1, 2)
    assert not Process.objects.exists()
