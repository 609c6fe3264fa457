"""``run_staged()`` acts as the worker: bodies, follow-ups, retries, failures."""

from __future__ import annotations

from datetime import timedelta

import pytest
from celery import chain, chord, group
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
from django.db import transaction
from django.utils import timezone

from outbox_app import cancel, idempotent, stage
from outbox_app.models import InboxEntry, StagedJob
from outbox_app.testing import run_staged, staged_jobs

pytestmark = pytest.mark.usefixtures("in_atomic")


@pytest.fixture
def ran():
    """The arguments of the test's tasks, in the order of their calls."""
    return []


@pytest.fixture
def note(app, ran):
    @app.task(shared=False)
    def note(*args):
        ran.append(args[0] if len(args) == 1 else args)
        return f"{args[0]}+"

    return note


def test_runs_all_in_order_and_empties_the_outbox(alias, note, ran):
    for i in (3, 1, 2):
        stage(note, (i,), using=alias)
    jobs = run_staged(using=alias)

    assert ran == [3, 1, 2]
    assert [job.args for job in jobs] == [[3], [1], [2]]
    assert not StagedJob.objects.using(alias).exists()
    assert run_staged(using=alias) == []


@pytest.mark.parametrize("in_transaction", [True, False])
@pytest.mark.django_db(transaction=True)
def test_follow_ups_run_too(alias, note, ran, in_transaction):
    with transaction.atomic(using=alias):
        stage(chain(note.s("a"), note.s(), group(note.s("x"), note.s("y"))), using=alias)
        stage(note, ("b",), using=alias, link=note.s())
        if in_transaction:
            run_staged(using=alias)
    if not in_transaction:
        run_staged(using=alias)

    assert ran == ["a", "b", "a+", "b+", ("a++", "x"), ("a++", "y")]


def test_chord(alias, make_app):
    app = make_app(result_backend="cache+memory://")
    total = []

    @app.task(shared=False)
    def double(x):
        return 2 * x

    @app.task(shared=False)
    def collect(numbers):
        total.extend(numbers)

    stage(chord([double.s(1), double.s(2)], collect.s()), using=alias)

    run_staged(using=alias)
    assert total == [2, 4]


def test_tasks_stage_tasks(alias, app, note, ran):
    @app.task(shared=False)
    def parent():
        note.delay("outside")
        with transaction.atomic(using=alias):
            note.delay("inside")
            with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
                note.delay(1 / 0)

    stage(parent, using=alias)
    assert [job.task for job in run_staged(using=alias)] == [parent.name, note.name, note.name]
    assert ran == ["outside", "inside"]


def test_what_a_task_has_cancelled_is_not_run(alias, app, note, ran):
    @app.task(shared=False)
    def call_off(task_id):
        ran.append(cancel(task_id, using=alias, app=app))

    stage(call_off, ("called-off",), using=alias)
    stage(note, ("x",), using=alias, task_id="called-off")
    assert [job.task for job in run_staged(using=alias)] == [call_off.name]
    assert ran == [True]


def test_due_times_come_last_and_are_not_waited_for(alias, note, ran):
    stage(note, ("hour",), using=alias, countdown=3600)
    stage(note, ("minute",), using=alias, countdown=60, link=note.s())
    stage(note, ("now",), using=alias)
    run_staged(using=alias)
    assert ran == ["now", "minute", "minute+", "hour"]


def test_what_has_expired_is_not_run(alias, note, ran):
    past, soon = timezone.now() - timedelta(seconds=1), timezone.now() + timedelta(seconds=600)
    stage(note, ("expired",), using=alias, expires=past)
    stage(note, ("expires before its time",), using=alias, countdown=3600, expires=soon)
    stage(note, ("in time",), using=alias, countdown=3600, expires=7200)
    assert [job.args for job in run_staged(using=alias)] == [["in time"]]
    assert ran == ["in time"]
    assert not StagedJob.objects.using(alias).exists()


def test_worker_request(alias, app):
    seen = {}

    @app.task(bind=True, shared=False)
    def bound(self):
        seen.update(id=self.request.id, trace=self.request.get("trace"), queue=self.request)
        assert not self.request.called_directly

    result = stage(bound, using=alias, headers={"trace": "x"})
    run_staged(using=alias)
    assert (seen["id"], seen["trace"]) == (result.id, "x")


