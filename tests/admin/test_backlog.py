"""The backlog: shown, explained, and changed, while a drainer works on the same rows."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction

from outbox_app.admin import filters
from outbox_app.database.clock import DatabaseNow
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs import bulk, staged
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staging.insert import shard_of_job
from outbox_app.models import Lease, Process, StagedJob, counting
from tests import tasks
from tests.jobs.dead.rows import message, staged_jobs
from tests.jobs.dead.test_status import drainer, hold
from tests.jobs.drain.test_main_path import received

from .pages import STAGED, hidden, page, said, selection, text
from .test_lists import listed, statements

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def left(alias):
    return sorted(StagedJob.objects.using(alias).values_list("task_id", flat=True))


def decide(client, action, *jobs, url=STAGED, reason="why", **fields):
    question = client.post(url, selection(action, *jobs, **fields))
    answer = {**hidden(question), "confirmed": "yes", "reason": reason}
    return question, client.post(url, answer)


def test_filters(alias, superuser):
    staged_jobs(using=alias, task_id="1", queue="a", ordering_key="k")
    staged_jobs(using=alias, task_id="2", queue="b", task="t")
    for query, expected in (
        ({"queue": "a"}, ["1"]),
        ({"task": "t"}, ["2"]),
        ({"ordering_key": "k"}, ["1"]),
        ({"ordering_key": ""}, ["2"]),
    ):
        assert listed(superuser.get(STAGED, query)) == expected, query


def test_a_task_id_is_found_outside_the_window_through_its_shard(alias, superuser, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    [ready] = staged_jobs(using=alias, task_id="ready")
    [held] = staged_jobs(using=alias, task_id="held")
    hold(alias, held, minutes=5)
    shard = shard_of_job("k", "")
    staged_jobs(using=alias, task_id="keyed", ordering_key="k", shard=shard)
    other = next(n for n in range(128) if n not in (ready.shard, held.shard, shard))
    staged_jobs(4, using=alias, shard=other)
    staged_jobs(using=alias, task_id="keyed and new", ordering_key="k", shard=shard)
    for query, expected in (
        ({"q": "ready"}, ["ready"]),
        ({"q": "held"}, ["held"]),
        ({"q": "keyed"}, ["keyed and new"]),  # which begins so, and is new
        ({"q": "keyed", "ordering_key": "k"}, ["keyed"]),
        ({"q": "keyed and new"}, ["keyed and new"]),
        ({"q": "another"}, []),
    ):
        assert listed(superuser.get(STAGED, query)) == expected, query


def test_a_few_held_jobs_are_found_below_many_ready_ones(alias, superuser, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    due, later = staged_jobs(2, using=alias)
    hold(alias, due, minutes=-5)
    hold(alias, later, minutes=5)
    staged_jobs(4, using=alias)
    assert listed(superuser.get(STAGED, {"state": "held"})) == [later.task_id, due.task_id]
    assert listed(superuser.get(STAGED, {"state": "due"})) == [due.task_id]
    monkeypatch.setattr(filters, "FEW", 1)
    assert listed(superuser.get(STAGED, {"state": "held"})) == []
    assert "Looked through the newest 3 rows" in text(superuser.get(STAGED, {"state": "held"}))


def test_what_hinders_a_job(alias, superuser):
    [job] = staged_jobs(using=alias)

    def hindered():
        return text(superuser.get(page(job))).partition("What it waits for: ")[2][:120]

    assert hindered().startswith("Waiting for a drainer: none is running.")
    lease = Lease.objects.using(alias).create(resource="jobs", part=job.shard)
    assert hindered().startswith("Waiting for a drainer: none is running.")
    row = drainer(alias)
    assert hindered().startswith(f"Waiting for a drainer: none owns shard {job.shard}.")
    lease.owner = row.pk
    lease.save(using=alias)
    assert hindered().startswith("Nothing. ")
    Process.objects.using(alias).update(trouble="BrokerUnavailable: <b>refused password=hunter2")
    assert "is in trouble: BrokerUnavailable: <b>refused password=••••" in hindered()
    Process.objects.using(alias).update(heartbeat_at=DatabaseNow() - timedelta(minutes=5))
    assert "is silent for 5 min." in hindered()
    hold(alias, job, minutes=5)
    until = text(superuser.get(page(job))).partition("Held until: ")[2].partition("m. ")[0]
    assert hindered().startswith(f"Until {until}m. it is held.")
    hold(alias, job, minutes=-5)
    assert "is silent for 5 min." in hindered()
    assert len(statements(superuser, page(job), alias)) <= 5


@pytest.mark.parametrize(("trace", "shown"), [(TRACE, True), ("00-abc", False), ({}, False)])
def test_the_trace_is_shown_where_it_is_one(alias, superuser, trace, shown):
    [job] = staged_jobs(using=alias, envelope=message(headers={"traceparent": trace}))
    assert (f"Trace: {TRACE}" in text(superuser.get(page(job)))) == shown


def test_cancel(alias, superuser):
    job, other = staged_jobs(2, using=alias)
    question, answer = decide(superuser, "cancel_selected", job)
    assert "A job that a drainer is publishing at this moment is sent all" in text(question)
    assert said(answer) == ["1 staged job was cancelled."]
    assert left(alias) == [other.task_id]


@pytest.mark.parametrize("after", ["look", "read"])
def test_a_row_that_a_drainer_takes_meanwhile_is_the_drainers(alias, superuser, monkeypatch, after):
    """It goes between a look for it, or its row, and the deed: it is not counted."""
    job, other = staged_jobs(2, using=alias)
    hold(alias, job, days=5)
    hold(alias, other, days=5)
    question = superuser.post(STAGED, selection("cancel_selected", job, other))
    module, name = (bulk, "_look") if after == "look" else (staged, "_taken")
    inner = getattr(module, name)

    def lose():
        StagedJob.objects.using(alias).filter(pk=job.pk).delete()

    def look_then_lose(*args):
        found = inner(*args)
        lose()
        return found

    def read_and_lose(*args):
        for rows in args:
            len(rows or "")  # they are read
        lose()
        return inner(*args)

    monkeypatch.setattr(module, name, look_then_lose if after == "look" else read_and_lose)
    form = {**hidden(question), "confirmed": "yes", "reason": "why"}
    assert said(superuser.post(STAGED, form))[-1].startswith("1 ")
    assert left(alias) == []


@pytest.mark.django_db(transaction=True)
def test_a_job_that_a_drainer_has_in_hand_leaves_all_the_same(alias, make_app):
    """The drainer finds nothing to delete then, and does not mind."""
    task = make_app().task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        task.delay("", 1)
    done = []

    def act():
        jobs = StagedJob.objects.using(alias).all()
        done.append(staged.cancel_for(jobs, until=10**9, asked=DatabaseNow()).done)

    set_failpoint("published_not_deleted", act)
    try:
        Drain(using=alias).run(once=True)
    finally:
        set_failpoint("published_not_deleted", None)
    assert done[0] == 1
    assert len(received(task.app)) == 1
    assert not StagedJob.objects.using(alias).exists()
