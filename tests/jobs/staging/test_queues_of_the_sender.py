"""The drain declares a queue that only the sender's process knows, as the sender did."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import transaction
from kombu import Exchange, Queue

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.message import Message
from outbox_app.models import StagedJob

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def process(broker_url):
    """``process()``: the app in another process of the project, one process at a time."""
    name, apps = f"app-{uuid4().hex[:12]}", []

    def start(**conf):
        for app in apps:
            app.close()
        app = OutboxCelery(name, broker=broker_url, set_as_current=False)
        app.conf.update(task_default_queue=name, **conf)
        apps.append(app)
        return app

    yield start
    apps[-1].close()


def added(name):
    return Queue(
        name,
        Exchange(f"{name}.x", "topic"),
        "orders.#",
        queue_arguments={"x-max-length": 5},
        max_priority=3,
    )


def limited(name):  # to kombu it equals the one that Celery makes of a name it does not know
    return Queue(name, Exchange(name), name, max_length=5)


@pytest.mark.parametrize("make", [added, limited])
def test_a_queue_added_at_run_time(make, alias, process, broker_url):
    sender = process()
    name = f"{sender.main}.own"
    sender.amqp.queues.add(make(name))
    with transaction.atomic(using=alias):
        key = "orders.new" if make is added else name
        sender.send_task("add", (1, 2), queue=name, routing_key=key)

    drainer = process()
    tally = Drain(using=alias).run(once=True)
    assert (tally.published, tally.dead) == (1, 0)

    with drainer.connection_for_read() as connection:
        # Where it was declared otherwise, RabbitMQ refuses the worker's declaration with 406.
        queue = make(name)(connection.default_channel)
        queue.declare()
        message = queue.get(no_ack=True)
        queue.delete()
        queue.exchange.delete()
    assert message.payload[0] == [1, 2]


@pytest.mark.parametrize("alias", ["default"], indirect=True)
@pytest.mark.parametrize("broker_url", ["redis"], indirect=True)
def test_what_the_configuration_makes_is_kept_by_name(alias, process):
    app = process(task_queues=None)
    configured = added(f"{app.main}.configured")
    app = process(task_queues=[Queue(app.main), configured], task_create_missing_queues=True)
    with transaction.atomic(using=alias):
        for queue in (None, configured.name, "missing", Queue("missing", max_priority=3)):
            app.send_task("add", (1, 2), queue=queue)

    rows = StagedJob.objects.using(alias).order_by("id")
    declared = [Message.loads(row.envelope).declare for row in rows]
    assert declared[:3] == [[app.main], [configured.name], ["missing"]]
    [[whole]] = declared[3:]
    assert whole["queue"]["max_priority"] == 3
