"""The main path with a real broker: jobs are staged with the data, and drained after the commit."""

from __future__ import annotations

import json

import pytest
from django.db import transaction

from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, Incident, Lease, Process, StagedJob
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["redis", "rabbitmq", "memory"])
def broker_url(request):
    if request.param == "memory":
        return "memory://"
    return request.getfixturevalue(f"{request.param}_url")


def received(app, limit=10_000):
    """Take every message from the app's queue."""
    messages = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue](connection.default_channel)
        queue.declare()
        while len(messages) < limit and (message := queue.get(no_ack=True)) is not None:
            messages.append(message)
    return messages


def test_what_is_committed_is_published_and_what_is_rolled_back_is_not(alias, make_app, broker_url):
    app = make_app(broker_url)
    add = app.task(name="add")(tasks.add)

    with transaction.atomic(using=alias):
        for i in range(5):
            add.delay(i, i)
        with transaction.atomic(using=alias):
            add.delay(100, 100)
            transaction.set_rollback(True, using=alias)
    with transaction.atomic(using=alias):
        add.delay(200, 200)
        transaction.set_rollback(True, using=alias)
    assert StagedJob.objects.using(alias).count() == 5

    tally = Drain(using=alias).run(once=True)

    assert (tally.published, tally.dead) == (5, 0)
    sent = sorted(json.loads(message.body)[0] for message in received(app))
    assert sent == [[i, i] for i in range(5)]
    assert not StagedJob.objects.using(alias).exists()
    assert not DeadJob.objects.using(alias).exists()
    assert not Incident.objects.using(alias).exists()
    assert not Process.objects.using(alias).exists()
    assert set(Lease.objects.using(alias).values_list("owner", flat=True)) == {None}


def test_jobs_with_one_key_leave_in_the_order_in_which_they_were_staged(
    alias, make_app, broker_url
):
    app = make_app(broker_url)
    note = app.task(name="note")(tasks.note)
    for i in range(300):
        with transaction.atomic(using=alias):
            note.apply_async((i % 7, i), ordering_key=str(i % 7))

    Drain(using=alias, batch_size=50).run(once=True)

    sent = [json.loads(message.body)[0] for message in received(app)]
    assert len(sent) == 300
    for key in range(7):
        mine = [i for k, i in sent if k == key]
        assert mine == sorted(mine)
