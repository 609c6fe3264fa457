"""Two people press "requeue" at the same moment: a job is requeued once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.jobs import bulk, dead
from outbox_app.jobs.dead import discard_dead, requeue_dead
from outbox_app.models import DeadJob, Incident, StagedJob
from outbox_app.signals import jobs_staged
from tests.patience import patience

from .rows import dead_jobs

pytestmark = pytest.mark.django_db(transaction=True)


def in_thread(function):
    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()

    return run


def waits_for_a_lock(alias):
    """Whether a session of this test's database waits for another one."""
    sql = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'",
        # Not innodb_trx: it shows the state of an earlier moment to whoever polls it.
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE() "
        "AND id <> CONNECTION_ID() AND command = 'Query' AND time > 0",
    }[connections[alias].vendor]
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0] > 0


def eventually(condition, *args):
    until = time.monotonic() + patience()
    while not condition(*args):
        assert time.monotonic() < until, f"{condition.__name__} never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("second_decision", [requeue_dead, discard_dead])
def test_the_second_one_waits_for_the_first_and_finds_the_jobs_gone(alias, second_decision):
    dead_jobs(3, using=alias)
    first_is_about_to_commit, first_may_commit = threading.Event(), threading.Event()
    second_begins = threading.Event()

    def hold_the_first(**kwargs):
        if not first_is_about_to_commit.is_set():
            first_is_about_to_commit.set()
            assert first_may_commit.wait(patience())

    @in_thread
    def first():
        return requeue_dead(DeadJob.objects.using(alias).all())

    @in_thread
    def second():
        def notice(execute, sql, *args):
            if sql.startswith("BEGIN"):
                second_begins.set()
            return execute(sql, *args)

        with connections[alias].execute_wrapper(notice):
            return second_decision(DeadJob.objects.using(alias).all())

    jobs_staged.connect(hold_the_first, weak=False, dispatch_uid="hold")
    try:
        with ThreadPoolExecutor() as threads:
            one = threads.submit(first)
            assert first_is_about_to_commit.wait(patience())
            two = threads.submit(second)
            try:
                if connections[alias].vendor == "sqlite":
                    eventually(second_begins.is_set)
                else:
                    eventually(waits_for_a_lock, alias)
            finally:
                first_may_commit.set()
            assert [each.result(patience()).done for each in (one, two)] == [3, 0]
    finally:
        jobs_staged.disconnect(dispatch_uid="hold")
    assert StagedJob.objects.using(alias).count() == 3
    assert not DeadJob.objects.using(alias).exists()


def test_many_batches_at_once_requeue_each_job_once(alias, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH_SIZE", 5)
    jobs = dead_jobs(60, using=alias)
    start = threading.Barrier(2)

    @in_thread
    def run():
        start.wait(patience())
        return requeue_dead(DeadJob.objects.using(alias).all())

    with ThreadPoolExecutor() as threads:
        counts = [future.result().done for future in [threads.submit(run), threads.submit(run)]]

    assert sum(counts) == 60
    staged = StagedJob.objects.using(alias)
    assert sorted(staged.values_list("task_id", flat=True)) == sorted(j.task_id for j in jobs)
    assert not DeadJob.objects.using(alias).exists()
    covered = Incident.objects.using(alias).values_list("first_id", "last_id")
    assert all(any(a <= id <= b for a, b in covered) for id in staged.values_list("id", flat=True))


CONFLICT = OperationalError(1213, "Deadlock found when trying to get lock")


@pytest.mark.parametrize(("failures", "expected"), [(1, 3), (4, 3), (5, None)])
def test_a_batch_that_a_deadlock_has_ended_is_done_anew(alias, monkeypatch, failures, expected):
    """As of two people whose jobs have later ones of the same blocked keys."""
    dead_jobs(3, using=alias)
    errors = [CONFLICT] * failures
    record = dead.record_requeue

    def fail(**values):
        if errors:
            raise errors.pop()
        return record(**values)

    monkeypatch.setattr(dead, "record_requeue", fail)
    if expected:
        assert requeue_dead(DeadJob.objects.using(alias).all()).done == expected
    else:
        with pytest.raises(OperationalError):
            requeue_dead(DeadJob.objects.using(alias).all())
    assert StagedJob.objects.using(alias).count() == (expected or 0)
    assert DeadJob.objects.using(alias).count() == 3 - (expected or 0)


def test_inside_a_transaction_of_the_caller_a_deadlock_is_the_callers(alias, monkeypatch):
    """The database has undone all of it."""
    dead_jobs(3, using=alias)
    asked = []

    def fail(**values):
        asked.append(values)
        raise CONFLICT

    monkeypatch.setattr(dead, "record_requeue", fail)
    with pytest.raises(OperationalError), transaction.atomic(using=alias):
        requeue_dead(DeadJob.objects.using(alias).all())
    assert len(asked) == 1
