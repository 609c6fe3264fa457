"""Jobs die, are requeued, and leave, by a real drain."""

from __future__ import annotations

import json

import pytest
from django.db import transaction

from outbox_app.jobs import bulk
from outbox_app.jobs.dead import requeue_dead
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, StagedJob
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def sent(app):
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue](connection.default_channel)
        queue.declare()
        found = []
        while (message := queue.get(no_ack=True)) is not None:
            found.append((message.headers["id"], json.loads(message.body)[0][1]))
    return found


def stage_with_a_damaged_one(alias, app, damaged):
    """Stage jobs 0 to 4 of one key; one of them cannot be sent. Returns its envelope."""
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for number in range(5):
            note.apply_async(("k", number), ordering_key="k", task_id=f"id-{number}")
    row = StagedJob.objects.using(alias).get(task_id=f"id-{damaged}")
    StagedJob.objects.using(alias).filter(pk=row.pk).update(envelope="nonsense")
    return row.envelope


def test_a_dead_job_that_is_requeued_leaves_with_its_task_id(alias, make_app):
    app = make_app()
    envelope = stage_with_a_damaged_one(alias, app, 2)
    Drain(using=alias).run(once=True)
    assert [number for _, number in sent(app)] == [0, 1, 3, 4]
    DeadJob.objects.using(alias).update(envelope=envelope)

    assert requeue_dead(DeadJob.objects.using(alias).filter(task="note")).done == 1
    Drain(using=alias).run(once=True)

    assert sent(app) == [("id-2", 2)]
    assert not DeadJob.objects.using(alias).exists()


def test_a_blocked_key_that_is_requeued_leaves_in_order(alias, make_app, settings, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH_SIZE", 1)
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    app = make_app()
    envelope = stage_with_a_damaged_one(alias, app, 1)
    while StagedJob.objects.using(alias).exists():
        Drain(using=alias, batch_size=1).run(once=True)
    assert DeadJob.objects.using(alias).count() == 4
    first = DeadJob.objects.using(alias).get(task_id="id-1")
    DeadJob.objects.using(alias).filter(pk=first.pk).update(envelope=envelope)

    # Requeued alone, it would be blocked by those that it had blocked.
    assert requeue_dead(DeadJob.objects.using(alias).filter(pk=first.pk)).done == 4
    Drain(using=alias, batch_size=1).run(once=True)

    assert [number for _, number in sent(app)] == [0, 1, 2, 3, 4]
    assert not DeadJob.objects.using(alias).exists()
