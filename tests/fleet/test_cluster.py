"""Which calls are retried, for how long and how often. The tests answer them; none is sent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_app.door import client
from outbox_app.door.exceptions import InvalidPeer, PeerUnavailable
from outbox_app.door.peers import Peer
from outbox_app.exceptions import InvalidArgument
from outbox_app.fleet import cluster, servers
from outbox_app.fleet.balance import Failing
from outbox_app.fleet.cluster import LEAST, Budget, service
from outbox_app.fleet.registries import StaticRegistry
from tests.patience import eventually, patience

SHOP = Peer(name="shop", address="service:shop")
URLS = [f"http://127.0.0.1:{port}/outbox/" for port in (1, 2, 3, 4)]
STATIC = "outbox_app.fleet.registries.StaticRegistry"

NOT_CONNECTED = PeerUnavailable("not connected", sent=False)
NO_ANSWER = PeerUnavailable("no answer")


@pytest.fixture
def calls(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``calls(answer, …)``: the servers' answers, in turn. Returns the calls' URLs and seconds."""
    fleet(SERVICE="", REGISTRY=STATIC, SERVERS={"shop": URLS, "one": URLS[:1]})
    monkeypatch.setattr(cluster, "PAUSE", 0)

    def answer(*given: Any) -> list[Any]:
        made: list[Any] = []

        def call(peer: Peer, *args: Any, address: str, seconds: float, **options: Any) -> Any:
            made.append((address, seconds))
            said = given[min(len(made), len(given)) - 1]
            if isinstance(said, Exception):
                raise said
            return said

        monkeypatch.setattr(client, "call", call)
        return made

    return answer


def ask(**options: Any) -> Any:
    return cluster.call(SHOP, "POST", "check", [], **options)


@pytest.mark.parametrize(
    ("failure", "repeatable", "tried"),
    [
        (NOT_CONNECTED, True, 2),
        (NOT_CONNECTED, False, 2),
        (NO_ANSWER, True, 2),
        (NO_ANSWER, False, 1),
        ((503, {}), True, 2),
        ((503, {}), False, 1),
        ((502, {}), True, 2),
        ((504, {}), True, 2),
        ((400, {}), True, 1),
        ((404, {}), True, 1),
        ((409, {}), True, 1),
        ((422, {}), True, 1),
        ((500, {}), True, 1),  # signed: the server has said so
        (InvalidPeer("no key"), True, 1),
    ],
    ids=repr,
)
def test_what_is_tried_elsewhere(calls: Any, failure: Any, repeatable: bool, tried: int) -> None:
    made = calls(failure, (200, "done"))
    if tried == 2:
        assert ask(repeatable=repeatable) == (200, "done")
    elif isinstance(failure, Exception) or failure[0] > 500:
        expected = type(failure) if isinstance(failure, Exception) else PeerUnavailable
        with pytest.raises(expected):
            ask(repeatable=repeatable)
    else:
        assert ask(repeatable=repeatable) == failure
    assert len({address for address, _ in made}) == len(made) == tried


def test_fail_fast_makes_one_call(calls: Any) -> None:
    made = calls(NOT_CONNECTED, (200, "done"))
    with pytest.raises(PeerUnavailable, match="not connected"):
        service("shop", cluster="fail_fast").call(SHOP, "POST", "check")
    assert [round(seconds) for _, seconds in made] == [5]


def test_each_server_once_and_the_last_failure_is_said(calls: Any) -> None:
    made = calls(NO_ANSWER, NOT_CONNECTED, NO_ANSWER, PeerUnavailable("the last"))
    with pytest.raises(PeerUnavailable, match="the last"):
        ask()
    assert sorted(address for address, _ in made) == URLS


@pytest.mark.parametrize(
    ("attempts", "sent"), [([False], False), ([True, False, False, False], True), ([True], True)]
)
def test_one_attempt_that_may_have_arrived_is_enough(
    calls: Any, attempts: list[bool], sent: bool
) -> None:
    calls(*(PeerUnavailable("no answer", sent=each) for each in attempts))
    with pytest.raises(PeerUnavailable) as raised:
        ask()
    assert raised.value.sent is sent


