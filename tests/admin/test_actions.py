"""Requeue and discard in the admin: confirmed, done once, and logged; forged forms are refused."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry

from outbox_app.exceptions import InvalidJob
from outbox_app.jobs import dead
from outbox_app.models import DeadJob, Incident, StagedJob, counting
from tests.jobs.dead.rows import dead_jobs, staged_jobs

from .pages import DEAD, batch, hidden, page, said, selection, text

ACTIONS = ["requeue_selected", "discard_selected"]


def left(alias):
    return sorted(DeadJob.objects.using(alias).values_list("task_id", flat=True))


def staged(alias):
    return sorted(StagedJob.objects.using(alias).values_list("task_id", flat=True))


def confirm(client, url, question, **changed):
    return client.post(url, {**hidden(question), "confirmed": "yes", "reason": "why", **changed})


@pytest.mark.parametrize("action", ACTIONS)
def test_selected_jobs_are_asked_about_then_decided_on(alias, superuser, action):
    first, second, third = dead_jobs(3, using=alias, task="shop.send")

    question = superuser.post(DEAD, selection(action, first, third))

    assert "Number of jobs: 2" in text(question)
    assert "2 shop.send builtins.Trouble The broker said no." in text(question)
    assert "There are more." not in text(question)
    assert len(left(alias)) == 3
    answer = confirm(superuser, DEAD, question)
    assert answer.status_code == 302
    assert left(alias) == [second.task_id]
    done = "requeued" if action == "requeue_selected" else "discarded"
    assert said(answer) == [f"2 dead jobs were {done}."]
    expected = sorted([first.task_id, third.task_id]) if done == "requeued" else []
    assert staged(alias) == expected


@pytest.mark.parametrize("action", ACTIONS)
def test_it_is_written_to_the_admins_log_by_whom_what_and_which(alias, superuser, action):
    jobs = dead_jobs(2, using=alias)
    confirm(superuser, DEAD, superuser.post(DEAD, selection(action, *jobs)))
    entry = LogEntry.objects.get()
    assert entry.user.username == "<b>superuser</b>"
    assert entry.content_type.model == "deadjob"
    assert entry.object_repr.startswith("2 dead jobs were ")
    assert str(jobs[0].pk) in entry.get_change_message()
    assert entry.is_deletion() == (action == "discard_selected")
    if action == "requeue_selected":
        [incident] = Incident.objects.using(alias).all()
        assert incident.detail == "Dead jobs requeued by <b>superuser</b> (reason: why)."


@pytest.mark.parametrize("action", ACTIONS)
def test_all_that_match_the_filter(alias, superuser, action, monkeypatch):
    monkeypatch.setattr("outbox_app.admin.dead.DeadJobAdmin.list_per_page", 2)
    jobs = dead_jobs(7, using=alias, task="a")
    dead_jobs(1, using=alias, task="b", task_id="other")
    url = f"{DEAD}?task=a"

    question = superuser.post(url, selection(action, *jobs[:2], select_across=1))
    assert "Number of jobs: 7" in text(question)
    assert hidden(question)["_selected_action"] == [str(jobs[0].pk)]
    answer = confirm(superuser, url, question)

    assert left(alias) == ["other"]
    assert answer.url == url
    assert "task=a" in LogEntry.objects.get().get_change_message()


def test_what_dies_after_the_question_was_not_in_the_answer(alias, superuser):
    [asked] = dead_jobs(using=alias)
    question = superuser.post(DEAD, selection("discard_selected", asked, select_across=1))
    [later] = dead_jobs(using=alias)
    confirm(superuser, DEAD, question)
    assert left(alias) == [later.task_id]


def test_the_count_of_a_question_stops(alias, superuser, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    jobs = dead_jobs(5, using=alias)
    question = superuser.post(DEAD, selection("requeue_selected", jobs[0], select_across=1))
    assert "Number of jobs: 3+" in text(question)
    confirm(superuser, DEAD, question)
    assert left(alias) == []


def test_a_job_is_decided_on_from_its_own_page(alias, superuser):
    job, other = dead_jobs(2, using=alias)
    shown = superuser.get(page(job))
    fields = {name: value[0] for name, value in hidden(shown).items()}
    assert f'formaction="{DEAD}' in shown.content.decode()
    question = superuser.post(DEAD, {**fields, "action": "requeue_selected"})
    confirm(superuser, DEAD, question)
    assert left(alias) == [other.task_id]
    assert staged(alias) == [job.task_id]


def test_asking_twice_does_it_once(alias, superuser):
    """Two tabs, or two people."""
    [job] = dead_jobs(using=alias)
    questions = [superuser.post(DEAD, selection("requeue_selected", job)) for _ in range(2)]
    answers = [confirm(superuser, DEAD, question) for question in questions]
    assert [said(a)[-1] for a in answers] == [
        "1 dead job was requeued.",
        "0 dead jobs were requeued.",
    ]
    assert staged(alias) == [job.task_id]


def test_an_error_half_way_is_shown_and_logged(alias, superuser, monkeypatch):
    [job] = dead_jobs(using=alias)

    def refuse(*args, **kwargs):
        raise InvalidJob("too large \x1b for the packet")

    monkeypatch.setattr(dead, "record_requeue", refuse)
    question = superuser.post(DEAD, selection("requeue_selected", job))
    answer = confirm(superuser, DEAD, question)
    assert said(answer) == [
        r"0 dead jobs were requeued. Stopped half-way: too large \x1b for the packet"
    ]
    assert "Stopped half-way" in LogEntry.objects.get().get_change_message()
    assert left(alias) == [job.task_id]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("id", ["x", "", "-1", "1.5", "1 OR 1=1", "9" * 5000, "٣", "\x00", 2**63])
def test_forged_ids_are_refused(superuser, action, id):
    [job] = dead_jobs(using="default")
    form = {"action": action}
    forged = {**form, "_selected_action": [id], **batch(job.pk)}
    assert superuser.post(DEAD, forged).status_code == 400
    assert left("default") == [job.task_id]


@pytest.mark.parametrize("id", [0, 10**15, 2**63 - 1])
def test_ids_of_no_row_touch_nothing(alias, superuser, id):
    [job] = dead_jobs(using=alias)
    form = {"action": "discard_selected", "_selected_action": [id]}
    answer = superuser.post(DEAD, {**form, **batch(2**63 - 1)})
    assert said(answer) == ["0 dead jobs were discarded."]
    assert left(alias) == [job.task_id]


def test_ids_of_jobs_that_the_filter_hides_touch_nothing(alias, superuser):
    [job] = dead_jobs(using=alias, task="a")
    form = selection("discard_selected", job, **batch(job.pk))
    answer = superuser.post(f"{DEAD}?task=b", form)
    assert said(answer) == ["0 dead jobs were discarded."]
    assert left(alias) == [job.task_id]


@pytest.mark.parametrize("action", ["delete_selected", "discard", "__class__", "response_action"])
def test_actions_that_are_not_offered_are_not_done(superuser, action):
    [job] = dead_jobs(using="default")
    form = {"post": "yes", **batch(job.pk)}
    superuser.post(DEAD, selection(action, job, **form))
    assert left("default") == [job.task_id]


def test_staged_jobs_are_not_deleted_in_bulk(superuser):
    [job] = staged_jobs(using="default")
    url = DEAD.replace("deadjob", "stagedjob")
    superuser.post(url, selection("delete_selected", job, post="yes"))
    assert StagedJob.objects.exists()
