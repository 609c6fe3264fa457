"""The contract of a registry, for every registry in which processes can register."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from outbox_app.exceptions import InvalidArgument
from outbox_app.fleet.registries import DatabaseRegistry, StaticRegistry, database
from outbox_app.fleet.registry import CLIENT, Member, Registry
from outbox_app.fleet.watch import Listing, Watch
from outbox_app.process.waiting import StopFlag
from tests.patience import eventually, patience

from .conftest import LEASE

pytestmark = pytest.mark.django_db(transaction=True)


def member(port: int, **fields: Any) -> Member:
    given = {"address": f"http://127.0.0.1:{port}/outbox/", "lease_seconds": 600.0}
    return Member(**{"service": "shop", **given, **fields})


@pytest.fixture
def registry(alias: str, fleet: Any) -> Callable[[], Registry]:
    return DatabaseRegistry


@pytest.fixture
def here(registry: Callable[[], Registry]) -> Iterator[Registry]:
    """The registry in a session of this thread."""
    found = registry()
    with found.session(StopFlag()):
        yield found


@pytest.fixture
def watch(registry: Callable[[], Registry]) -> Iterator[Callable[..., Watch]]:
    """``watch(service)``: a watch, which ends before the rows are removed."""
    begun: list[Watch] = []

    def begin(service: str = "shop", **options: Any) -> Watch:
        begun.append(Watch(service, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.stop.set()
    for each in begun:
        each.thread.join()


def test_registered_until_it_leaves(here: Registry) -> None:
    one, client, other = member(1), member(0, kind=CLIENT, address=""), member(2, service="bank")
    assert here.members("shop") == []
    assert not here.beat(one)
    for each in (one, client, other):
        here.register(each)
    assert sorted(here.members("shop"), key=str) == sorted([one, client], key=str)
    assert here.members("bank") == [other]
    assert here.beat(one)
    here.leave(one)
    assert not here.beat(one)
    assert here.members("shop") == [client]
    here.leave(one)  # again


def test_its_timeouts_are_not_those_of_the_whole_process(
    alias: str, registry: Callable[[], Registry]
) -> None:
    """On MariaDB any slow statement of a web server would lose its connection."""
    before = dict(connections.settings[alias]["OPTIONS"])
    with registry().session(StopFlag()):
        own = connections[alias].settings_dict["OPTIONS"]
        assert connections[alias].vendor == "sqlite" or "connect_timeout" in own
    assert connections.settings[alias]["OPTIONS"] == before


def test_who_only_calls_wakes_nobody(here: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that start together would have each other pull the list a million times."""
    woken: list[str] = []
    monkeypatch.setattr(database, "wake", lambda using, channel: woken.append(channel))
    for each, expected in ((member(0, kind=CLIENT, address=""), 0), (member(1), 2)):
        here.register(each)
        here.leave(each)
        assert len(woken) == expected
    here.register(each)
    here.change(each.address, draining=True)
    assert len(woken) == 4


@pytest.fixture
def register_silent(here: Registry) -> Callable[[Member], None]:
    """Register a member that then falls silent."""
    return here.register


@pytest.fixture
def beat_again(here: Registry) -> Callable[[Member], bool]:
    """Beat for a member that was silent."""
    return here.beat


@pytest.mark.slow
def test_removed_when_silent_for_its_lease(
    here: Registry,
    register_silent: Callable[[Member], None],
    beat_again: Callable[[Member], bool],
) -> None:
    silent, alive = member(1, lease_seconds=LEASE), member(2)
    here.register(alive)
    begun = time.monotonic()
    register_silent(silent)

    def is_alone() -> bool:
        assert here.beat(alive)
        return here.members("shop") == [alive]

    eventually(is_alone)
    assert LEASE * 0.9 < time.monotonic() - begun < patience(LEASE * 1.2) + 0.5
    assert not beat_again(silent)


def test_a_watch_sees_changes(here: Registry, watch: Callable[..., Watch]) -> None:
    seen = watch()
    assert seen.listing(patience(5)) == Listing()
    one, two, client = member(1), member(2, weight=7), member(3, kind=CLIENT)
    for each in (one, two, client):
        here.register(each)

    eventually(lambda: seen.listing().servers == (one, two))
    here.leave(one)
    eventually(lambda: seen.listing().servers == (two,))
    assert not seen.listing().kept


