"""Actions on many rows: some seconds at a time, each with a line in the log."""

from __future__ import annotations

import html
import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.utils.dateparse import parse_datetime

from outbox_app.admin import actions
from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs import bulk, dead
from outbox_app.models import DeadJob, StagedJob
from tests.jobs.dead.rows import dead_jobs, staged_jobs

from .pages import DEAD, STAGED, batch, body, hidden, said, selection, text


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A slice is one batch of two rows, or one query for three."""
    monkeypatch.setattr(actions, "SECONDS", 0)
    monkeypatch.setattr(bulk, "STEP", 3)
    monkeypatch.setattr(bulk, "BATCH_SIZE", 2)


def left(alias, model=DeadJob):
    return sorted(model.objects.using(alias).values_list("task_id", flat=True))


def lines():
    """The outcomes in the admin's log, in their order."""
    return list(LogEntry.objects.order_by("pk").values_list("object_repr", flat=True))


def begin(client, url, action, *jobs, across=True, reason="why"):
    fields = {"select_across": 1} if across else {}
    question = client.post(url, selection(action, *jobs, **fields))
    return client.post(url, {**hidden(question), "confirmed": "yes", "reason": reason})


def rest(answer):
    """What Continue posts."""
    [reason] = re.findall(r'name="reason" value="([^"]*)"', body(answer))
    return {**hidden(answer), "confirmed": "Continue", "reason": html.unescape(reason)}


def finish(client, url, answer):
    """Press Continue until it is done; return the last answer and how often it was pressed."""
    for pressed in range(100):
        if answer.status_code == 302:
            return answer, pressed
        answer = client.post(url, rest(answer))
    raise AssertionError("it does not end")


@pytest.mark.parametrize("action", ["requeue_selected", "discard_selected"])
def test_many_rows_take_many_slices_and_a_line_in_the_log_for_each(alias, superuser, action):
    jobs = dead_jobs(7, using=alias, task="a")
    dead_jobs(1, using=alias, task="b", task_id="other")
    url = f"{DEAD}?task=a"
    done = "requeued" if action == "requeue_selected" else "discarded"

    answer = begin(superuser, url, action, jobs[0], reason="<b>repaired")

    assert f"2 dead jobs were {done}. Some remain" in text(answer)
    assert "Remaining jobs: 5" in text(answer)
    assert "5 a builtins.Trouble" in text(answer)
    assert len(left(alias)) == 6
    assert lines() == [f"2 dead jobs were {done}."]
    answer = superuser.post(url, rest(answer))
    assert f" 4 dead jobs were {done}. Some remain" in text(answer)
    answer, pressed = finish(superuser, url, answer)
    assert pressed
    assert said(answer)[-1] == f"7 dead jobs were {done}."
    assert answer.url == url
    assert left(alias) == ["other"]
    expected = [job.task_id for job in jobs] if done == "requeued" else []
    staged = StagedJob.objects.using(alias).order_by("id").values_list("task_id", flat=True)
    assert list(staged) == expected
    assert sum(int(line.split()[0]) for line in lines()) == 7
    assert {entry.get_change_message().partition(". ")[2] for entry in LogEntry.objects.all()} == {
        f"Action: {action}. Rows: task=a. Reason: <b>repaired"
    }


def test_who_closes_the_page_leaves_whole_batches_and_their_line(alias, superuser):
    jobs = dead_jobs(5, using=alias)
    begin(superuser, DEAD, "requeue_selected", jobs[0])
    assert left(alias) == sorted(job.task_id for job in jobs[2:])
    assert left(alias, StagedJob) == sorted(job.task_id for job in jobs[:2])
    assert lines() == ["2 dead jobs were requeued."]

    answer, _ = finish(superuser, DEAD, begin(superuser, DEAD, "requeue_selected", jobs[2]))
    assert said(answer)[-1] == "3 dead jobs were requeued."
    assert left(alias) == []


def test_a_part_that_changes_no_row_has_no_line(alias, superuser):
    """Only an action that changed none has one, at its end."""
    for staged_id, task in enumerate("bbbbabbbb"):
        [job] = dead_jobs(using=alias, staged_id=staged_id, task=task)
    for done in ("1 dead job was", "0 dead jobs were"):
        url = f"{DEAD}?task=a"
        _, pressed = finish(superuser, url, begin(superuser, url, "discard_selected", job))
        assert pressed > 1
        assert lines()[-1] == f"{done} discarded."
    assert len(lines()) == 2


