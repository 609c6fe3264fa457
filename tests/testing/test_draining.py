"""``drain_inline()`` acts as the drainer, inside a transaction that never commits."""

from __future__ import annotations

import json

import pytest

from outbox_app import stage
from outbox_app.models import DeadJob, Lease, Process, StagedJob
from outbox_app.testing import drain_inline

pytestmark = pytest.mark.usefixtures("in_atomic")


def test_jobs_reach_the_broker(alias, app, add):
    for i in range(3):
        stage(add, (i, i), using=alias)
    stage(add, (9, 9), using=alias, countdown=3600)

    tally = drain_inline(using=alias)

    assert (tally.published, tally.dead) == (3, 0)
    assert StagedJob.objects.using(alias).get().available_at is not None
    assert not Process.objects.using(alias).exists()
    assert not Lease.objects.using(alias).exclude(owner=None).exists()
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.main](connection.default_channel)
        bodies = [json.loads(queue.get().body)[0] for _ in range(3)]
    assert sorted(bodies) == [[0, 0], [1, 1], [2, 2]]


def test_drains_again(alias, app, add):
    assert drain_inline(using=alias).done == 0
    stage(add, (1, 1), using=alias)
    assert drain_inline(using=alias).published == 1


def test_dead_jobs_are_counted(alias, app, add):
    stage(add, (1, 1), using=alias)
    StagedJob.objects.using(alias).update(envelope="{")
    assert drain_inline(using=alias).dead == 1
    assert DeadJob.objects.using(alias).count() == 1


def test_broker_that_is_down_fails_the_test(alias, make_app):
    app = make_app("redis://127.0.0.1:1/0")
    stage("add", using=alias, app=app)
    with pytest.raises(AssertionError, match="cannot be reached"):
        drain_inline(using=alias)
    assert StagedJob.objects.using(alias).count() == 1