def away(*args: Any) -> Any:
    raise OSError("cut off")


@pytest.mark.slow
def test_half_gone_at_once_is_kept(
    here: Registry, watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    seen = watch(clock=lambda: now[0])
    three = [member(port) for port in (1, 2, 3)]
    for each in three:
        here.register(each)
    eventually(lambda: len(seen.listing().servers) == 3)
    with monkeypatch.context() as patched:  # so that one pull finds them gone
        patched.setattr(type(here), "members", away)
        eventually(lambda: seen.listing().trouble)
        for each in three:
            here.leave(each)
    eventually(lambda: len(seen.listing().kept) == 3)
    assert seen.listing().servers == tuple(three)
    now[0] += 61
    eventually(lambda: seen.listing().servers == ())


def test_the_last_list_stays_while_the_registry_is_away(
    here: Registry, watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    one = member(1)
    here.register(one)
    seen = watch(clock=lambda: now[0])
    eventually(lambda: seen.listing().servers == (one,))

    with monkeypatch.context() as patched:
        patched.setattr(type(here), "members", away)
        now[0] += 3600
        eventually(lambda: "cut off" in seen.listing().trouble)
        assert seen.listing().servers == (one,)
    eventually(lambda: not seen.listing().trouble)
    assert seen.listing().servers == (one,)


def test_changed_by_its_names(here: Registry) -> None:
    one, two = member(1), member(2)
    here.register(one)
    here.register(two)
    assert here.change(one.address, draining=True) == 1
    assert here.change(str(two.id), weight=3, draining=False) == 1
    found = {each.address: each for each in here.members("shop")}
    assert (found[one.address].draining, found[two.address].weight) == (True, 3)
    assert here.change(one.node, weight=5, draining=False) == 2  # both are of this process
    assert [(each.weight, each.draining) for each in here.members("shop")] == [(5, False)] * 2
    assert here.change("nothing", draining=True) == 0


def test_a_notice_comes_before_the_next_pull(
    here: Registry, watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    """On PostgreSQL; elsewhere it is pulled."""
    if alias != "postgres":
        assert type(here.session(StopFlag()).__enter__()).__name__ == "PollWaiter"
        return
    monkeypatch.setattr(Watch, "pause", lambda self: 3600.0)
    seen = watch()
    seen.listing(patience(5))
    ones = iter(range(1, 1000))

    def is_seen() -> bool:  # again, as it may not listen yet
        here.register(member(next(ones)))
        return bool(seen.listing().servers)

    eventually(is_seen)


def test_two_threads_that_register_at_once(registry: Callable[[], Registry]) -> None:
    registered, seen = threading.Semaphore(0), threading.Event()

    def register(port: int) -> None:
        mine = registry()
        with mine.session(StopFlag()):
            mine.register(member(port))
            registered.release()
            seen.wait(patience())

    threads = [threading.Thread(target=register, args=[port]) for port in range(1, 5)]
    for each in threads:
        each.start()
    mine = registry()
    try:
        assert all(registered.acquire(timeout=patience()) for _ in threads)
        with mine.session(StopFlag()):
            assert len(mine.members("shop")) == 4
    finally:
        seen.set()
        for each in threads:
            each.join()


def test_a_static_list(fleet: Any) -> None:
    addresses = ["http://127.0.0.1:1/outbox/", "http://127.0.0.1:2/outbox/"]
    fleet(SERVERS={"shop": addresses})
    one, two = StaticRegistry(), StaticRegistry()
    assert [each.address for each in one.members("shop")] == addresses
    assert one.members("shop") == two.members("shop")
    assert one.members("bank") == []
    one.register(member(9))
    assert one.beat(member(9))
    one.leave(member(1))
    assert [each.address for each in one.members("shop")] == addresses
    with pytest.raises(InvalidArgument, match="StaticRegistry cannot be changed"):
        one.change(addresses[0], draining=True)
