"""Declarations of peers: those that cannot work are errors of ``manage.py check``."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.checks.messages import guarded
from outbox_app.checks.values import check_settings
from outbox_app.door.checks import check_peers

PEER = {
    "direction": "sender",
    "address": "https://billing.example/outbox/",
    "types": ["order.*"],
    "keys": [
        {"id": "shop-1", "private": "file:/run/secrets/shop.key"},
        {"id": "billing-1", "public": "-----BEGIN PUBLIC KEY-----", "until": "2030-01-01T00:00Z"},
        {"id": "shared", "secret": "env:SHARED", "from": "2026-01-01T00:00:00+01:00"},
    ],
}


def messages(settings: Any, peers: Any) -> list[str]:
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": peers}
    found = [*check_settings(), *(guarded(check_peers)())]
    assert {each.id for each in found} <= {"outbox.E003", "outbox.W035"}
    return [each.msg for each in found if each.id == "outbox.E003"]


def test_a_peer_that_can_work(settings: Any) -> None:
    assert messages(settings, {"billing": PEER}) == []
    other = {"types": ("order.*",), "keys": (*PEER["keys"],), "limits": {"events": 1}}
    assert messages(settings, {"b" * 80: PEER | other | {"address": "service:shop"}}) == []


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("alias:billing", {}, "needs a name of up to 80 characters without colon"),
        ("", {}, "needs a name"),
        (5, {}, "needs a name"),
        ("billing", {"direction": "up"}, "needs one of the directions 'sender', 'keeper', 'both'"),
        ("billing", {"adress": ""}, "has no field 'adress'; there are direction, address"),
        ("billing", {"address": "http://billing.example/"}, "has an address that is not https"),
        ("billing", {"address": "billing.example"}, "is not of the form https://host/path/"),
        ("billing", {"address": "https://billing.example:84433/"}, "is not of the form https://"),
        ("billing", {"database": "nowhere"}, "has a database that is not an alias"),
        ("billing", {"types": "order.*"}, "has types that are not a list of patterns"),
        ("billing", {"jobs": [1]}, "has jobs that are not a list of patterns"),
        ("billing", {"limits": {"events": 0}}, "has limits other than positive integers"),
        ("billing", {"limits": {"rows": 1}}, "has limits other than positive integers"),
        ("billing", {"limits": {"bytes": 1.5}}, "has limits other than positive integers"),
        ("billing", {"limits": ["events"]}, "has limits other than positive integers"),
        ("billing", {"keys": {"id": "a"}}, "has no list of keys"),
        ("billing", {"address": "service:"}, "has an address that is not of the form"),
        ("billing", {"keys": []}, "has no list of keys"),
        ("billing", {"keys": [{"public": "env:A"}]}, "has a key that has no id"),
        ("billing", {"keys": [{"id": "a"}]}, "needs exactly one of public, private, secret"),
        ("billing", {"keys": [{"id": "a", "alg": "none", "public": "env:A"}]}, "exactly one of"),
        ("billing", {"keys": [{"id": "a", "secret": "x" * 32}]}, "name its secret by reference"),
        ("billing", {"keys": [{"id": "a", "private": "-----B"}]}, "name its private by reference"),
        (
            "billing",
            {"keys": [{"id": "a", "public": "env:A", "until": "2030-01-01"}]},
            "not a time with a time zone",
        ),
    ],
)
def test_a_peer_that_cannot_work(
    settings: Any, name: Any, changes: dict[str, Any], said: str
) -> None:
    [message] = messages(settings, {name: PEER | changes})
    assert f"The peer {name!r} of OUTBOX['PEERS']" in message
    assert said in message
    assert "x" * 32 not in message


def test_peers_that_are_none(settings: Any) -> None:
    [message] = messages(settings, {"billing": "https://billing.example/"})
    assert "is not a dictionary" in message
    [message] = messages(settings, ["billing"])
    assert "expected a dictionary of peers by their names" in message
