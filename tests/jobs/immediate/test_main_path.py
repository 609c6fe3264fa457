"""A job is staged in the transaction, published right after it, and deleted at once."""

from __future__ import annotations

import pytest
from celery.signals import after_task_publish
from django.db import connections, transaction

from outbox_app import cancel, stage, stage_many
from outbox_app.jobs import immediate
from outbox_app.jobs.drain import outcome
from outbox_app.models import StagedJob
from outbox_app.signals import jobs_published
from tests.jobs.staging.transactions import rolled_back

pytestmark = pytest.mark.django_db(transaction=True)


def test_staged_published_and_deleted(alias, broker_url, make_named_app, book, states):
    app, jobs = make_named_app(broker_url), book(alias)
    with transaction.atomic(using=alias):
        app.tasks["note"].delay("", 1)
        jobs.note()
        assert states() == ["held"]
    assert jobs.receive(app) == list(jobs.jobs)
    jobs.stage(app, 20)
    jobs.receive(app)
    jobs.assert_exact()


def test_a_rollback_publishes_nothing(alias, app, publishes):
    with rolled_back(alias):
        app.tasks["note"].delay("", 1)
    assert publishes == []


def test_all_of_a_commit_leave_as_one_batch_but_for_savepoints_that_were_rolled_back(
    alias, app, publishes, book
):
    jobs, note = book(alias), app.tasks["note"]
    with transaction.atomic(using=alias):
        note.delay("", 1)
        with transaction.atomic(using=alias):
            note.delay("", 2)
            stage_many([note.s("", 3), note.s("", 4)], using=alias)
        with rolled_back(alias):
            note.delay("", 5)
        transaction.on_commit(lambda: None, using=alias)
        for i in (6, 7):
            note.delay("", i)
        jobs.note()
    assert publishes == [6]
    jobs.receive(app)
    assert sorted(body[1] for body in jobs.bodies) == [1, 2, 3, 4, 6, 7]
    jobs.assert_exact()


def test_savepoints_of_the_projects_own_are_as_those_of_atomic(alias, app, publishes, book):
    jobs, note = book(alias), app.tasks["note"]
    with transaction.atomic(using=alias):
        outer = transaction.get_connection(alias).savepoint()
        note.delay("", 1)
        with transaction.atomic(using=alias):
            note.delay("", 2)
        transaction.savepoint_rollback(outer, using=alias)
        note.delay("", 3)
        kept = note.delay("", 4)
        inner = transaction.get_connection(alias).savepoint()
        note.delay("", 5)
        assert cancel(kept.id, using=alias, app=app)
        transaction.savepoint_rollback(inner, using=alias)
        released = transaction.get_connection(alias).savepoint()
        note.delay("", 6)
        transaction.savepoint_commit(released, using=alias)
        jobs.note()
    assert publishes == [3]
    jobs.receive(app)
    assert sorted(body[1] for body in jobs.bodies) == [3, 4, 6]
    jobs.assert_exact()


def test_what_is_cancelled_before_the_commit_is_not_published(
    alias, app, publishes, states, book, monkeypatch
):
    jobs, note = book(alias), app.tasks["note"]
    monkeypatch.setattr(app.control, "revoke", lambda task_id: None)
    with transaction.atomic(using=alias):
        note.delay("", 1)
        assert cancel(note.delay("", 2).id, using=alias)
        kept = note.delay("", 3)
        with rolled_back(alias):
            assert cancel(kept.id, using=alias)
        for i in (4, 5):
            assert cancel(note.delay("", i).id, using=alias)
        jobs.note()
    assert (publishes, states()) == ([2], [])
    jobs.receive(app)
    jobs.assert_exact()


def test_published_before_the_callbacks_of_others_which_may_raise(alias, app, publishes, states):
    def fail():
        assert publishes == [1]
        raise ZeroDivisionError

    def work():
        transaction.on_commit(fail, using=alias)
        app.tasks["note"].delay("", 1)

    with pytest.raises(ZeroDivisionError):
        transaction.atomic(using=alias)(work)()
    assert states() == []


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_two_aliases_in_one_another(alias, app, publishes, states):
    note = app.tasks["note"]
    with transaction.atomic(using="default"), transaction.atomic(using="postgres"):
        stage(note, ("", 1), using="default")
        stage(note, ("", 2), using="postgres")
        stage(note, ("", 3), using="default")
    assert publishes == [1, 2]
    assert states() == []
    assert not StagedJob.objects.using("default").exists()


