"""``check`` reports peers whose keys are not valid now, and senders without fences."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from outbox_app.door.checks import check_peers
from outbox_app.prepared.checks import check_fences
from outbox_app.prepared.models import Fence

BOTH = [{"id": "ours", "private": "env:OURS"}, {"id": "theirs", "public": "env:THEIRS"}]
FIELDS = {"direction": "sender", "address": "https://billing.example/outbox/", "keys": BOTH}


def ended(key):
    return key | {"until": (timezone.now() - timedelta(days=1)).isoformat()}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (BOTH, []),
        ([{"id": "shared", "secret": "env:SHARED"}], []),
        (BOTH[:1], ["to verify its messages"]),
        ([ended(BOTH[0]), BOTH[1]], ["to sign messages to it"]),
        (list(map(ended, BOTH)), ["to sign messages to it", "to verify its messages"]),
        ([ended(BOTH[0]), BOTH[0] | {"id": "new"}, BOTH[1]], []),
    ],
)
def test_keys_that_are_not_valid(settings, keys, said):
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": {"billing": FIELDS | {"keys": keys}}}
    found = list(check_peers())
    assert {each.id for each in found} <= {"outbox.W035"}
    assert len(found) == len(said)
    for message, words in zip(found, said, strict=True):
        assert f"The peer 'billing' has no key that is valid now {words}" in message.msg


@pytest.mark.django_db
@pytest.mark.parametrize(("direction", "found"), [("keeper", 1), ("both", 1), ("sender", 0)])
def test_fences_of_an_alias_that_prepares(alias, settings, monkeypatch, direction, found):
    shop = FIELDS | {"direction": direction, "database": alias}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": {"shop": shop}}
    assert list(check_fences(databases=[alias])) == []
    monkeypatch.setattr(Fence._meta, "db_table", "outbox_fence_that_is_not_there")
    said = [(each.id, "'shop': Database" in each.msg) for each in check_fences(databases=[alias])]
    assert said == [("outbox.W047", True)] * found
    assert list(check_fences(databases=[])) == list(check_fences()) == []
    monkeypatch.setattr(MigrationRecorder, "has_table", lambda self: False)
    assert list(check_fences(databases=[alias])) == [], "migrate will make it"
