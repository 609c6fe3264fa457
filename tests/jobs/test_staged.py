"""``cancel`` and ``reschedule``: the rows deleted, the ids revoked in the workers, and when."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID, uuid4

import pytest
from celery import current_app
from celery.result import AsyncResult
from django.db import OperationalError, connections, transaction
from django.utils import timezone

from outbox_app import cancel, reschedule, stage
from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import InvalidJob
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs import Drain, backlog
from outbox_app.jobs.dead import requeue_dead
from outbox_app.jobs.staged import cancel_for
from outbox_app.models import DeadJob, StagedJob, counting
from tests import tasks
from tests.jobs.drain.test_main_path import received
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


@pytest.fixture
def task(make_app):
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def revoked(task, monkeypatch):
    """The ids that were revoked in the workers of the task's app."""
    told = []
    monkeypatch.setattr(task.app.control, "revoke", told.append)
    return told


@pytest.fixture
def staged(alias, task):
    """``staged(**options)``: the id of a new job."""

    def make(**options):
        with transaction.atomic(using=alias):
            return task.apply_async(("", 1), **options).id

    return make


def rows(alias):
    return list(StagedJob.objects.using(alias).order_by("id"))


def die(alias):
    for job in rows(alias):
        job.as_dead(error="E", reason="why").save(using=alias)
        job.delete()


@pytest.mark.parametrize(
    "options", [{}, {"countdown": 86400}, {"ordering_key": "k"}], ids=["ready", "held", "key"]
)
def test_a_staged_job_is_gone_and_its_neighbour_is_not(alias, staged, revoked, task, options):
    taken, other = staged(**options), staged(**options)
    assert cancel(taken, using=alias, ordering_key=options.get("ordering_key", ""))
    assert [job.task_id for job in rows(alias)] == [other]
    assert revoked == [taken]  # a drainer might be publishing it
    assert not cancel(taken, using=alias, app=task.app)


@pytest.mark.parametrize("key", ["", "k"])
def test_the_id_of_a_result_may_be_a_uuid(alias, staged, revoked, key):
    """If the task was given one, for a broker that takes it."""
    id = staged(task_id=uuid4(), ordering_key=key, countdown=86400)
    assert isinstance(id, UUID)
    assert reschedule(id, eta=timezone.now() + timedelta(days=3), using=alias, ordering_key=key)
    assert cancel(id, using=alias, ordering_key=key)
    assert revoked == [str(id)]


@pytest.mark.parametrize("options", [{}, {"countdown": 86400}], ids=["ready", "held"])
def test_its_key_finds_a_job_in_a_long_backlog(alias, staged, revoked, monkeypatch, options):
    monkeypatch.setattr(counting, "MANY", 2)
    early, *_ = [staged(ordering_key="k", **options) for _ in range(4)]
    assert cancel(early, using=alias, ordering_key="k")
    assert early not in [job.task_id for job in rows(alias)]


def test_what_has_left_is_revoked(alias, staged, revoked, task, monkeypatch):
    left = staged()
    Drain(using=alias).run(once=True)
    assert cancel(left, using=alias, app=task.app) is False
    assert revoked == [left]
    monkeypatch.setattr(current_app.control, "revoke", revoked.append)
    cancel("of-nobody", using=alias)
    assert revoked == [left, "of-nobody"]


def test_a_savepoint_that_is_rolled_back_takes_back_what_workers_would_be_told(
    alias, staged, revoked
):
    kept, cancelled = staged(), staged()
    with transaction.atomic(using=alias):
        savepoint = transaction.get_connection(alias).savepoint()
        assert cancel(kept, using=alias)
        transaction.savepoint_rollback(savepoint, using=alias)
        savepoint = transaction.get_connection(alias).savepoint()
        assert cancel(cancelled, using=alias)
        transaction.savepoint_commit(savepoint, using=alias)
    assert revoked == [cancelled]
    assert [job.task_id for job in rows(alias)] == [kept]


def test_it_counts_from_the_commit_on(alias, staged, revoked):
    kept = staged()
    with transaction.atomic(using=alias):
        assert cancel(kept, using=alias)
        transaction.set_rollback(True, using=alias)
    assert (revoked, len(rows(alias))) == ([], 1)
    with transaction.atomic(using=alias):
        assert cancel(kept, using=alias)
        assert revoked == []
    assert (revoked, rows(alias)) == ([kept], [])


def test_a_job_of_the_same_transaction(alias, staged, revoked, task):
    with transaction.atomic(using=alias):
        id = task.delay("", 1).id
        assert cancel(id, using=alias)
    assert rows(alias) == []


def test_the_broker_is_away(alias, staged, task, monkeypatch):
    """What is staged is cancelled all the same; what has left cannot be, and that is raised."""

    def away(task_id):
        raise OSError("no route to host")

    monkeypatch.setattr(task.app.control, "revoke", away)
    assert cancel(staged(), using=alias)
    assert rows(alias) == []
    with pytest.raises(OSError, match="no route"):
        cancel("left", using=alias, app=task.app)