def test_signals_are_sent_as_by_a_drainer(alias, app):
    heard = []

    def published(using, count, jobs, **kwargs):
        heard.append((using, count, [job.task for job in jobs]))

    def sent(sender, body, **kwargs):
        heard.append((sender, body[0]))

    jobs_published.connect(published)
    after_task_publish.connect(sent)
    try:
        with transaction.atomic(using=alias):
            app.tasks["note"].delay("", 1)
            assert heard == []
    finally:
        jobs_published.disconnect(published)
        after_task_publish.disconnect(sent)
    assert heard == [("note", ("", 1)), (alias, 1, ["note"])]


def test_spans_are_made_as_by_a_drainer(alias, app, monkeypatch):
    traced = []
    monkeypatch.setattr(outcome, "trace_batch", traced.append)
    with transaction.atomic(using=alias):
        app.tasks["note"].delay("", 1)
    assert [row.task for each in traced for row in each.accepted] == ["note"]


def test_no_more_than_an_insert_and_a_delete(alias, app, django_assert_num_queries):
    count = django_assert_num_queries(4, connection=connections[alias])  # with BEGIN and COMMIT
    with count, transaction.atomic(using=alias):
        app.tasks["note"].delay("", 1)


@pytest.mark.parametrize("option", [{"ordering_key": "k"}, {"countdown": 60}, {"immediate": False}])
def test_what_is_left_to_the_drain(alias, app, publishes, states, option):
    with transaction.atomic(using=alias):
        app.tasks["note"].apply_async(("", 1), **option)
    assert states() == ["ready"]
    assert publishes == []


def test_large_jobs_and_those_beyond_a_number_are_left_to_the_drain(
    alias, app, publishes, states, monkeypatch
):
    monkeypatch.setattr(immediate, "MOST", 3)
    with transaction.atomic(using=alias):
        app.tasks["note"].delay("x" * 100_000, 1)
    assert (publishes, states()) == ([], ["ready"])
    with transaction.atomic(using=alias):
        for i in range(4):
            app.tasks["note"].delay("", i)
    assert publishes == [3]
    assert states() == ["ready", "ready"]


def test_for_one_call_or_one_task(alias, app, publishes, on):
    on(IMMEDIATE=False)
    note = app.tasks["note"]
    with transaction.atomic(using=alias):
        note.delay("", 1)
        note.apply_async(("", 2), immediate=True)
        stage(note, ("", 3), immediate=True, using=alias)
        stage_many([note.s("", 4)], immediate=True, using=alias)
        note.immediate = True
        note.delay("", 5)
        note.apply_async(("", 6), immediate=False)
    assert publishes == [4]
    assert StagedJob.objects.using(alias).count() == 2


def test_a_call_outside_a_transaction_is_sent_as_ever(alias, app, publishes, states):
    app.tasks["note"].apply_async(("", 1), immediate=True)
    assert publishes == []
    assert states() == []


def test_in_a_transaction_of_their_own(alias, app, publishes, on):
    on(OUTSIDE="stage")
    app.tasks["note"].delay("", 1)
    assert publishes == [1]


def test_with_autocommit_off_the_drain_takes_them(alias, app, publishes, states, on):
    on(OUTSIDE="stage")
    transaction.set_autocommit(False, using=alias)
    try:
        app.tasks["note"].delay("", 1)
        transaction.commit(using=alias)
        assert states() == ["ready"]
        transaction.commit(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
    assert publishes == []


def test_a_job_that_expires_in_a_project_without_time_zones(
    alias, app, publishes, states, settings
):
    settings.USE_TZ = False
    with transaction.atomic(using=alias):
        app.tasks["note"].apply_async(("", 1), expires=600)
    assert (publishes, states()) == ([1], [])


@pytest.mark.django_db
def test_in_a_test_whose_transaction_never_commits(
    alias, app, states, django_capture_on_commit_callbacks
):
    capture = django_capture_on_commit_callbacks(using=alias, execute=True)
    with capture as callbacks, transaction.atomic(using=alias):
        app.tasks["note"].delay("", 1)
    assert states() == ["ready"]
    assert callbacks == []
