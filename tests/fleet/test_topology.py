"""Which server leads a slice, as one process computes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_app.aliases import model_alias
from outbox_app.entities import Command
from outbox_app.entities.forwarding import leader_of
from outbox_app.entities.request import Call
from outbox_app.fleet import topology
from outbox_app.fleet.models import Server
from outbox_app.fleet.registry import CLIENT, Member
from outbox_app.fleet.topology import leaders_of, live_servers, other_leader
from tests.entities.models import Account
from tests.patience import eventually

URLS = [f"http://127.0.0.1:{port}/outbox/" for port in (1, 2, 3, 4)]
STATIC = "outbox_app.fleet.registries.StaticRegistry"


def member(address: str, **given: Any) -> Member:
    return Member(service="shop", address=address, **given)


@pytest.fixture(autouse=True)
def no_server_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_avoided", {})


def test_a_server_that_goes_moves_its_own_slices(fleet: Any) -> None:
    before = leaders_of(map(member, URLS))
    after = leaders_of(map(member, reversed(URLS[1:])))
    assert len(before) == 1024
    assert all(180 < count < 330 for count in Counter(before).values())
    moved = [n for n in range(1024) if before[n] != after[n]]
    assert {before[n] for n in moved} == {URLS[0]}
    assert {after[n] for n in moved} == set(URLS[1:])


def test_by_weight(fleet: Any) -> None:
    counts = Counter(leaders_of([member(URLS[0], weight=30), member(URLS[1], weight=90)]))
    assert counts[URLS[1]] == pytest.approx(768, abs=60)


def test_who_leads_nothing(fleet: Any) -> None:
    others = [member(URLS[1], weight=0), member(URLS[2], draining=True), member("", kind=CLIENT)]
    others.append(Member(service="billing", address=URLS[3]))
    assert set(leaders_of([member(URLS[0]), *others])) == {URLS[0]}
    assert leaders_of(others) == ()
    fleet(TOPOLOGY=URLS[2:])
    assert set(leaders_of([member(URLS[0])])) == set(URLS[2:])
    fleet(TOPOLOGY=None)
    assert leaders_of([member(URLS[0])]) == ()


@pytest.mark.django_db
def test_servers_that_are_there() -> None:
    for each in (member(URLS[0]), member("", kind=CLIENT)):
        Server.objects.create(**asdict(each))
    assert [server.address for server in live_servers(using="default")] == [URLS[0]]


def test_elsewhere(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet(TOPOLOGY=URLS[:2], ADDRESS=URLS[0])
    found = [other_leader(n) for n in range(1024)]
    assert set(found) == {"", URLS[1]}  # this server's own stay
    at = found.index(URLS[1])
    now = [100.0]
    monkeypatch.setattr(topology, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert not topology.is_avoided(URLS[1])
    topology.avoid(URLS[1], 3, "no answer")
    assert topology.is_avoided(URLS[1])
    now[0] += topology.AVOIDED
    assert not topology.is_avoided(URLS[1])
    for changes in ({"TOPOLOGY": None}, {"TOPOLOGY": URLS[:2], "SERVICE": ""}):
        fleet(**{"SERVICE": "shop"} | changes)
        assert other_leader(at) == ""


def test_servers_are_avoided_by_several_threads(monkeypatch: Any) -> None:
    """One adds to them while another looks; what is over is forgotten."""

    class Avoided(dict[str, float]):
        def get(self, address: Any, *given: Any) -> Any:
            self[f"also {len(self)}"] = 0.0
            return super().get(address, *given)

    monkeypatch.setattr(topology, "_avoided", Avoided({URLS[2]: 0.0}))
    topology.avoid(URLS[1], 3, "no answer")
    assert topology.is_avoided(URLS[1])
    monkeypatch.setattr(topology, "_avoided", {URLS[2]: 0.0})
    topology.avoid(URLS[1], 3, "no answer")
    assert list(topology._avoided) == [URLS[1]]


def test_a_command_stays_here_where_no_list_can_be_pulled(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, cannot_start: list[str]
) -> None:
    fleet(TOPOLOGY="registered", REGISTRY=STATIC, SERVERS={"shop": URLS[1:2]})
    monkeypatch.setattr(Account, "routed", True)
    cannot_start.append("outbox-watch-shop")

    def leader() -> str:
        call = Call(Command("a", "open", command_id="x"))
        return leader_of(call, Account, using=model_alias(Account.versions))

    assert leader() == ""
    assert cannot_start == []
    eventually(lambda: leader() == URLS[1])


def test_a_list_that_is_not_known_yet(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet(REGISTRY=STATIC, SERVERS={"shop": []})
    assert other_leader(7) == ""