def test_the_broker_of_many_cancelled_jobs_is_away(alias, staged, task, monkeypatch, caplog):
    """Each attempt takes seconds."""
    asked = []

    def away(task_id):
        asked.append(task_id)
        raise OSError("no route to host")

    monkeypatch.setattr(task.app.control, "revoke", away)
    first, *others = [staged() for _ in range(3)]
    with transaction.atomic(using=alias):
        assert all(cancel(id, using=alias) for id in [first, *others])
    assert asked == [first]
    assert all(f"its broker has just failed task_id={id}" in caplog.text for id in others)
    cancel(staged(), using=alias)
    assert len(asked) == 2


def test_a_drainer_that_publishes_it_at_this_moment(alias, staged, revoked, task):
    """It leaves, and the workers were told not to run it."""
    id, answers = staged(), []
    set_failpoint("published_not_deleted", lambda: answers.append(cancel(id, using=alias)))
    try:
        Drain(using=alias).run(once=True)
    finally:
        set_failpoint("published_not_deleted", None)
    assert (answers, revoked, rows(alias)) == ([True], [id], [])
    assert [message.headers["id"] for message in received(task.app)] == [id]


def eta_of(job):
    return json.loads(job.envelope)["headers"]["eta"]


def test_a_held_job_waits_for_its_new_time(alias, staged, task):
    id, other = staged(countdown=86400), staged(countdown=86400)
    before = rows(alias)[1]
    new = timezone.now() + 3 * DAY
    assert reschedule(id, eta=new, using=alias)
    changed, unchanged = rows(alias)
    assert datetime.fromisoformat(eta_of(changed)) == new
    assert abs(changed.available_at - new) < timedelta(milliseconds=1)
    assert (unchanged.task_id, unchanged.envelope) == (other, before.envelope)
    Drain(using=alias).run(once=True)
    assert received(task.app) == []


@pytest.mark.any_database
@pytest.mark.parametrize("envelope", ["nonsense", "[]", "null", '{"headers": 5}', '{"a": 1}'])
def test_a_damaged_job_is_rescheduled_as_it_is(alias, staged, envelope):
    """The drain reports it."""
    id = staged(countdown=86400)
    StagedJob.objects.using(alias).update(envelope=envelope)
    assert reschedule(id, eta=timezone.now(), using=alias)
    assert StagedJob.objects.using(alias).due().get().envelope == envelope


def test_a_time_that_is_near_lets_it_leave(alias, staged, task):
    id = staged(countdown=86400)
    soon = timezone.now() + timedelta(seconds=60)
    assert reschedule(id, eta=soon, using=alias)
    Drain(using=alias).run(once=True)
    [message] = received(task.app)
    assert datetime.fromisoformat(message.headers["eta"]) == soon
    assert not reschedule(id, eta=soon, using=alias)


def test_with_quorum_queues_it_waits_for_a_time_that_is_near_too(alias, staged, task):
    """A worker that held it could take nothing else meanwhile."""
    task.app.conf.update(broker_url="amqp://", task_default_queue_type="quorum")
    id = staged(countdown=86400)
    soon = timezone.now() + timedelta(seconds=60)
    assert reschedule(id, eta=soon, using=alias)
    [job] = rows(alias)
    assert abs(job.available_at - soon) < timedelta(milliseconds=1)


@pytest.mark.parametrize("options", [{}, {"countdown": 60}], ids=["ready", "near"])
def test_only_what_is_held_is_put_off(alias, staged, options):
    id = staged(**options)
    before = rows(alias)[0].envelope
    assert not reschedule(id, eta=timezone.now() + DAY, using=alias)
    assert rows(alias)[0].envelope == before


def test_a_job_that_its_own_process_publishes_is_not_put_off(alias, staged):
    id = staged(countdown=86400)
    StagedJob.objects.using(alias).update(is_immediate=True)
    assert not reschedule(id, eta=timezone.now() + 3 * DAY, using=alias)


def test_the_drainers_are_woken_after_the_commit(alias, staged):
    id = staged(countdown=86400)
    woken = 1 if connections[alias].vendor == "postgresql" else 0
    with transaction.atomic(using=alias):
        assert reschedule(id, eta=timezone.now() + timedelta(seconds=60), using=alias)
        assert len(connections[alias].run_on_commit) == woken


def test_a_job_whose_time_has_come_is_not_put_off(alias, staged):
    id = staged(countdown=86400)
    StagedJob.objects.using(alias).update(available_at=DatabaseNow() - HOUR)
    assert not reschedule(id, eta=timezone.now() + DAY, using=alias)


def test_a_job_that_leaves_before_its_time_is_late_from_that_moment_on(alias, staged):
    """It would be reported as waiting since it was staged, days ago."""
    id = staged(countdown=10 * 86400)
    StagedJob.objects.using(alias).update(staged_at=DatabaseNow() - 7 * DAY)
    assert reschedule(id, eta=timezone.now(), using=alias)
    assert backlog(using=alias).oldest_seconds < 60
    assert Drain(using=alias).run(once=True).done == 1


