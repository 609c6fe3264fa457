"""``@idempotent``: the effects of a job happen once, and its first result is kept."""

from __future__ import annotations

import datetime
import decimal
import uuid

import pytest
from celery import signature
from django.contrib.auth.models import Group
from django.db import connections

from outbox_app import idempotent
from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import InboxError
from outbox_app.models import InboxEntry, StagedJob
from tests import tasks
from tests.jobs.inbox.worker import deliver, effect

pytestmark = pytest.mark.django_db


def test_a_second_delivery_does_nothing_and_returns_the_first_result(task, twice, effects):
    @task
    @idempotent
    def work(x):
        return effect("work")

    first, second = twice(work, 1)

    assert first.state == second.state == "SUCCESS"
    assert first.value.startswith("work ")
    assert second.value == first.value
    assert effects() == ["work"]


def test_other_jobs_of_the_task_are_executed(task, effects):
    @task
    @idempotent
    def work():
        return effect("work")

    results = [deliver(work, id).value for id in ("one", "two")]
    assert results[0] != results[1]
    assert [deliver(work, id).value for id in ("one", "two")] == results
    assert effects() == ["work", "work"]


def test_the_entry_names_the_job_the_task_and_the_time(alias, task):
    @task(name="shop.work")
    @idempotent
    def work():
        return 42

    deliver(work, "job-1")

    entry = InboxEntry.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert (entry.job_id, entry.task, entry.result) == ("job-1", "shop.work", "42")
    assert abs(entry.now - entry.handled_at) < datetime.timedelta(minutes=1)


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(None, id="none"),
        pytest.param(0, id="zero"),
        pytest.param({"a": [1, 2.5, None, True]}, id="nested"),
        pytest.param(float("inf"), id="infinity"),
        pytest.param("\0 \ud800 ü 🛒", id="text"),
        pytest.param(datetime.datetime(2026, 2, 3, tzinfo=datetime.UTC), id="datetime"),
        pytest.param([decimal.Decimal("0.10"), uuid.UUID(int=7), b"\xff"], id="types"),
    ],
)
def test_what_celery_can_return_comes_back_as_it_was(alias, task, twice, result):
    @task
    @idempotent
    def work():
        return result

    first, second = twice(work)

    assert (first.state, second.state) == ("SUCCESS", "SUCCESS")
    assert second.value == result
    assert type(second.value) is type(result)


@pytest.mark.parametrize("result", [object(), {1, 2}, {(1, 2): 3}], ids=["object", "set", "key"])
def test_a_result_that_cannot_be_kept_fails_the_task_and_commits_nothing(
    task, twice, effects, noted, result
):
    @task
    @idempotent
    def work():
        effect("work")
        return result

    for delivery in twice(work):
        assert delivery.state == "FAILURE"
        with pytest.raises(InboxError, match=r"work\[.*\] cannot be kept.*ignore_result=True"):
            raise delivery.value
    assert effects() == []
    assert noted() == []


def test_a_result_that_nobody_can_ask_for_is_not_kept(alias, task, make_app, twice):
    without_backend = make_app("memory://").task

    def work():
        return object()

    for silent in (
        task(ignore_result=True)(idempotent(work)),
        without_backend(shared=False)(idempotent(work)),
    ):
        first, second = twice(silent)
        assert (first.state, second.state, second.value) == ("SUCCESS", "SUCCESS", None)
    assert set(InboxEntry.objects.using(alias).values_list("result", flat=True)) == {""}


@pytest.mark.parametrize("follow_up", ["chain", "callbacks"])
def test_what_a_further_task_takes_is_kept(alias, task, twice, follow_up):
    @task(ignore_result=True)
    @idempotent
    def work():
        return {"order": 7}

    first, second = twice(work, **{follow_up: [signature("next", app=work.app)]})

    assert first.value == second.value == {"order": 7}


def test_ids_are_compared_byte_by_byte(task, effects):
    @task
    @idempotent
    def work():
        effect("work")

    for job_id in ("job", "JOB", "job ", "jöb", "jób"):
        assert deliver(work, job_id).state == "SUCCESS"
    assert effects() == ["work"] * 5


def test_an_id_that_does_not_fit_is_refused_not_cut(task, effects, noted):
    @task
    @idempotent
    def work():
        effect("work")

    assert deliver(work, "x" * 255).state == "SUCCESS"
    with pytest.raises(InboxError, match="has 256 characters; at most 255"):
        raise deliver(work, "x" * 256).value
    assert effects() == ["work"]
    assert noted() == ["x" * 255]


def test_what_it_costs(alias, task, django_assert_num_queries):
    @task
    @idempotent
    def quiet():
        return None

    @task
    @idempotent
    def speaking():
        return 1

    def cost(work, job_id, statements):
        # The test's own transaction makes a savepoint of the task's: two statements. Two more are
        # the savepoint that shows whether the task has ended its transaction (transaction guard).
        with django_assert_num_queries(2 + statements, connection=connections[alias]):
            deliver(work, job_id)

    cost(quiet, "quiet", 1 + 2)
    cost(quiet, "quiet", 2)  # done already: it does not run
    cost(speaking, "speaking", 2 + 2)
    cost(speaking, "speaking", 2)


def test_effects_id_and_staged_jobs_commit_together(alias, task, effects, noted):
    add = task(name="add")(tasks.add)
    fails = True

    @task
    @idempotent
    def work():
        effect("work")
        add.delay(1, 2)
        assert StagedJob.objects.using(alias).count() == 1
        if fails:
            raise ZeroDivisionError

    assert deliver(work, "job").state == "FAILURE"
    assert (effects(), noted(), StagedJob.objects.using(alias).count()) == ([], [], 0)

    fails = False
    assert deliver(work, "job").state == "SUCCESS"
    assert deliver(work, "job").state == "SUCCESS"
    assert (effects(), noted(), StagedJob.objects.using(alias).count()) == (["work"], ["job"], 1)


@pytest.mark.parametrize("how", ["argument", "setting"])
def test_the_alias_is_an_argument_or_a_setting(alias, task, settings, noted, how):
    settings.OUTBOX = {"DATABASE": "nowhere"}
    if how == "setting":
        settings.OUTBOX["INBOX_DATABASE"] = alias

    @task
    @idempotent(using=alias if how == "argument" else None)
    def work():
        assert connections[alias].in_atomic_block
        return Group.objects.using(alias).create(name="work").name

    assert deliver(work, "job").value == deliver(work, "job").value == "work"
    assert noted() == ["job"]