def test_selected_rows_are_sliced_too(alias, superuser):
    jobs = dead_jobs(5, using=alias)
    answer = begin(superuser, DEAD, "discard_selected", *jobs[:4], across=False)
    assert len(left(alias)) == 3
    answer, _ = finish(superuser, DEAD, answer)
    assert left(alias) == [jobs[4].task_id]
    assert said(answer)[-1] == "4 dead jobs were discarded."


def test_rows_that_come_meanwhile_are_left_alone(alias, superuser):
    jobs = dead_jobs(5, using=alias)
    answer = begin(superuser, DEAD, "discard_selected", jobs[0])
    # Lower and higher in the order in which rows are taken.
    late = dead_jobs(2, using=alias, staged_id=0) + dead_jobs(2, using=alias, staged_id=10**9)
    answer = superuser.post(DEAD, rest(answer))
    assert "Remaining jobs: 1 " in text(answer)
    finish(superuser, DEAD, answer)
    assert left(alias) == sorted(job.task_id for job in late)


def test_rows_do_not_grow_out_of_a_filter_by_age(alias, superuser):
    """What died within the last hour when it was asked about did so for the whole decision."""
    jobs = dead_jobs(4, using=alias)
    url = f"{DEAD}?died=1h"
    answer = begin(superuser, url, "discard_selected", jobs[0])
    asked = parse_datetime(hidden(answer)["asked"][0])
    rows = DeadJob.objects.using(alias)
    rows.update(died_at=DatabaseNow() - timedelta(minutes=61))
    finish(superuser, url, superuser.post(url, rest(answer)))
    assert len(left(alias)) == 2  # had died earlier, as the question sees it

    earlier = {"asked": (asked - timedelta(minutes=5)).isoformat()}
    form = selection("discard_selected", jobs[2], **batch(jobs[3].pk))
    finish(superuser, url, superuser.post(url, {**form, **earlier, "select_across": 1}))
    assert left(alias) == []


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "x",
        "2026-01-01",
        "9999-99-99T00:00",
        "0001-01-01T00:00:00+00:00",
        "9999-12-31T23:59:59-23:59",
    ],
)
def test_a_forged_time_is_no_time(alias, superuser, asked):
    jobs = dead_jobs(2, using=alias)
    url = f"{DEAD}?died=1h"
    form = selection("discard_selected", jobs[0], **batch(jobs[1].pk))
    finish(superuser, url, superuser.post(url, {**form, "asked": asked, "select_across": 1}))
    assert left(alias) == []


@pytest.mark.parametrize("action", ["requeue_selected", "discard_selected"])
def test_a_form_that_is_posted_again_changes_no_row_twice(alias, superuser, action):
    jobs = dead_jobs(5, using=alias)
    answer = begin(superuser, DEAD, action, jobs[0])
    finish(superuser, DEAD, superuser.post(DEAD, rest(answer)))
    assert left(alias) == []
    before = lines()
    finish(superuser, DEAD, superuser.post(DEAD, rest(answer)))  # Back, and Continue
    assert lines() == before
    staged = sorted(job.task_id for job in jobs) if action == "requeue_selected" else []
    assert left(alias, StagedJob) == staged


def test_forms_that_are_posted_twice_count_every_row_once(alias, superuser):
    jobs = dead_jobs(9, using=alias)
    form = rest(begin(superuser, DEAD, "discard_selected", jobs[0]))
    answers = [superuser.post(DEAD, form) for _ in range(2)]
    for answer in answers:
        finish(superuser, DEAD, answer)
    assert sum(int(line.split()[0]) for line in lines()) == 9


def test_what_could_not_be_done_stops_it_with_what_was_done(alias, superuser, monkeypatch):
    jobs = dead_jobs(5, using=alias)
    answer = begin(superuser, DEAD, "requeue_selected", jobs[0])

    def refuse(*args, **kwargs):
        raise InvalidJob("too large")

    monkeypatch.setattr(dead, "record_requeue", refuse)
    answer = superuser.post(DEAD, rest(answer))
    assert said(answer)[-1] == "2 dead jobs were requeued. Stopped half-way: too large"
    assert lines()[1:] == ["0 dead jobs were requeued. Stopped half-way: too large"]
    assert len(left(alias)) == 3


def test_what_was_done_before_a_defect_is_in_the_log(alias, superuser, monkeypatch):
    jobs = dead_jobs(5, using=alias)
    form = rest(begin(superuser, DEAD, "requeue_selected", jobs[0]))
    record = dead.record_requeue

    def fail_the_second_time(**kwargs):
        monkeypatch.setattr(dead, "record_requeue", None)
        return record(**kwargs)

    monkeypatch.setattr(actions, "SECONDS", 60)
    monkeypatch.setattr(dead, "record_requeue", fail_the_second_time)
    with pytest.raises(TypeError):
        superuser.post(DEAD, form)
    assert len(left(alias)) == 1
    [_, line] = lines()
    assert line.startswith("2 dead jobs were requeued. Stopped half-way: 'NoneType' ")


