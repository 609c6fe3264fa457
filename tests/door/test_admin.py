"""Peers in the admin: its only form, which refuses the values that the checks would refuse."""

from __future__ import annotations

import json

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from outbox_app.door.checks import check_peer_table
from outbox_app.door.models import Peer
from tests.faults.tools import on

from ..admin.pages import page, text

pytestmark = pytest.mark.django_db(transaction=True)

PEERS = reverse("admin:outbox_door_peer_changelist")
ADD = reverse("admin:outbox_door_peer_add")
KEYS = [{"id": "shop-1", "private": "file:/run/shop.key"}, {"id": "b", "public": "env:BILLING"}]
FIELDS = {
    "name": "billing",
    "direction": "sender",
    "address": "https://billing.example/outbox/",
    "database": "default",
    "keys": json.dumps(KEYS),
    "types": '["order.*"]',
    "topics": "[]",
    "jobs": "[]",
    "commands": "[]",
    "limits": "{}",
}


@pytest.fixture
def peer(alias):
    given = {"direction": "sender", "address": "https://a.example/", "keys": KEYS}
    return Peer.objects.using(alias).create(name="billing", **given)


def test_one_adds_changes_and_deletes_a_peer(alias, superuser):
    assert superuser.post(ADD, FIELDS).status_code == 302
    [peer] = Peer.objects.using(alias)
    assert (peer.name, peer.keys, peer.types) == ("billing", KEYS, ["order.*"])
    assert [each.id for each in check_peer_table(databases=[alias])] == []
    assert "https://billing.example/outbox/" in text(superuser.get(PEERS))
    changed = FIELDS | {"address": "https://new.example/", "jobs": '["shop.*"]'}
    assert superuser.post(page(peer), changed).status_code == 302
    [peer] = Peer.objects.using(alias)
    assert (peer.address, peer.jobs) == ("https://new.example/", ["shop.*"])
    assert superuser.post(page(peer, "delete"), {"post": "yes"}).status_code == 302
    assert not Peer.objects.using(alias).exists()
    assert LogEntry.objects.count() == 3


@on("postgres", "mariadb")
def test_a_router_names_another_outbox(alias, superuser, peer, settings):
    """The peer there, with the same primary key, was deleted instead."""

    class Router:
        def db_for_write(self, model, **hints):
            return "default"

    settings.DATABASE_ROUTERS = [Router()]
    other = Peer.objects.using("default").create(pk=peer.pk, name="other", keys=KEYS)
    assert superuser.post(page(peer, "delete"), {"post": "yes"}).status_code == 302
    assert not Peer.objects.using(alias).exists()
    assert Peer.objects.using("default").get() == other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"address": "http://billing.example/"}, "has an address that is not https"),
        ({"database": "nowhere"}, "has a database that is not an alias of DATABASES"),
        ({"keys": '[{"id": "a", "secret": "hunter2"}]'}, "does not name its secret by reference"),
        ({"keys": "[]"}, "This field is required"),
        ({"keys": "{"}, "Enter a valid JSON"),
        ({"types": '"order.*"'}, "has types that are not a list of patterns"),
        ({"limits": '{"events": 0}'}, "has limits other than positive integers"),
        ({"name": "alias:billing"}, "Enter a valid value"),
        ({"direction": "up"}, "Select a valid choice"),
    ],
)
def test_what_the_checks_would_refuse_is_refused(alias, superuser, changes, said):
    assert said in text(superuser.post(ADD, FIELDS | changes))
    assert not Peer.objects.using(alias).exists()


def test_a_name_is_there_once(alias, superuser, peer):
    assert "A peer of this name exists." in text(superuser.post(ADD, FIELDS))
    other = Peer.objects.using(alias).create(name="other")
    assert "A peer of this name exists." in text(superuser.post(page(other), FIELDS))
    assert superuser.post(page(peer), FIELDS).status_code == 302


@pytest.mark.parametrize("action", ["add", "change", "delete"])
def test_each_takes_its_permission(alias, log_in, peer, action):
    addresses = {"add": ADD, "change": page(peer), "delete": page(peer, "delete")}
    fields = FIELDS | {"name": "new", "post": "yes"}
    viewer = log_in("viewer", permissions=["view_peer"])
    assert viewer.get(page(peer)).status_code == 200
    assert viewer.post(addresses[action], fields).status_code == 403
    one = log_in("one", permissions=["view_peer", f"{action}_peer"])
    done = {each: one.post(addresses[each], fields).status_code for each in addresses}
    assert done == {"add": 403, "change": 403, "delete": 403, action: 302}