def test_one_deadline_for_all(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer leaves time for the others, and the last has all of it."""
    made = calls(NO_ANSWER)
    for options, whole in (({}, 5.0), ({"seconds": 2.0}, 2.0), ({"seconds": 60.0}, 5.0)):
        made.clear()
        with pytest.raises(PeerUnavailable):
            ask(**options)
        assert made[0][1] == pytest.approx(whole / 2, rel=0.2)
        assert made[3][1] == pytest.approx(2 * made[2][1], rel=0.2)
    moved = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + moved[0], sleep=time.sleep)
    monkeypatch.setattr(cluster, "time", clock)
    made.clear()

    def late(*args: Any, seconds: float, **options: Any) -> Any:
        made.append(seconds)
        moved[0] += 3
        raise NO_ANSWER

    monkeypatch.setattr(client, "call", late)
    with pytest.raises(PeerUnavailable):
        ask()
    assert len(made) == 2


def test_a_call_that_may_not_be_repeated_has_all_the_time(calls: Any) -> None:
    made = calls(NO_ANSWER)
    with pytest.raises(PeerUnavailable):
        ask(repeatable=False)
    assert made[0][1] == pytest.approx(5, rel=0.2)


def test_a_fleet_that_answers_nothing_gets_a_fifth_more(calls: Any) -> None:
    made = calls(NO_ANSWER)
    for _ in range(200):
        with pytest.raises(PeerUnavailable):
            ask()
    assert 200 < len(made) <= 240


def test_a_few_calls_are_tried_again_in_any_case() -> None:
    now = [0.0]
    budget = Budget(clock=lambda: now[0])
    budget.called()
    assert [budget.take() for _ in range(LEAST + 1)] == [True] * LEAST + [False]
    now[0] += 9
    assert not budget.take()
    now[0] += 1
    assert budget.take()


def test_of_many_calls_a_fifth_is_tried_again() -> None:
    budget = Budget(clock=lambda: 0.0)
    for _ in range(100):
        budget.called()
    assert [budget.take() for _ in range(21)] == [True] * 20 + [False]


def test_threads_share_a_budget() -> None:
    """Another one that calls while this one counts has to wait."""
    waits = []

    def clock() -> float:
        if other.ident is None:
            other.start()
            other.join(0.2)
            waits.append(other.is_alive())
        return 0.0

    budget = Budget(clock=clock)
    other = threading.Thread(target=budget.called)
    assert budget.take()
    other.join()
    assert waits == [True]


def test_without_time_no_server_is_taken(calls: Any) -> None:
    """Its trial would not be made, and it would be ejected anew."""
    made = calls((200, "done"))
    servers("one")
    balance = cluster.known_of("one").balance
    balance.failing[URLS[0]] = Failing("no answer", 3, 5.0, until=balance.clock())
    before = repr(balance.failing)
    with pytest.raises(PeerUnavailable):
        service("one").call(SHOP, "POST", "check", seconds=1e-9)
    assert (made, repr(balance.failing)) == ([], before)


def test_what_is_known_of_the_servers(calls: Any) -> None:
    calls(NOT_CONNECTED)
    assert [(each.member.address, each.ejected, each.kept) for each in servers("shop")] == [
        (url, 0.0, False) for url in URLS
    ]
    for _ in range(3):
        with pytest.raises(PeerUnavailable):
            ask()
    found = servers("shop")
    assert {each.why for each in found} == {"not connected"}
    assert all(4 < each.ejected <= 5 for each in found)


def test_a_call_that_succeeds_ends_the_failures_of_a_server(calls: Any) -> None:
    calls(NOT_CONNECTED, (200, "done"))
    one = service("one")
    with pytest.raises(PeerUnavailable):
        one.call(SHOP, "POST", "check")
    assert [each.why for each in servers("one")] == ["not connected"]
    one.call(SHOP, "POST", "check")
    assert [each.why for each in servers("one")] == [""]


@pytest.mark.parametrize("given", [{"cluster": "fair"}, {"balance": "x"}, {"balance": 7}], ids=repr)
def test_what_there_is_not_to_choose(fleet: Any, given: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be one of"):
        service("shop", **given)


@pytest.mark.parametrize("name", ["", "a b", "service:shop", "x" * 81, None], ids=repr)
def test_what_names_no_service(fleet: Any, name: Any) -> None:
    for ask in (service, servers):
        with pytest.raises(InvalidArgument, match="A service needs a name"):
            ask(name)
    assert not cluster._services


def test_no_server(calls: Any, fleet: Any) -> None:
    calls((200, "never"))
    with pytest.raises(PeerUnavailable, match="No server of the service 'bank'") as failure:
        service("bank").call(SHOP, "POST", "check")
    assert not failure.value.sent


def test_a_registry_that_is_away_from_the_beginning(calls: Any, monkeypatch: Any) -> None:
    """It is said, and a registry that does not answer is not waited for beyond the deadline."""

    def fail(*args: Any) -> Any:
        raise OSError("cut off")

    calls((200, "never"))
    monkeypatch.setattr(StaticRegistry, "members", fail)
    with pytest.raises(PeerUnavailable, match=r"takes calls\. OSError: cut off"):
        service("shop").call(SHOP, "POST", "check")
    ends = threading.Event()
    monkeypatch.setattr(StaticRegistry, "members", lambda *args: ends.wait(patience()) and [])
    begun = time.monotonic()
    with pytest.raises(PeerUnavailable, match="No server"):
        service("bank").call(SHOP, "POST", "check", seconds=0.2)
    assert time.monotonic() - begun < patience(2.0)
    ends.set()


def test_a_peer_with_an_address_is_called_there(calls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "call", lambda peer, *args, **options: (200, options))
    assert cluster.call(Peer(address=URLS[0]), "GET", "open") == (200, {})


def test_after_a_fork_the_list_is_pulled_anew(calls: Any) -> None:
    calls((200, "done"))
    shop = service("shop")
    assert shop.call(SHOP, "POST", "check") == (200, "done")
    child = os.fork()
    if not child:
        code = 1
        try:
            assert not cluster._services
            assert shop.call(SHOP, "POST", "check") == (200, "done")
            assert cluster._services["shop"].watch.thread.is_alive()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_list_follows_the_settings(calls: Any, fleet: Any) -> None:
    calls((200, "done"))
    assert len(servers("one")) == 1
    fleet(SERVERS={"one": URLS[:2]})
    eventually(lambda: len(servers("one")) == 2)


@pytest.mark.django_db(transaction=True)
def test_a_hot_entity_is_no_failure_of_a_server(calls: Any) -> None:
    calls((503, {"code": "overloaded", "detail": "10000 commands wait."}))
    for _ in range(3):
        with pytest.raises(PeerUnavailable):
            ask()
    assert [(each.ejected, each.why) for each in servers("shop")] == [(0.0, "")] * len(URLS)
