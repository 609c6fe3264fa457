"""Celery's own signals and events: before_task_publish when staging, all others in the drain."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from celery import Celery, group
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction
from django.utils import timezone
from kombu import Exchange, Queue

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.message import Message
from outbox_app.models import StagedJob
from tests.jobs.staging import message_equality

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def heard():
    """``heard``: the calls of the two signals' receivers since the test began."""
    calls = []

    def before(sender, headers, **kwargs):
        calls.append(("before", sender, kwargs["routing_key"]))
        headers["trace"] = f"00-{len(calls)}"

    def after(sender, body, headers, exchange, routing_key, **kwargs):
        calls.append(("after", sender, body[0], headers["trace"], exchange, routing_key))

    before_task_publish.connect(before)
    after_task_publish.connect(after)
    yield calls
    before_task_publish.disconnect(before)
    after_task_publish.disconnect(after)


def test_before_fires_while_staging_and_after_in_the_drain(alias, app, add, heard):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        group(add.s(2, 2), add.s(3, 3)).delay()
        assert heard == [("before", "add", app.main)] * 3

    stored = [Message.loads(job.envelope) for job in StagedJob.objects.using(alias).order_by("id")]
    assert [message.headers["trace"] for message in stored] == ["00-1", "00-2", "00-3"]
    Drain(using=alias).run(once=True)
    assert sorted(heard[3:]) == [
        ("after", "add", (i, i), f"00-{i}", "", app.main) for i in range(1, 4)
    ]


#: Options of apply_async, and what the receiver gets: what Celery gives, or the body's bytes.
BODIES = {
    "json": ({}, True),
    "compressed": ({"compression": "zlib"}, True),
    "yaml": ({"serializer": "yaml"}, True),
    "links": ({"link": Celery("links", set_as_current=False).signature("a", (1,))}, True),
    "pickle": ({"serializer": "pickle"}, False),
    "compressed pickle": ({"serializer": "pickle", "compression": "bzip2"}, False),
}


@pytest.mark.parametrize(("options", "is_decoded"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_after_has_the_body_as_celery_gives_it(options, is_decoded, alias):
    bodies = []

    def after(sender, body, **kwargs):
        bodies.append(body)

    after_task_publish.connect(after)
    try:
        for cls in (Celery, OutboxCelery):
            twin = message_equality.twin(
                cls, "memory://", f"outbox-{uuid4().hex[:8]}", now=timezone.now()
            )
            with transaction.atomic(using=alias):
                twin.add.apply_async((1, 2), {}, task_id="t", **options)
            Drain(using=alias).run(once=True)
            twin.close()
    finally:
        after_task_publish.disconnect(after)

    expected, got = bodies
    if is_decoded:
        assert type(got) is type(expected)
        assert got[0] == (1, 2)
        as_lists = [json.dumps(body, sort_keys=True) for body in (got, expected)]
        assert as_lists[0] == as_lists[1]
    else:
        assert isinstance(got, bytes)


@pytest.mark.parametrize("alias", ["default"])
def test_a_receiver_that_sends_is_staged_as_any_other_call(alias, app, add, staged, sent):
    note = app.signature("note", (0, 0))

    def receiver(sender, **kwargs):
        if sender == "add":
            group(note.clone(), note.clone()).delay()
            assert app.producer_pool.limit

    before_task_publish.connect(receiver)
    try:
        with transaction.atomic(using=alias):
            add.delay(1, 1)
    finally:
        before_task_publish.disconnect(receiver)

    assert sorted(staged()) == [[0, 0], [0, 0], [1, 1]]
    assert not sent()


def events(inbox):
    """Take the task-sent events, without what differs from one event to the next."""
    found = []
    for message in inbox.received():
        content = json.loads(message["body"])
        if isinstance(content, dict):
            for name in ("uuid", "root_id", "timestamp", "clock", "local_received"):
                content.pop(name, None)
            found.append(content)
    return found


@pytest.mark.parametrize("alias", ["default"])
def test_the_task_sent_event_is_sent_once_and_by_the_drain(alias, broker_url, inbox):
    name = f"outbox-{uuid4().hex[:8]}"
    conf = {"task_send_sent_event": True, "event_exchange": f"{name}.events"}
    inbox.declare(
        [
            Queue(name, Exchange(name), name),
            Queue(f"{name}.sent", Exchange(f"{name}.events", "topic"), "task.sent"),
        ]
    )

    def send(twin):
        twin.add.delay(1, 2)
        twin.add.apply_async((3, 4), queue=name, countdown=9, expires=3000)

    options = {"name": name, "now": timezone.now(), **conf}
    plain = message_equality.twin(Celery, broker_url, **options)
    send(plain)
    expected = events(inbox)
    plain.close()
    staging = message_equality.twin(OutboxCelery, broker_url, **options)
    with transaction.atomic(using=alias):
        send(staging)
    assert not events(inbox)
    assert StagedJob.objects.using(alias).count() == 2
    Drain(using=alias).run(once=True)

    assert sorted(map(str, events(inbox))) == sorted(map(str, expected))
    assert len(expected) == 2
    staging.close()
