"""Fixtures of the intake's tests: brokers to look into, and the drain in one call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from django.db import transaction
from django.utils import timezone
from kombu import Queue

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests.jobs.staging import message_equality, tasks


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def inbox(broker_url: str) -> Iterator[message_equality.Inbox]:
    """Reads messages from the broker."""
    made = (
        message_equality.RedisInbox
        if broker_url.startswith("redis")
        else message_equality.RabbitInbox
    )(broker_url)
    yield made
    made.close()


@pytest.fixture
def assert_equal(
    broker_url: str, inbox: message_equality.Inbox
) -> Callable[..., list[dict[str, Any]]]:
    """``assert_equal(send, using=…, **conf)``: the drained messages equal those of plain Celery.

    ``send`` is called with each twin. Returns the messages, in order.
    """

    def check(
        send: Callable[[message_equality.Twin], Any],
        *,
        using: str = "default",
        queues: tuple[Queue, ...] = (),
        classes: tuple[type[Celery], type[Celery]] = (Celery, OutboxCelery),
        **conf: Any,
    ) -> list[dict[str, Any]]:
        options = {"name": f"app-{uuid4().hex[:12]}", "now": timezone.now(), **conf}
        twin = message_equality.twin(classes[0], broker_url, **options)
        inbox.declare([*twin.app.amqp.queues.values(), *queues])
        send(twin)
        expected = message_equality.normalised(inbox.received())
        assert expected, "plain Celery sent nothing"
        twin.close()

        twin = message_equality.twin(classes[1], broker_url, **options)
        with transaction.atomic(using=using):
            send(twin)
        assert not inbox.received()
        jobs = StagedJob.objects.using(using).order_by("id")
        ids = list(jobs.values_list("task_id", flat=True))
        assert len(ids) == len(expected)
        tally = Drain(using=using).run(once=True)
        assert (tally.published, tally.dead) == (len(expected), 0)
        received = inbox.received()  # without a key they may overtake one another
        if len(ids) > 1:
            received.sort(key=lambda message: ids.index(message["properties"]["correlation_id"]))
        got = message_equality.normalised(received)
        twin.close()
        assert got == expected
        return got

    return check


@pytest.fixture
def app(make_app: Callable[..., Any]) -> Any:
    """An OutboxCelery with a broker and a result backend in memory."""
    return make_app("memory://", result_backend="cache+memory://")


@pytest.fixture
def add(app: Any) -> Any:
    """The task ``add`` of ``app``."""
    return app.task(name="add", shared=False)(tasks.add)


@pytest.fixture
def plain(make_app: Callable[..., Any]) -> Iterator[Celery]:
    """A Celery app without the outbox; ``make_app`` removes its messages after the test."""
    app = Celery("plain", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = "plain"
    yield app
    app.close()


@pytest.fixture
def plain_add(plain: Celery) -> Any:
    """The task ``add`` of ``plain``."""
    return plain.task(name="add", shared=False)(tasks.add)


@pytest.fixture
def sent_by() -> Callable[[Any], list[Any]]:
    """``sent_by(app)``: the arguments of the messages that the app has sent without a row."""

    def take(app: Any) -> list[Any]:
        found = []
        with app.connection_for_read() as connection:
            queue = app.amqp.default_queue(connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message.payload[0])
        return found

    return take


@pytest.fixture
def sent(app: Any, sent_by: Callable[[Any], list[Any]]) -> Callable[[], list[Any]]:
    """``sent()``: the same for the fixture ``app``."""
    return partial(sent_by, app)


@pytest.fixture
def staged(alias: str) -> Callable[[], list[Any]]:
    """``staged()``: the arguments of the jobs in the table on ``alias``, in order."""

    def read() -> list[Any]:
        jobs = StagedJob.objects.using(alias).order_by("id")
        return [json.loads(bytes(job.body))[0] for job in jobs]

    return read