def test_a_held_job_that_comes_back_from_the_dead_is_held_again(alias, staged):
    """Redis would deliver it again and again to workers that hold it for so long."""
    staged(countdown=86400), staged(countdown=60), staged()
    before = rows(alias)
    die(alias)
    assert requeue_dead(DeadJob.objects.using(alias).all()).done == 3
    after = rows(alias)
    assert [job.task_id for job in after] == [job.task_id for job in before]
    assert [job.available_at for job in after] == [job.available_at for job in before]
    assert before[0].available_at is not None


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("is_dead", [False, True], ids=["staged", "dead"])
def test_a_person_waits_shortly_for_a_transaction_that_cancels(alias, staged, task, is_dead):
    """A web server would end the page of the admin, which could not say why."""
    job = staged(countdown=86400)
    jobs, decide = StagedJob.objects.using(alias).all(), cancel_for
    if is_dead:
        die(alias)
        jobs, decide = DeadJob.objects.using(alias).all(), requeue_dead
    found = []

    def press():
        found.append(decide(jobs, until=10**9, asked=DatabaseNow(), seconds=0))
        connections[alias].close()

    person = threading.Thread(target=press, daemon=True)
    with transaction.atomic(using=alias):
        assert cancel(job, using=alias, app=task.app)
        person.start()
        person.join(patience())
        [result] = found
    assert (result.done, type(result.error)) == (0, OperationalError)


def test_a_dead_job_is_taken_back(alias, staged, revoked, task):
    """A person who requeues the others would send it."""
    taken, other = staged(), staged()
    die(alias)
    assert cancel(taken, using=alias, app=task.app)
    assert revoked == [taken]
    assert not cancel(taken, using=alias, app=task.app)
    assert requeue_dead(DeadJob.objects.using(alias).all()).done == 1
    assert [job.task_id for job in rows(alias)] == [other]


def test_a_rollback_leaves_the_old_time(alias, staged):
    id = staged(countdown=86400)
    [before] = rows(alias)
    with transaction.atomic(using=alias):
        assert reschedule(id, eta=timezone.now() + 3 * DAY, using=alias)
        transaction.set_rollback(True, using=alias)
    [after] = rows(alias)
    assert (after.available_at, after.envelope) == (before.available_at, before.envelope)


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("eta", "said"),
    [
        (datetime(2099, 1, 1), "must be a datetime with a time zone; got datetime"),
        (timedelta(days=1), "must be a datetime with a time zone; got datetime.timedelta"),
        ("2026-12-24T00:00:00Z", "must be a datetime with a time zone; got '2026"),
        (datetime(9999, 1, 1, tzinfo=UTC), "further away than 366 days"),
    ],
)
def test_times_that_are_refused(alias, staged, eta, said):
    id = staged(countdown=86400)
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=said):
            reschedule(id, eta=eta, using=alias)
        stage("note", using=alias)  # the transaction goes on
    assert len(rows(alias)) == 2


@pytest.mark.any_database
@pytest.mark.parametrize(
    "call", [cancel, partial(reschedule, eta=datetime(2027, 1, 1, tzinfo=UTC))]
)
@pytest.mark.parametrize("given", [None, AsyncResult("x")], ids=["none", "result"])
def test_what_is_no_task_id_is_refused(call, given, alias):
    with pytest.raises(InvalidJob, match=r"task_id must be a string, as in result\.id; got "):
        call(given, using=alias)


def test_a_project_without_time_zones_holds_jobs_too(alias, staged, settings):
    """The clock of MySQL is in the zone of its sessions, which is not the project's here."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"

    def held_for():
        job = StagedJob.objects.using(alias).annotate(now=DatabaseNow()).get()
        return job.available_at - job.now

    with timezone.override("Pacific/Auckland"):  # of the visitor
        id = staged(countdown=2 * 86400)
        assert abs(held_for() - 2 * DAY) < HOUR
        assert reschedule(id, eta=datetime.now(UTC) + 5 * DAY, using=alias)
    assert abs(held_for() - 5 * DAY) < HOUR


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    ("zone", "offset"), [("Europe/London", "+00:00"), ("Australia/Sydney", "+10:00")]
)
def test_a_session_with_the_project_s_offset_in_winter_only(alias, staged, settings, zone, offset):
    """Without USE_TZ a job that was held until summer left an hour too late."""
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    with connections[alias].cursor() as cursor:
        cursor.execute("SET SESSION time_zone = %s", [offset])
    try:
        for days in (90, 180, 270):
            id = staged(countdown=days * 86400)
            job = StagedJob.objects.using(alias).annotate(now=DatabaseNow()).get(task_id=id)
            assert abs(job.available_at - job.now - days * DAY) < HOUR / 2
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute("SET SESSION time_zone = DEFAULT")
