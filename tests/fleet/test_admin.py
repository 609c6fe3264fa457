"""Servers of the fleet in the admin: their list, who leads, and who may drain them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from outbox_app.fleet.models import Server
from outbox_app.fleet.topology import leaders_of

from ..admin.pages import OVERVIEW, hidden, page, said, selection, text

pytestmark = pytest.mark.django_db(transaction=True)

SERVERS = reverse("admin:outbox_fleet_server_changelist")
ONE, TWO = "http://127.0.0.1:1/outbox/", "http://127.0.0.1:2/outbox/"


@pytest.fixture
def fleet(alias, settings):
    """Two servers of the shop, one that died an hour ago, a client, and a server of the bank."""
    settings.OUTBOX = {**settings.OUTBOX, "FLEET": {"SERVICE": "shop"}}
    given = {"version": "1", "lease_seconds": 600}
    make = Server.objects.using(alias).create
    before = timezone.now() - timedelta(hours=1)
    make(service="shop", node="died:9", address="http://127.0.0.1:9/outbox/",
         heartbeat_at=before, **given)  # fmt: skip
    make(service="shop", node="caller:7", kind="client", **given)
    make(service="bank", node="bank:1", address=ONE, **given)
    addresses = enumerate((ONE, TWO), 1)
    return [make(service="shop", node=f"host:{n}", address=a, **given) for n, a in addresses]


def decide(client, action, row, **fields):
    question = client.post(SERVERS, selection(action, row))
    return client.post(SERVERS, {**hidden(question), "confirmed": "yes", **fields}, follow=True)


def test_servers_are_listed(fleet, superuser):
    shown = text(superuser.get(SERVERS, {"service": "shop"}))
    assert "host:1 shop 100" in shown
    assert "bank:1" not in shown
    assert "died:9" in shown  # its row is there until a process looks


def test_the_overview_says_who_leads(fleet, superuser):
    leads = leaders_of(fleet).count(ONE)
    figures = text(superuser.get(OVERVIEW))
    assert f"Leads, of 1024 slices {ONE} {leads} {TWO} {1024 - leads}" in figures
    assert "127.0.0.1:9" not in figures


@pytest.mark.parametrize("may", [False, True])
def test_who_may_change_servers_drains_them(alias, fleet, log_in, may):
    rights = ("view_server", *(["change_server"] if may else []))
    client, row = log_in("staff", permissions=rights), fleet[0]
    assert client.get(page(row)).status_code == 200
    assert client.post(page(row), {"weight": 7, "_save": "1"}).status_code == 403
    for url in (SERVERS, page(row)):
        assert ("drain_selected" in client.get(url).content.decode()) == may
    client.post(SERVERS, selection("drain_selected", row, confirmed="yes", reason="why"))
    client.post(SERVERS, selection("weight_selected", fleet[1], confirmed="yes", reason="why",
                                   weight=7))  # fmt: skip
    found = Server.objects.using(alias).filter(pk__in=[each.pk for each in fleet])
    changed = list(found.order_by("node").values_list("draining", "weight"))
    assert changed == ([(True, 100), (False, 7)] if may else [(False, 100)] * 2)
    assert LogEntry.objects.count() == 2 * may


def test_what_an_action_asks(alias, fleet, superuser):
    row = fleet[0]
    answered = decide(superuser, "drain_selected", row, reason="")
    assert "This field is required" in text(answered)
    for weight in ("-1", "101", "x", ""):
        decide(superuser, "weight_selected", row, reason="why", weight=weight)
    for id in ("7", "x" * 36, ""):
        sent = {**selection("drain_selected"), "_selected_action": [id], "confirmed": "yes"}
        assert superuser.post(SERVERS, sent).status_code == 400
    row.refresh_from_db(using=alias)
    assert (row.weight, row.draining, LogEntry.objects.count()) == (100, False, 0)
    client = Server.objects.using(alias).get(kind="client")
    sent = selection("drain_selected", client, confirmed="yes", reason="why")
    assert said(superuser.post(SERVERS, sent)) == ["0 servers were changed."]
    decide(superuser, "drain_selected", row, reason="why")
    assert Server.objects.using(alias).get(pk=row.pk).draining
    decide(superuser, "weight_selected", row, reason="why", weight="3")
    row.refresh_from_db(using=alias)
    assert (row.weight, row.draining) == (3, False)


def test_a_list_takes_a_few_statements(alias, fleet, superuser):
    with CaptureQueriesContext(connections[alias]) as queries:
        superuser.get(SERVERS)
    assert len([each for each in queries if "outbox_server" in each["sql"]]) <= 6
    assert Server.objects.using(alias).count() == 5  # to look takes no one off
