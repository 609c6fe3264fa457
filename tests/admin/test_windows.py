"""Lists show a window of their table, say so, and link to the rows before it."""

from __future__ import annotations

import re
from html import unescape
from uuid import uuid4

import pytest

from outbox_app.events.models import Event, Gap
from outbox_app.models import DeadJob, counting
from tests.jobs.dead.rows import dead_jobs, staged_jobs

from ..events.test_admin import EVENTS, publish
from ..events.test_admin import listed as versions
from .pages import DEAD, STAGED, body, hidden, page, selection, text
from .test_lists import listed


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)


def link(response, words):
    found = re.findall(rf'<a href="([^"]*)">{words}</a>', body(response))
    return unescape(found[0]) if found else None


@pytest.mark.parametrize(("rows", "url"), [(staged_jobs, STAGED), (dead_jobs, DEAD)])
def test_older_rows_are_reached_by_a_link(alias, superuser, rows, url):
    jobs = rows(7, using=alias)
    ids = [job.task_id for job in reversed(jobs)]
    newest = superuser.get(url)
    assert listed(newest) == ids[:3]
    assert f"Looked through the newest 3 rows, from {jobs[4].pk} on." in text(newest)
    assert link(newest, "Newest rows") is None
    older = superuser.get(url + link(newest, "Older rows"))
    assert listed(older) == ids[3:6]
    words = f"Looked through 3 rows, from {jobs[1].pk} on, before {jobs[4].pk}."
    assert words in text(older)
    oldest = superuser.get(url + link(older, "Older rows"))
    assert listed(oldest) == ids[6:]
    assert f"Looked through the rows before {jobs[1].pk}, to the oldest." in text(oldest)
    assert link(oldest, "Older rows") is None
    assert listed(superuser.get(url + link(oldest, "Newest rows"))) == ids[:3]


def test_a_filter_is_applied_inside_and_kept_by_the_links(alias, superuser):
    [old] = dead_jobs(using=alias, task="rare")
    dead_jobs(3, using=alias)
    newest = superuser.get(DEAD, {"task": "rare"})
    assert listed(newest) == []
    assert listed(superuser.get(DEAD + link(newest, "Older rows"))) == [old.task_id]


def test_a_table_that_fits_says_nothing(alias, superuser):
    dead_jobs(3, using=alias)
    assert "Looked through" not in text(superuser.get(DEAD))


@pytest.mark.parametrize("before", ["x", "", "-1", "٣", "9" * 5000, str(2**63)])
def test_an_odd_end_is_no_end(alias, superuser, before):
    jobs = dead_jobs(2, using=alias)
    assert len(listed(superuser.get(DEAD, {"before": before}))) == len(jobs)


def test_all_that_match_are_those_outside_too_and_the_question_says_so(alias, superuser):
    jobs = dead_jobs(5, using=alias, task="a") + dead_jobs(2, using=alias, task="b")
    url = f"{DEAD}?task=a"
    question = superuser.post(url, selection("discard_selected", jobs[4], select_across=1))
    shown = text(question)
    assert "Number of jobs: 1+ , counted among the newest 3 rows." in shown
    assert "The action changes all that match the filter, older ones too." in shown
    superuser.post(url, {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert not DeadJob.objects.using(alias).filter(task="a").exists()
    assert DeadJob.objects.using(alias).filter(task="b").count() == 2


def test_all_that_match_are_decided_on_though_none_is_listed(alias, superuser):
    dead_jobs(2, using=alias, task="rare")
    dead_jobs(3, using=alias)
    url = f"{DEAD}?task=rare"
    shown = superuser.get(url)
    assert listed(shown) == []
    form = body(shown).partition('class="outbox-all"')[2]
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form))
    assert fields.pop("csrfmiddlewaretoken")
    assert 'name="action" value="discard_selected"' in form
    question = superuser.post(url, {**fields, "action": "discard_selected"})
    assert "Number of jobs: 0+" in text(question)
    superuser.post(url, {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert set(DeadJob.objects.using(alias).values_list("task", flat=True)) == {"shop.send"}


def test_a_dead_job_is_found_by_its_task_id_wherever_it_is(alias, superuser):
    dead_jobs(using=alias, task_id="old")
    dead_jobs(3, using=alias)
    found = superuser.get(DEAD, {"q": "old"})
    assert listed(found) == ["old"]
    assert "Looked through" not in text(found)


@pytest.mark.django_db(transaction=True)
def test_a_stream_is_paged_by_version(alias, superuser, new_log):
    publish(alias, *["a"] * 7, "b", "c", "d", "e")
    for query in ({"stream": "a"}, {"q": "a"}):
        newest = superuser.get(EVENTS, query)
        assert versions(newest) == ["7", "6", "5"]
        older = superuser.get(EVENTS + link(newest, "Older rows"))
        assert versions(older) == ["4", "3", "2"]
        assert versions(superuser.get(EVENTS + link(older, "Older rows"))) == ["1"]


@pytest.mark.django_db(transaction=True)
def test_one_goes_through_a_stream_from_event_to_event(alias, superuser, new_log):
    publish(alias, "a", "x", "a", "y", "a")
    first, middle, last = Event.objects.using(alias).filter(stream="a").order_by("version")

    def links(event):
        found = re.findall(r'<a href="([^"]*)">(before|after): (\d+)</a>', body(
            superuser.get(page(event))
        ))  # fmt: skip
        return {words: (url, int(version)) for url, words, version in found}

    assert links(first) == {"after": (page(middle), 2)}
    assert links(middle) == {"before": (page(first), 1), "after": (page(last), 3)}
    assert links(last) == {"before": (page(middle), 2)}


@pytest.mark.django_db(transaction=True)
def test_a_stream_may_be_named_like_a_message_id(alias, superuser, new_log):
    name = str(uuid4())
    [event] = publish(alias, name)
    assert versions(superuser.get(EVENTS, {"q": name})) == ["1"]
    assert versions(superuser.get(EVENTS, {"q": str(event.message_id)})) == ["1"]
    assert versions(superuser.get(EVENTS, {"q": str(uuid4())})) == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["version", "id"])
def test_a_gap_is_shown_with_what_is_around_it(alias, superuser, new_log, kind):
    publish(alias, *["<b>"] * 4, *["other"] * 4)
    rows = Event.objects.using(alias)
    first, gone, _, last = rows.filter(stream="<b>").order_by("id")
    numbers = (gone.pk, last.pk - 1) if kind == "id" else (2, 3)
    row = Gap.objects.using(alias).create(
        kind=kind,
        log="outbox_event",
        stream="" if kind == "id" else "<b>",
        first=numbers[0],
        last=numbers[1],
    )
    gone.delete(using=alias)
    shown = text(superuser.get(page(row)))
    assert f"Before: {first.pk}: made <b>@1" in shown
    assert "Inside: 1 After:" in shown
    assert f"After: {last.pk}: made <b>@4" in shown
    assert f'href="{page(last)}"' in body(superuser.get(page(row)))
    rows.all().delete()
    shown = text(superuser.get(page(row)))
    assert "Before: nothing Inside: 0 After: nothing" in shown
    Gap.objects.using(alias).update(log="their_log")
    assert "The gap is in another log." in text(superuser.get(page(row)))
