"""Receivers of signals that take their time: they cost no lease, and send nothing twice."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
from celery.signals import after_task_publish

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
        jobs.stage(app, JOBS, key="k")  # of one shard: the other drainer has nothing to do
        StagedJob.objects.using(alias).update(app="nobody")
        eventually(lambda: len(heard) == JOBS, "all are told")
    assert DeadJob.objects.using(alias).count() == JOBS
    assert not Incident.objects.using(alias).exists()
