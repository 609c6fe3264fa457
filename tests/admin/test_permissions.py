"""The permissions of every role, for every URL and method."""

from __future__ import annotations

import re

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import get_resolver, reverse

from outbox_app.django_tasks.models import TaskResult
from outbox_app.events.models import Event, Gap, ParkedStream, Subscription
from outbox_app.fleet.models import Server
from outbox_app.models import DeadJob, Incident, Process, StagedJob, Statistic
from outbox_app.prepared.models import PreparedEvent
from tests.fixtures.admin import ROLES
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
    hidden,
    page,
    selection,
    text,
)

LOGIN, OK, FORBIDDEN = 302, 200, 403
#: Roles that may look at everything.
SEEING = ("viewer", "requeuer", "discarder", "canceller", "superuser")
#: What each decision takes: the role that has it.
DECIDING = {
    "requeue": "requeuer",
    "discard": "discarder",
    "cancel": "canceller",
}


def rows():
    return (
        staged_jobs(using="default")[0],
        dead_jobs(using="default")[0],
        drainer("default"),
        Incident.objects.create(kind="unknown", first_id=1, last_id=2),
    )


@pytest.mark.parametrize("role", ROLES)
def test_pages_are_seen_by_those_who_may_view(log_in, role):
    client = log_in(role)
    expected = LOGIN if role == "anonymous" else OK if role in SEEING else FORBIDDEN
    addresses = [STAGED, DEAD, DRAINERS, INCIDENTS, OVERVIEW, *map(page, rows())]
    found = {address: client.get(address).status_code for address in addresses}
    assert found == dict.fromkeys(addresses, expected)


@pytest.mark.parametrize("role", ROLES)
def test_nobody_adds_or_edits(log_in, role):
    client = log_in(role)
    refused = LOGIN if role == "anonymous" else FORBIDDEN
    for row in rows():
        assert client.get(page(row).replace(f"{row.pk}/change", "add")).status_code == refused
        assert client.post(page(row), {"task": "forged", "_save": "1"}).status_code == refused
    assert not StagedJob.objects.filter(task="forged").exists()
    assert not DeadJob.objects.filter(task="forged").exists()


@pytest.mark.parametrize("role", ROLES)
def test_nobody_deletes_without_a_reason(log_in, role):
    """Django's own page for deleting asks for none: rows go by decisions, or by themselves."""
    client = log_in(role)
    refused = LOGIN if role == "anonymous" else FORBIDDEN
    for row in rows():
        assert client.get(page(row, "delete")).status_code == refused
        assert client.post(page(row, "delete"), {"post": "yes"}).status_code == refused
        assert type(row).objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize("action", DECIDING)
@pytest.mark.parametrize("role", ROLES)
def test_jobs_are_decided_on_by_those_who_may(log_in, role, action):
    client = log_in(role)
    allowed = role in (DECIDING[action], "superuser")
    of_dead = action in ("requeue", "discard")
    [job] = dead_jobs(using="default") if of_dead else staged_jobs(using="default")
    before = content()
    url = DEAD if of_dead else STAGED
    form = batch(job.pk)

    for address in (url, page(job)):
        offered = client.get(address).content.decode()
        assert (f'value="{action}_selected"' in offered) == allowed
    client.post(url, selection(f"{action}_selected", job, **form))

    assert (content() != before) == allowed
    assert LogEntry.objects.exists() == allowed


def content():
    return [list(model.objects.order_by("pk").values()) for model in (StagedJob, DeadJob)]


@pytest.mark.parametrize("method", ["get", "head", "put", "delete", "patch"])
@pytest.mark.parametrize("action", DECIDING)
def test_nothing_is_decided_except_by_post(superuser, method, action):
    [dead] = dead_jobs(using="default")
    [staged] = staged_jobs(using="default")
    hold("default", staged, minutes=5)
    before = content()
    for url, job in ((DEAD, dead), (STAGED, staged)):
        form = batch(job.pk)
        getattr(superuser, method)(url, selection(f"{action}_selected", job, **form))
    assert content() == before


@pytest.mark.parametrize("action", DECIDING)
def test_nothing_is_decided_without_a_csrf_token(log_in, action):
    client = log_in("superuser", enforce_csrf_checks=True)
    of_dead = action in ("requeue", "discard")
    [job] = dead_jobs(using="default") if of_dead else staged_jobs(using="default")
    url = DEAD if of_dead else STAGED
    form = selection(f"{action}_selected", job, **batch(job.pk))
    before = content()
    assert client.post(url, form).status_code == 403
    assert content() == before

    del form["confirmed"], form["index"]
    token = hidden(client.get(page(job)))["csrfmiddlewaretoken"]
    question = client.post(url, {**form, "csrfmiddlewaretoken": token})
    client.post(url, {**hidden(question), "confirmed": "yes", "reason": "why"})  # holds a token
    assert content() != before


@pytest.mark.parametrize("action", DECIDING)
def test_nothing_is_decided_without_a_reason(superuser, action):
    of_dead = action in ("requeue", "discard")
    [job] = dead_jobs(using="default") if of_dead else staged_jobs(using="default")
    before = content()
    form = selection(f"{action}_selected", job, **batch(job.pk, " "))
    answer = superuser.post(DEAD if of_dead else STAGED, form)
    assert "This field is required" in text(answer)
    assert content() == before
    assert not LogEntry.objects.exists()


def test_the_overview_takes_no_post(superuser):
    assert superuser.post(OVERVIEW).status_code == 405


@pytest.mark.parametrize("role", ["staff", "viewer"])
def test_the_index_and_the_menu_lead_to_the_overview(log_in, role):
    client = log_in(role, permissions=["view_deadjob"] if role == "staff" else [])
    for address in (reverse("admin:index"), APP, DEAD):  # the last one has a sidebar
        links = re.findall(r'href="([^"]*)"', client.get(address).content.decode())
        assert (OVERVIEW in links) == (role == "viewer"), address


def test_statistics_are_not_in_the_menu(superuser):
    address = reverse("admin:outbox_app_statistic_changelist")
    assert address not in superuser.get(reverse("admin:index")).content.decode()
    assert superuser.get(address).status_code == 200


def test_the_matrix_knows_every_address():
    """A new page has to find its place above; those of the log: in test_subscriptions.py."""
    patterns = get_resolver().url_patterns[0].url_patterns
    names = {
        inner.name
        for outer in patterns
        for inner in getattr(outer, "url_patterns", [])
        if (inner.name or "").startswith("outbox_")
    }
    above = (StagedJob, DeadJob, Process, Server, Incident, TaskResult)
    of_the_log = (Event, Subscription, ParkedStream, Gap, Statistic, PreparedEvent)
    models = [f"{m._meta.app_label}_{m._meta.model_name}" for m in (*above, *of_the_log)]
    pages = ("changelist", "add", "history", "delete", "change")
    assert names == {
        *("outbox_app_overview", "outbox_app_overview_changelist"),
        *(f"{model}_{name}" for model in models for name in pages),
    }
