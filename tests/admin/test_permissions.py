"""Who may see and do what: every address, role and method."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.urls import get_resolver

from outbox_app.models import (
    DeadJob,
    Drainer,
    Event,
    Gap,
    Incident,
    ParkedStream,
    StagedJob,
    Statistic,
    Subscription,
)
from tests.dead.rows import dead_jobs, staged_jobs
from tests.dead.test_status import drainer

from .conftest import ROLES
from .pages import APP, DEAD, DRAINERS, INCIDENTS, OVERVIEW, STAGED, hidden, page, selection

LOGIN, OK, FORBIDDEN = 302, 200, 403
#: Roles that may look at everything.
SEEING = ("viewer", "requeuer", "discarder", "canceller", "superuser")


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
def test_a_staged_job_is_cancelled_by_those_who_may_delete_it(log_in, role):
    client = log_in(role)
    staged, *others = rows()
    allowed = role in ("canceller", "blind", "superuser")
    assert client.get(page(staged, "delete")).status_code == (
        LOGIN if role == "anonymous" else OK if allowed else FORBIDDEN
    )
    response = client.post(page(staged, "delete"), {"post": "yes"})
    assert response.status_code == (302 if allowed or role == "anonymous" else 403)
    assert StagedJob.objects.exists() != allowed
    for row in others:  # these go by other ways, or by themselves
        client.post(page(row, "delete"), {"post": "yes"})
        assert type(row).objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize("action", ["requeue", "discard"])
@pytest.mark.parametrize("role", ROLES)
def test_dead_jobs_are_decided_on_by_those_who_may(log_in, role, action):
    client = log_in(role)
    allowed = role in ({"requeue": "requeuer", "discard": "discarder"}[action], "superuser")
    [job] = dead_jobs(using="default")
    form = {"until": job.pk, "confirmed": "yes"}

    offered = client.get(DEAD)
    assert (f'value="{action}_selected"' in offered.content.decode()) == allowed
    offered = client.get(page(job))
    assert (f'value="{action}_selected"' in offered.content.decode()) == allowed
    client.post(DEAD, selection(f"{action}_selected", job, **form))

    assert DeadJob.objects.exists() != allowed
    assert StagedJob.objects.exists() == (allowed and action == "requeue")


@pytest.mark.parametrize("method", ["get", "head", "put", "delete", "patch"])
def test_nothing_is_decided_except_by_post(superuser, method):
    [job] = dead_jobs(using="default")
    form = selection("discard_selected", job, until=job.pk, confirmed="yes")
    getattr(superuser, method)(DEAD, form)
    assert DeadJob.objects.exists()
    assert not StagedJob.objects.exists()


@pytest.mark.parametrize("action", ["requeue_selected", "discard_selected"])
def test_nothing_is_decided_without_a_csrf_token(log_in, action):
    client = log_in("superuser", enforce_csrf_checks=True)
    [job] = dead_jobs(using="default")
    [staged] = staged_jobs(using="default")
    form = selection(action, job, until=job.pk, confirmed="yes")
    assert client.post(DEAD, form).status_code == 403
    assert client.post(page(staged, "delete"), {"post": "yes"}).status_code == 403
    assert DeadJob.objects.exists()
    assert StagedJob.objects.exists()

    del form["confirmed"], form["index"]
    token = hidden(client.get(page(job)))["csrfmiddlewaretoken"]
    question = client.post(DEAD, {**form, "csrfmiddlewaretoken": token})
    client.post(DEAD, {**hidden(question), "confirmed": "yes"})  # its form holds a token
    assert not DeadJob.objects.exists()


def test_the_overview_takes_no_post(superuser):
    assert superuser.post(OVERVIEW).status_code == 405


def test_the_overview_shows_what_one_may_view(log_in):
    dead_jobs(using="default", task="shop.dead")
    Incident.objects.create(kind="unknown", first_id=1, last_id=2, detail="shop.incident")

    def seen(*permissions):
        User.objects.filter(username="<b>staff</b>").delete()
        client = log_in("staff", permissions=("view_drainer", *permissions))
        content = client.get(OVERVIEW).content.decode()
        return ["shop.dead" in content, "shop.incident" in content, "outbox-figures" in content]

    assert seen() == [False, False, False]
    assert seen("view_deadjob") == [True, False, False]
    assert seen("view_incident") == [False, True, False]
    assert seen("view_stagedjob") == [False, False, True]


@pytest.mark.parametrize("role", ["staff", "viewer"])
def test_the_apps_index_leads_to_the_overview(log_in, role):
    content = log_in(role, permissions=["view_deadjob"] if role == "staff" else []).get(APP)
    assert (f'href="{OVERVIEW}"' in content.content.decode()) == (role == "viewer")


def test_the_matrix_knows_every_address():
    """A new page has to find its place above; those of the log: in test_subscriptions.py."""
    patterns = get_resolver().url_patterns[0].url_patterns
    names = {
        inner.name
        for outer in patterns
        for inner in getattr(outer, "url_patterns", [])
        if (inner.name or "").startswith("outbox_app_")
    }
    above = (StagedJob, DeadJob, Drainer, Incident)
    of_the_log = (Event, Subscription, ParkedStream, Gap, Statistic)
    models = [model._meta.model_name for model in (*above, *of_the_log)]
    pages = ("changelist", "add", "history", "delete", "change")
    assert names == {
        "outbox_app_overview",
        *(f"outbox_app_{model}_{name}" for model in models for name in pages),
    }
