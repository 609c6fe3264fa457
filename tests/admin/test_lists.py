"""Lists show the right rows, filtered, with a bounded number of bounded statements."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.admin.tables import durations
from outbox_app.database.clock import DatabaseNow
from outbox_app.models import DeadJob, Incident, counting
from outbox_app.text import duration
from tests.jobs.dead.rows import dead_jobs, staged_jobs
from tests.jobs.dead.test_status import drainer, hold

from .pages import (
    APP,
    DEAD,
    DRAINERS,
    INCIDENTS,
    OVERVIEW,
    STAGED,
    batch,
    body,
    page,
    said,
    selection,
    text,
)

EVERY_PAGE = (STAGED, DEAD, DRAINERS, INCIDENTS, OVERVIEW, APP)


def listed(response):
    """Task ids on a page, from the top."""
    return re.findall(r'class="field-task_id[^"]*">([^<]*)<', body(response))


def statements(client, url, alias):
    with CaptureQueriesContext(connections[alias]) as queries:
        body(client.get(url))
    return [q["sql"] for q in queries if "outbox_" in q["sql"]]


@pytest.mark.parametrize("url", [STAGED, DEAD, DRAINERS, INCIDENTS, APP])
def test_the_number_of_statements_does_not_depend_on_the_rows(alias, superuser, url):
    dead_jobs(using=alias)
    staged_jobs(using=alias)
    before = statements(superuser, url, alias)
    for number in range(40):
        dead_jobs(4, using=alias, task=f"t{number}", error=f"e{number}", queue=f"q{number}")
        staged_jobs(4, using=alias, task=f"t{number}")
        drainer(alias)
        Incident.objects.using(alias).create(kind="unknown", first_id=1, last_id=2)
    after = statements(superuser, url, alias)
    assert len(after) == len(before) <= 10


@pytest.mark.parametrize(("rows", "most"), [(staged_jobs, 4), (dead_jobs, 2)])
def test_a_page_of_a_row_takes_a_few_statements(alias, superuser, rows, most):
    [row] = rows(using=alias)
    assert len(statements(superuser, page(row), alias)) <= most


@pytest.mark.parametrize("url", [STAGED, DEAD])
def test_no_list_counts_or_reads_without_a_limit(alias, superuser, url):
    staged_jobs(150, using=alias)
    dead_jobs(150, using=alias)
    for sql in statements(superuser, f"{url}?o=2.3.-5", alias):
        assert "LIMIT" in sql, sql
        assert '"body"' not in sql.replace("`", '"'), "messages are not for lists"
        assert not re.search(r"ORDER BY .*(task|queue|error)", sql), sql


def test_counting_stops_and_the_list_says_so(alias, superuser, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 120)
    jobs = staged_jobs(120, using=alias)
    assert "Looked through" not in text(superuser.get(STAGED))
    jobs += staged_jobs(1, using=alias)
    newest = superuser.get(STAGED)
    assert f"Looked through the newest 120 rows, from {jobs[1].pk} on." in text(newest)
    assert len(listed(superuser.get(f"{STAGED}?p=2"))) == 20


def test_newest_first(alias, superuser):
    first, second = dead_jobs(2, using=alias)
    assert listed(superuser.get(DEAD)) == [second.task_id, first.task_id]
    assert listed(superuser.get(f"{DEAD}?o=4")) == [first.task_id, second.task_id]


def test_reason_and_time_come_before_ids_and_classes_without_their_path(alias, superuser):
    [job] = dead_jobs(using=alias, error="kombu.exceptions.Boom", reason="NO_ROUTE")
    shown = body(superuser.get(DEAD))
    columns = re.findall(r'class="field-(\w+)', shown)
    assert columns == ["task", "short_error", "short_reason", "died", "task_id"]
    assert ">Boom<" in shown
    assert "Error: kombu.exceptions.Boom" in text(superuser.get(page(job)))


def test_a_whole_task_id_is_found_alone(alias, superuser):
    for rows, url in ((staged_jobs, STAGED), (dead_jobs, DEAD)):
        rows(using=alias, task_id="an id with spaces")
        rows(using=alias, task_id="An ID")
        assert listed(superuser.get(url, {"q": " an id with spaces "})) == ["an id with spaces"]
        assert listed(superuser.get(url, {"q": "An ID"})) == ["An ID"]
        assert listed(superuser.get(url, {"q": "\x00"})) != []  # refused: the list is unfiltered


@pytest.mark.parametrize(
    ("term", "found"),
    [
        ("send_rec", ["receipt"]),
        ("shop.tasks", ["mail", "receipt"]),
        ("0f3c", ["receipt"]),
        ("order-17", ["mail"]),
        ("order-1", []),  # a key is given whole
        ("'grün'", ["mail"]),
        ("100%", ["receipt"]),
        ("1_0", []),
        ("nowhere", []),
    ],
)
def test_a_search_by_task_key_argument_and_beginning_of_an_id(alias, superuser, term, found):
    for rows, url in ((staged_jobs, STAGED), (dead_jobs, DEAD)):
        shop = {"task": "shop.tasks.send_receipt", "envelope": json.dumps({"args": "('100%',)"})}
        mail = {"task": "shop.tasks.mail", "envelope": json.dumps({"args": "('grün',)"})}
        rows(using=alias, task_id="0f3c-receipt", **shop)
        rows(using=alias, task_id="9a0b-mail", ordering_key="order-17", **mail)
        ids = sorted(id.partition("-")[2] for id in listed(superuser.get(url, {"q": term})))
        assert ids == found


def test_arguments_are_searched_by_those_who_may_see_them(alias, log_in):
    dead_jobs(using=alias, envelope='{"argsrepr": "(17, \'green\')"}')
    assert listed(log_in("viewer").get(DEAD, {"q": "green"})) == []
    seer = log_in("requeuer", permissions=("view_payload_deadjob",))
    assert len(listed(seer.get(DEAD, {"q": "green"}))) == 1


def test_a_search_looks_at_the_window_unless_an_index_leads_there(alias, superuser, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    dead_jobs(using=alias, task_id="old", task="rare")
    dead_jobs(4, using=alias)
    assert listed(superuser.get(DEAD, {"q": "old"})) == ["old"]
    assert listed(superuser.get(DEAD, {"q": "rare"})) == []
    for term, bounded in (("", True), ("\x00", True), ("rare", True), ("old", False)):
        window = superuser.get(DEAD, {"q": term}).context["cl"].row_range
        assert (window is not None) == bounded, term


def test_dead_jobs_are_filtered(alias, superuser):
    dead_jobs(using=alias, task_id="1", task="a", error="E", queue="q")
    rows = DeadJob.objects.using(alias)
    rows.update(died_at=DatabaseNow() - timedelta(hours=2))
    dead_jobs(using=alias, task_id="2", task="b & c", error="F", queue="")
    for query, expected in (
        ({"task": "a"}, ["1"]),
        ({"task": "b & c", "error": "F"}, ["2"]),
        ({"error": "E"}, ["1"]),
        ({"queue": ""}, ["2"]),
        ({"died": "1h"}, ["2"]),
        ({"died": "3h"}, ["2", "1"]),
        ({"died": "nonsense"}, []),
        ({"died": ""}, []),
        ({"task": "A"}, []),
        ({"task": "never seen"}, []),
    ):
        assert listed(superuser.get(DEAD, query)) == expected, query


def test_staged_jobs_are_filtered_by_state(alias, superuser):
    ready, due, later = staged_jobs(3, using=alias)
    hold(alias, due, minutes=-5)
    hold(alias, later, minutes=5)
    ids = [job.task_id for job in (later, due, ready)]
    assert listed(superuser.get(STAGED)) == ids
    assert listed(superuser.get(STAGED, {"state": "ready"})) == ids[2:]
    assert listed(superuser.get(STAGED, {"state": "held"})) == ids[:2]
    assert listed(superuser.get(STAGED, {"state": "due"})) == [due.task_id]
    assert listed(superuser.get(STAGED, {"state": "nonsense"})) == []


def test_an_action_on_what_no_row_can_have_reaches_no_row(alias, superuser):
    """As with an address that was mistyped: the page says that it is filtered."""
    [job] = dead_jobs(using=alias)
    form = selection("discard_selected", job, **batch(job.pk))
    answer = superuser.post(f"{DEAD}?died=1x", {**form, "select_across": 1})
    assert said(answer) == ["0 dead jobs were discarded."]
    assert DeadJob.objects.using(alias).get() == job


def test_times_have_their_zone(alias, superuser, settings):
    [job] = dead_jobs(using=alias)
    for address in (DEAD, page(job)):
        assert "Times are in America/Chicago." in text(superuser.get(address))
    settings.TIME_ZONE = "Europe/Vienna"
    assert "Times are in Europe/Vienna." in text(superuser.get(DEAD))
    assert " in Europe/Vienna. Database alias" in text(superuser.get(OVERVIEW))


def test_buttons_are_for_one_row_or_for_several(alias, superuser):
    [job] = dead_jobs(using=alias)
    assert "Requeue dead jobs …" in text(superuser.get(DEAD))
    assert "Requeue the job …" in text(superuser.get(page(job)))


def test_nothing_is_offered_over_an_empty_list(alias, superuser):
    assert "Requeue dead jobs …" not in text(superuser.get(DEAD))
    dead_jobs(using=alias)
    assert "Requeue dead jobs …" not in text(superuser.get(DEAD, {"task": "another"}))


@pytest.mark.parametrize(
    "query", ["body__contains=x", "envelope__regex=x", "reason__contains=x", "task__iregex=(a*)*b"]
)
def test_lookups_that_are_not_offered_are_refused(superuser, query):
    assert superuser.get(f"{DEAD}?{query}").status_code == 400


@pytest.mark.parametrize("name", ["task", "queue", "ordering_key"])
def test_no_row_has_what_no_database_can_compare(alias, superuser, name):
    staged_jobs(using=alias)
    assert listed(superuser.get(STAGED, {name: "\x00"})) == []


@pytest.mark.parametrize("query", ["p=99999", "p=x", "o=99.-1.x", "all=", "_popup=1", "e=1"])
def test_odd_addresses_are_answered(superuser, query):
    dead_jobs(using="default")
    assert superuser.get(f"{DEAD}?{query}", follow=True).status_code == 200


@pytest.mark.parametrize("id", ["x", "0", "9" * 30, "%00", "_2F"])
def test_pages_of_no_row_lead_back(superuser, id):
    assert superuser.get(f"{DEAD}{id}/change/").status_code == 302


def test_pages_hold_nothing_that_a_strict_policy_forbids(superuser):
    """No inline script, style or handler, and nothing from elsewhere."""
    [job] = dead_jobs(using="default", body=b"[]")
    [staged] = staged_jobs(using="default")
    question = superuser.post(DEAD, {"action": "discard_selected", "_selected_action": job.pk})
    pages = [*map(superuser.get, EVERY_PAGE), superuser.get(page(job)), superuser.get(page(staged))]
    for response in [*pages, question]:
        content = body(response)
        # Django's own, where a list has no actions: how wide a column is that is not there.
        content = re.sub(r"<style>\s*#changelist table thead[^<]*</style>", "", content)
        assert "<style" not in content
        assert not re.findall(r"<script(?![^>]*\bsrc=)", content)
        assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", content)
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', content)


def test_durations_are_readable():
    assert [duration(s) for s in (0, 59.9, 60, 3599, 3600, 86399, 86400, 90000)] == [
        "0 s",
        "59 s",
        "1 min",
        "59 min",
        "1 h 0 min",
        "23 h 59 min",
        "1 d 0 h",
        "1 d 1 h",
    ]


def test_a_filter_shows_the_words_that_the_column_shows(alias, superuser):
    Incident.objects.using(alias).create(kind="unknown", first_id=1, last_id=2)
    Incident.objects.using(alias).create(kind="of old", first_id=1, last_id=2)
    links = re.findall(r'<a href="\?kind=[^"]*"[^>]*>\s*([^<]*)<', body(superuser.get(INCIDENTS)))
    assert [each.strip() for each in links] == [
        "of old",
        "may have been sent twice: the end of a send is unknown",
    ]


def test_percentiles_of_nothing_are_one_dash():
    assert durations([None, None]) == "-"
    assert durations([0.25, None]) == "250 ms, -"