@pytest.mark.parametrize("name", ["until", "after", "done"])
@pytest.mark.parametrize("value", ["", "x", "1.5", "9" * 5000, "\x00", 2**63, -(2**63) - 1])
def test_a_forged_form_changes_nothing(superuser, name, value):
    jobs = dead_jobs(7, using="default")
    form = rest(begin(superuser, DEAD, "requeue_selected", jobs[0]))
    before = left("default")
    answer = superuser.post(DEAD, {**form, name: value})
    assert f"(Hidden field {name})" in text(answer)
    assert left("default") == before


def test_a_form_without_the_highest_id_changes_nothing(superuser):
    [job] = dead_jobs(using="default")
    form = selection("discard_selected", job, confirmed="yes", reason="why")
    assert "(Hidden field until) This field is required." in text(superuser.post(DEAD, form))
    assert left("default") == [job.task_id]


def test_who_loses_the_permission_does_not_go_on(alias, log_in):
    jobs = dead_jobs(5, using=alias)
    client = log_in("requeuer")
    form = rest(begin(client, DEAD, "requeue_selected", jobs[0]))
    from django.contrib.auth.models import User

    User.objects.get().user_permissions.filter(codename="requeue_deadjob").delete()
    client.post(DEAD, form)
    assert len(left(alias)) == 3


@pytest.mark.parametrize("staged_ids", [range(8), [1, 1, 1, 1, 1, 2, 2], range(-4, 3)])
def test_no_row_lies_between_two_slices(alias, superuser, staged_ids):
    jobs = [dead_jobs(using=alias, staged_id=staged_id)[0] for staged_id in staged_ids]
    answer, _ = finish(superuser, DEAD, begin(superuser, DEAD, "discard_selected", jobs[0]))
    assert said(answer)[-1] == f"{len(jobs)} dead jobs were discarded."
    assert left(alias) == []


@pytest.mark.parametrize("tasks", ["abbabbabb", "bbbbbbbaa", "abababab", "bbb"])
def test_nor_between_two_looks(alias, superuser, tasks):
    for staged_id, task in enumerate(tasks):
        [job] = dead_jobs(using=alias, staged_id=staged_id, task=task)
    url = f"{DEAD}?task=a"
    answer, _ = finish(superuser, url, begin(superuser, url, "discard_selected", job))
    assert said(answer)[-1].startswith(f"{tasks.count('a')} dead job")
    assert len(left(alias)) == tasks.count("b")


def test_staged_jobs_are_decided_on_in_slices_too(alias, superuser):
    jobs = staged_jobs(5, using=alias, task="a")
    [other] = staged_jobs(using=alias, task="b")
    url = f"{STAGED}?task=a"
    answer, pressed = finish(superuser, url, begin(superuser, url, "cancel_selected", jobs[0]))
    assert pressed >= 2
    assert said(answer)[-1] == "5 staged jobs were cancelled."
    assert left(alias, StagedJob) == [other.task_id]
    assert all(entry.is_deletion() for entry in LogEntry.objects.all())


def test_a_slice_ends_when_its_time_is_over(alias):
    """Not before: with time enough one slice does it all."""
    dead_jobs(7, using=alias)
    rows = DeadJob.objects.using(alias)
    times = iter([0, 1, 2, 3, 99, 99])
    options = {"order": "staged_id", "until": 10**9, "clock": lambda: next(times)}
    found = bulk.run_for(rows.all(), len, seconds=3, **options)
    assert found.done < 7
    assert found.after is not None
    options["clock"] = lambda: 0
    found = bulk.run_for(rows.all(), len, seconds=3, **options)
    assert (found.done, found.after) == (7, None)


def test_a_question_about_a_task_id_is_not_answered_for_its_children(alias, superuser):
    [parent] = dead_jobs(1, using=alias, task_id="parent-1")
    dead_jobs(3, using=alias, envelope='{"headers": {"root_id": "parent-1"}}')
    url = f"{DEAD}?q=parent-1"
    form = hidden(superuser.post(url, selection("discard_selected", parent, select_across=1)))
    for _ in range(2):  # twice the same
        answer = superuser.post(url, {**form, "confirmed": "yes", "reason": "why"})
        answer, _ = finish(superuser, url, answer)
    assert said(answer)[-1] == "0 dead jobs were discarded."
    assert len(left(alias)) == 3
