"""Slow receivers of signals: no lease is lost, and no job is sent twice."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
from celery.signals import after_task_publish
from django.db import OperationalError, transaction

from outbox_app import failpoints
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, Incident, Process, StagedJob
from outbox_app.signals import job_dead
from tests.faults.tools import draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default", "postgres"),
    pytest.mark.usefixtures("quick"),
]

JOBS, SECONDS = 40, 0.1


@contextmanager
def slow(signal):
    """Connect a receiver that takes a fraction of a lease, for each of many jobs."""
    heard = []

    def hear(**kwargs):
        time.sleep(SECONDS)
        heard.append(kwargs)

    signal.connect(hear)
    try:
        yield heard
    finally:
        signal.disconnect(hear)


@contextmanager
def two_drainers(alias):
    with draining(alias) as one, draining(alias) as other:
        eventually(lambda: Process.objects.using(alias).count() == 2, "both run")
        eventually(lambda: len(other.holder.owned) == len(one.holder.owned) == 64, "they share")
        yield


def test_of_celerys_signal(alias, redis_url, make_named_app, book):
    app, jobs = make_named_app(redis_url), book(alias)
    with slow(after_task_publish) as heard, two_drainers(alias):
        jobs.stage(app, JOBS, key="k")  # of one shard: the other drainer has nothing to do
        eventually(lambda: len(heard) == JOBS, "all are told")
        jobs.receive(app)
        jobs.assert_exact()


def test_of_jobs_that_die(alias, redis_url, make_named_app, book):
    app, jobs = make_named_app(redis_url), book(alias)
    with slow(job_dead) as heard, two_drainers(alias):
        with transaction.atomic(using=alias):  # no drainer sees them before
            jobs.stage(app, JOBS, key="k")  # of one shard: the other one has nothing to do
            StagedJob.objects.using(alias).update(app="nobody")
        eventually(lambda: len(heard) == JOBS, "all are told")
    assert DeadJob.objects.using(alias).count() == JOBS
    assert not Incident.objects.using(alias).exists()


def test_database_that_is_away_is_asked_once(alias, redis_url, make_named_app, book, monkeypatch):
    app, jobs = make_named_app(redis_url), book(alias)
    drain, asked = Drain(using=alias), []
    drain.run_once()

    def away(**columns):
        asked.append(columns)
        raise OperationalError("on purpose")

    def go_away():
        monkeypatch.setattr(drain.holder, "beat_is_due", lambda: True)
        monkeypatch.setattr(drain.holder, "beat", away)

    monkeypatch.setitem(failpoints._actions, "published_not_deleted", go_away)
    with slow(after_task_publish) as heard:
        jobs.stage(app, 5)
        drain.run_once()
    assert (len(heard), len(asked)) == (5, 1)
