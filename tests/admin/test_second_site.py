"""A project with two admin sites: the links of a page stay on the page's site."""

from __future__ import annotations

import re

import pytest
from django.contrib import admin
from django.db import transaction
from django.urls import path

from outbox_app.events import publish
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.models import DeadJob, Overview
from tests.jobs.dead.rows import dead_jobs

from .pages import body, text

operators = admin.AdminSite(name="operators")
for model, pages in admin.site._registry.items():
    operators.register(model, type(pages))

support = admin.AdminSite(name="support")
for model in (DeadJob, Gap, Overview, Subscription):
    support.register(model, type(admin.site._registry[model]))

urlpatterns = [path(f"{site.name}/", site.urls) for site in (admin.site, operators, support)]

FAILED = {"position": 7, "type": "t", "stream": "s", "traceback": "no"}


@pytest.fixture(autouse=True)
def two_sites(settings):
    settings.ROOT_URLCONF = __name__


def links(client, address):
    found = re.findall(r'href="(/[^"]*)"', body(client.get(f"/operators/{address}")))
    assert found
    return {link for link in found if link.startswith("/admin/")}


def test_links_of_the_overview(superuser):
    dead_jobs(using="default")
    Gap.objects.create(kind="version", log="outbox_event", stream="s", first=2, last=3)
    Subscription.objects.create(name="mail", paused=True)
    assert links(superuser, "outbox_app/overview/") == set()


def test_links_of_rows(superuser):
    with transaction.atomic():
        publish("order-1", "placed")
    event = Event.objects.get()
    gap = Gap.objects.create(kind="id", log="outbox_event", first=event.pk + 1, last=event.pk + 1)
    Subscription.objects.create(name="mail")
    columns = {"log": "outbox_event", "subscription": "mail", "partition": 0}
    Cursor.objects.create(**columns, state={}, error="no", failed_event=FAILED)
    parked = ParkedStream.objects.create(
        **columns, stream="s", version=1, position=7, error="no", failed_event=FAILED
    )
    for address in (
        "outbox_events/subscription/mail/change/",
        f"outbox_events/parkedstream/{parked.pk}/change/",
        f"outbox_events/gap/{gap.pk}/change/",
        f"outbox_events/event/{event.pk}/change/",
        "outbox_events/event/",
    ):
        assert links(superuser, address) == set(), address
    shown = text(superuser.get(f"/operators/outbox_events/parkedstream/{parked.pk}/change/"))
    assert "Event: 7: t s Error: no Traceback: no" in shown


def test_a_site_with_some_of_the_pages(superuser):
    """Where a site does not have a page, its other pages have no link to it."""
    [job] = dead_jobs(using="default")
    with transaction.atomic():
        publish("order-1", "placed")
    gap = Gap.objects.create(kind="id", log="outbox_event", first=10**6, last=10**6)
    Subscription.objects.create(name="mail", paused=True)
    columns = {"log": "outbox_event", "subscription": "mail", "partition": 0}
    Cursor.objects.create(**columns, state={}, error="no", failed_event=FAILED)
    for address in (
        "outbox_app/overview/",
        "outbox_app/deadjob/",
        f"outbox_app/deadjob/{job.pk}/change/",
        f"outbox_events/gap/{gap.pk}/change/",
        "outbox_events/subscription/mail/change/",
    ):
        page = superuser.get(f"/support/{address}")
        assert page.status_code == 200
        assert 'href=""' not in body(page)
    assert "/support/outbox_app/deadjob/" in body(superuser.get("/support/outbox_app/overview/"))