def test_retry_runs_again_after_the_others(alias, app, note, ran):
    @app.task(bind=True, max_retries=2, shared=False)
    def flaky(self, x):
        ran.append((x, self.request.retries))
        if self.request.retries < 2:
            raise self.retry((x + 1,), countdown=600)

    stage(flaky, (0,), using=alias)
    stage(note, ("other",), using=alias)
    run_staged(using=alias)
    assert ran == [(0, 0), "other", (1, 1), (2, 2)]


def test_retries_end(alias, app):
    @app.task(bind=True, max_retries=2, shared=False)
    def hopeless(self):
        raise self.retry()

    @app.task(autoretry_for=[KeyError], max_retries=1, shared=False)
    def auto():
        raise KeyError("x")

    stage(hopeless, using=alias)
    with pytest.raises(MaxRetriesExceededError):
        run_staged(using=alias)
    stage(auto, using=alias)
    with pytest.raises(KeyError):
        run_staged(using=alias)


def test_replace(alias, app, note, ran):
    @app.task(bind=True, shared=False)
    @transaction.atomic(using=alias)
    def replaced(self):
        return self.replace(chain(note.s("instead"), note.s()))

    stage(chain(replaced.s(), note.s()), using=alias, link=note.s("linked"))
    jobs = run_staged(using=alias)
    assert ran == ["instead", "instead+", "instead++", ("instead+++", "linked")]
    assert len(jobs) == 5


def test_a_retry_of_ones_own(alias, app, ran):
    """It may take other arguments than Celery's."""

    class Own(app.Task):
        def retry(self, exc=None):
            return super().retry(exc=exc, countdown=1)

    @app.task(bind=True, base=Own, shared=False)
    def tried(self):
        ran.append(self.request.retries)
        if not self.request.retries:
            self.retry()

    stage(tried, using=alias)
    run_staged(using=alias)
    assert ran == [0, 1]


@pytest.mark.parametrize("error", [Ignore, Reject, Retry])
def test_ignore_and_reject_are_no_errors(alias, app, error):
    @app.task(shared=False)
    def ignored():
        raise error

    stage(ignored, using=alias)
    assert len(run_staged(using=alias)) == 1


def test_error_is_raised_and_the_rest_stays(alias, app, note, ran):
    @app.task(shared=False)
    def fails():
        raise ValueError("the task's own words")

    @app.task(shared=False)
    def on_error(task_id):
        ran.append(task_id)

    result = stage(fails, using=alias, link_error=on_error.s())
    stage(note, ("later",), using=alias)
    with pytest.raises(ValueError, match="the task's own words"):
        run_staged(using=alias)
    assert [job.task for job in staged_jobs(using=alias)] == [note.name, on_error.name]

    run_staged(using=alias)
    assert ran == ["later", result.id]


def test_idempotent_task_leaves_its_id(alias, app, settings):
    @app.task(shared=False)
    @idempotent(using=alias)
    def once():
        return None

    result = stage(once, using=alias)
    run_staged(using=alias)
    assert InboxEntry.objects.using(alias).get().job_id == result.id


def test_callbacks_of_tasks_after_the_commit(
    alias, app, note, ran, django_capture_on_commit_callbacks
):
    @app.task(shared=False)
    def parent():
        transaction.on_commit(lambda: ran.append("committed"), using=alias)

    with django_capture_on_commit_callbacks(using=alias, execute=True):
        stage(parent, using=alias)
        run_staged(using=alias)
        assert ran == []
    assert ran == ["committed"]


def test_what_no_worker_knows(alias, app, make_app):
    stage("elsewhere", using=alias, app=app)
    with pytest.raises(AssertionError, match=r"has no task to run elsewhere\(\)"):
        run_staged(using=alias)

    stage("elsewhere", using=alias, app=app)
    StagedJob.objects.using(alias).update(app="gone")
    with pytest.raises(AssertionError, match="No Celery app named 'gone'"):
        run_staged(using=alias)


def test_loop_comes_to_an_end(alias, app):
    @app.task(shared=False)
    def again():
        again.delay()

    stage(again, using=alias)
    with pytest.raises(AssertionError, match=r"no end after 20 jobs[^$]*again\(\)"):
        run_staged(using=alias, limit=20)
