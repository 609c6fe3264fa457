"""The message that a worker receives equals that of plain Celery, for every way to route it."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from celery import Celery
from django.db import transaction
from django.utils import timezone
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests.jobs.staging import message_equality

pytestmark = pytest.mark.django_db(transaction=True, databases=["default"])

# Nobody else's queues are touched, nor those of a run at the same time.
OWN = f"outbox-{uuid4().hex[:8]}"
TOPICS = Exchange(f"{OWN}.topics", "topic")
NEWS = Queue(f"{OWN}.news", TOPICS, "news.#")
FANOUT = Queue(f"{OWN}.fan", Exchange(f"{OWN}.fans", "fanout"))
DIRECT = Queue(f"{OWN}.direct", Exchange(f"{OWN}.directs", "direct"), "key")
BROADCAST = Broadcast(f"{OWN}.all", queue=f"{OWN}.all.1")
BUILTIN = Queue(f"{OWN}.builtin", Exchange("amq.topic", "topic"), "news.#")
OTHER = Queue(f"{OWN}.other", Exchange(f"{OWN}.other"), f"{OWN}.other")
ADHOC = Queue(
    f"{OWN}.adhoc",
    Exchange(f"{OWN}.adhocs", "topic", delivery_mode=1),
    "a.b",
    bindings=[binding(TOPICS, "x.*")],
    queue_arguments={"x-max-length": 100},
    max_priority=5,
    expires=60.0,
)


# What is sent, with which configuration, and the queues that it may reach beside the default one.
ROUTES = {
    "queue by name": (lambda t: t.add.apply_async((2, 2), queue=OTHER.name), {}),
    "queue by name with options": (
        lambda t: t.add.apply_async((2, 2), queue=OTHER.name, routing_key="k"),
        {},
    ),
    "queue object": (lambda t: t.add.apply_async((2, 2), queue=ADHOC), {}),
    "queue object with a key": (
        lambda t: t.add.apply_async((2, 2), queue=ADHOC, routing_key="a.b"),
        {},
    ),
    "direct queue object": (lambda t: t.add.apply_async((2, 2), queue=DIRECT), {}),
    "declare": (
        lambda t: t.add.apply_async(
            (2, 2), exchange=TOPICS, routing_key="news.today", declare=[NEWS, TOPICS]
        ),
        {},
    ),
    "task_queues with a topic": (
        lambda t: t.add.apply_async((2, 2), queue=NEWS.name, routing_key="news.sports"),
        {"task_queues": [NEWS], "task_default_queue": NEWS.name},
    ),
    "task_queues with a fanout": (
        lambda t: t.add.apply_async((2, 2), queue=FANOUT.name),
        {"task_queues": [FANOUT], "task_default_queue": FANOUT.name},
    ),
    "task_routes": (
        lambda t: t.add.delay(2, 2),
        {"task_routes": {"add": {"queue": OTHER.name, "priority": 7}}},
    ),
    "task_routes by a function": (
        lambda t: t.add.delay(2, 2),
        {"task_routes": [lambda name, *args, **kwargs: {"queue": OTHER.name}]},
    ),
    "task_default_priority": (lambda t: t.add.delay(2, 2), {"task_default_priority": 4}),
    "task_queue_max_priority": (
        lambda t: t.add.apply_async((2, 2), priority=9),
        {"task_queue_max_priority": 9},
    ),
    "task_default_delivery_mode": (
        lambda t: t.add.delay(2, 2),
        {"task_default_delivery_mode": "transient"},
    ),
    "task_serializer": (lambda t: t.add.delay({2}, 2), {"task_serializer": "pickle"}),
    "task_compression": (lambda t: t.add.delay(2, 2), {"task_compression": "zlib"}),
    "task_ignore_result": (lambda t: t.add.delay(2, 2), {"task_ignore_result": True}),
    "task_default_exchange": (
        lambda t: t.add.delay(2, 2),
        {
            "task_default_exchange": f"{OWN}.default",
            "task_default_exchange_type": "topic",
            "task_default_routing_key": "news.default",
        },
    ),
    "timezone": (
        lambda t: t.add.apply_async((2, 2), countdown=100),
        {"timezone": "Europe/Berlin", "enable_utc": False},
    ),
}

# Celery declares nothing for these, and where it has not, Redis knows no such exchange.
UNDECLARED = {
    "exchange object": (
        lambda t: t.add.apply_async((2, 2), exchange=TOPICS, routing_key="news.today"),
        {},
    ),
    "exchange by name": (
        lambda t: t.add.apply_async(
            (2, 2), exchange=TOPICS.name, exchange_type="topic", routing_key="news.today"
        ),
        {},
    ),
    "exchange of the broker's own": (
        lambda t: t.add.apply_async(
            (2, 2), exchange=BUILTIN.exchange, routing_key="news.today", declare=[BUILTIN.exchange]
        ),
        {},
    ),
    "Broadcast": (
        lambda t: t.add.apply_async((2, 2), queue=f"{OWN}.all"),
        {"task_queues": [BROADCAST]},
    ),
}


@pytest.mark.parametrize(("send", "conf"), ROUTES.values(), ids=ROUTES)
def test_route(send, conf, assert_equal):
    assert_equal(send, queues=(NEWS, ADHOC, DIRECT, OTHER), **conf)


@pytest.mark.parametrize("broker_url", ["rabbitmq"], indirect=True)
@pytest.mark.parametrize(("send", "conf"), UNDECLARED.values(), ids=UNDECLARED)
def test_route_to_an_exchange_that_is_there(send, conf, assert_equal):
    assert_equal(send, queues=(NEWS, OTHER, BUILTIN), **conf)


@pytest.mark.parametrize("broker_url", ["rabbitmq"], indirect=True)
@pytest.mark.parametrize("option", ["countdown", "eta"])
def test_a_delayed_job_of_a_quorum_queue_is_held_for_its_plain_route(option, broker_url, inbox):
    """Celery would freeze the delay into the route; the rest of the message is the same."""
    name = f"{OWN}.quorum"
    quorum = Queue(name, Exchange(name, "topic"), name, queue_arguments={"x-queue-type": "quorum"})
    native = Queue(f"{name}.native", Exchange("celery_delayed_27", "topic"), f"#.{name}")
    inbox.declare([quorum, native])
    options = {"name": name, "now": timezone.now(), "task_queues": [quorum]}
    delay = {"countdown": 100, "eta": options["now"] + timedelta(seconds=100)}

    twin = message_equality.twin(Celery, broker_url, **options)
    twin.add.apply_async((1, 2), **{option: delay[option]})
    (expected,) = message_equality.normalised(inbox.received())
    assert expected["properties"].pop("delivery_info")["exchange"] == "celery_delayed_27"
    twin.close()

    twin = message_equality.twin(OutboxCelery, broker_url, **options)
    with transaction.atomic():
        twin.add.apply_async((1, 2), **{option: delay[option]})
    job = StagedJob.objects.get()
    assert job.available_at == delay["eta"], "held, though it is due before HOLD_HORIZON"
    StagedJob.objects.update(available_at=timezone.now() - timedelta(seconds=1))
    Drain().run(once=True)
    (got,) = message_equality.normalised(inbox.received())
    twin.close()

    route = got["properties"].pop("delivery_info")
    assert route == {"exchange": name, "routing_key": name}
    assert {**got, "queue": None} == {**expected, "queue": None}
