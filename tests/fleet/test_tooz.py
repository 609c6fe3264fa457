"""The registry of tooz fulfils the contract of registries on Redis, ZooKeeper and etcd."""

# ruff: noqa: F811 (fixtures and tests of another module)
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from outbox_app.exceptions import InvalidArgument
from outbox_app.fleet.registries.static import StaticRegistry
from outbox_app.fleet.registry import Member, Registry
from tests.patience import eventually
from tests.servers import Etcd, Proxy, ZooKeeper

from .conftest import LEASE
from .test_registries import (  # noqa: F401
    beat_again,
    here,
    register_silent,
    test_a_watch_sees_changes,
    test_half_gone_at_once_is_kept,
    test_registered_until_it_leaves,
    test_removed_when_silent_for_its_lease,
    test_the_last_list_stays_while_the_registry_is_away,
    test_two_threads_that_register_at_once,
    watch,
)

coordination = pytest.importorskip(
    "tooz.coordination", reason="the extra coordination is not installed"
)
TOOZ = "outbox_app.fleet.registries.ToozRegistry"


@pytest.fixture(autouse=True)
def clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close ZooKeeper's clients: tooz only stops them, and leaves sockets to garbage collection."""
    from tooz.drivers.zookeeper import KazooDriver

    stop = KazooDriver._stop

    def stop_and_close(self: Any) -> None:
        stop(self)
        self._coord.close()

    monkeypatch.setattr(KazooDriver, "_stop", stop_and_close)


@pytest.fixture(
    scope="module", params=["redis", ZooKeeper, Etcd], ids=["redis", "zookeeper", "etcd"]
)
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "redis":
        yield None
        return
    with request.param() as server:
        yield server


@pytest.fixture
def url(server: Any, request: pytest.FixtureRequest) -> str:
    """The URL of a registry without groups."""
    if server is None:
        return request.getfixturevalue("redis_url")
    if isinstance(server, Etcd):
        import etcd3gw

        etcd3gw.client(port=server.port).delete_prefix("tooz/")
    else:
        from kazoo.client import KazooClient

        client = KazooClient(f"127.0.0.1:{server.port}")
        client.start()
        client.delete("/tooz", recursive=True)
        client.stop()
        client.close()
    return server.url


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", urlsplit(url).port or 0) as proxy:
        yield proxy


@pytest.fixture
def registry(url: str, fleet: Any, proxy: Proxy) -> Callable[[], Registry]:
    from outbox_app.fleet.registries.tooz import ToozRegistry

    fleet(REGISTRY=TOOZ, REGISTRY_URL=url)
    return ToozRegistry


@pytest.fixture
def through_proxy(
    url: str, proxy: Proxy, here: Registry, fleet: Any
) -> Iterator[Callable[[Member], None]]:
    """``through_proxy(member)``: register a member through the proxy."""

    def register(member: Member) -> None:
        there = urlsplit(url)._replace(netloc=f"127.0.0.1:{proxy.port}")
        fleet(REGISTRY_URL=there.geturl())
        here.register(member)
        fleet(REGISTRY_URL=url)

    yield register
    proxy.mode = "pass"  # a client of ZooKeeper waits until it could say that it leaves
    proxy.cut()


@pytest.fixture
def register_silent(
    server: Any, here: Registry, proxy: Proxy, through_proxy: Callable[[Member], None]
) -> Callable[[Member], None]:
    """With ZooKeeper, block the connection: a process is registered as long as it lasts."""
    if not isinstance(server, ZooKeeper):
        return here.register

    def register(member: Member) -> None:
        through_proxy(member)
        proxy.mode = "blackhole"

    return register


@pytest.fixture
def beat_again(server: Any, here: Registry) -> Callable[[Member], bool]:
    def out_of_reach(member: Member) -> bool:
        with pytest.raises(coordination.OperationTimedOut):
            here.beat(member)
        return False

    return out_of_reach if isinstance(server, ZooKeeper) else here.beat


@pytest.mark.parametrize("server", [ZooKeeper], ids=["zookeeper"], indirect=True)
def test_a_zookeeper_that_does_not_answer_is_an_error_and_not_waited_for(
    here: Registry, proxy: Proxy, through_proxy: Callable[[Member], None]
) -> None:
    member = Member(service="shop", address="http://127.0.0.1:1/outbox/", lease_seconds=LEASE)
    through_proxy(member)
    proxy.mode = "blackhole"
    for _ in range(3):  # while the connection is there, when it is lost, and without one
        with pytest.raises(coordination.ToozError):
            here.beat(member)

    proxy.mode = "pass"
    proxy.cut()  # what it has swallowed is lost

    def is_back() -> bool:
        with suppress(Exception):
            return here.beat(member) or here.register(member) is None
        return False

    eventually(is_back)
    assert here.members("shop") == [member]


def test_servers_of_others_are_not_changed(here: Registry) -> None:
    with pytest.raises(InvalidArgument, match="ToozRegistry cannot be changed"):
        here.change("http://127.0.0.1:1/outbox/", draining=True)


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_a_redis_that_has_forgotten(here: Registry, redis_url: str) -> None:
    """Who registers anew is found; a failed attempt is no obstacle."""
    import redis

    member = Member(service="shop", address="http://127.0.0.1:1/outbox/")
    here.register(member)
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        assert here.members("shop") == []
        assert not here.beat(member)
        client.set("_tooz_group:outbox-shop", "no group")  # what is written to it fails
        client.set("_tooz_groups", "nor this")
        with pytest.raises(Exception):  # noqa: B017, PT011
            here.register(member)
        assert not here.beat(member)
        client.flushdb()
    here.register(member)
    assert here.members("shop") == [member]


def test_fields_of_a_newer_version_are_left_out(here: Any) -> None:
    member = Member(service="shop", address="http://127.0.0.1:1/outbox/")
    here.register(member)
    said = {"id": str(member.id), "service": "shop", "zone": "a", "address": member.address}
    here._coordinators[member.id].update_capabilities(b"outbox-shop", said).get()
    [found] = here.members("shop")
    assert (found.id, found.address) == (member.id, member.address)


@pytest.mark.parametrize(
    "said",
    [b"x", None, {}, {"id": 7}, {"id": "x"}, {"weight": "x"}, {"address": ["x"]}],
    ids=repr,
)
def test_what_another_project_has_left_there(here: Any, said: Any) -> None:
    ours = Member(service="shop", address="http://127.0.0.1:1/outbox/")
    other = Member(service="shop", address="http://127.0.0.1:2/outbox/")
    for each in (ours, other):
        here.register(each)
    if isinstance(said, dict) and said and "id" not in said:
        said = {"id": str(other.id), "service": "shop", **said}
    here._coordinators[other.id].update_capabilities(b"outbox-shop", said).get()
    assert [each.id for each in here.members("shop")] == [ours.id]


def test_by_the_settings(registry: Any) -> None:
    from outbox_app.fleet.checks import check_fleet
    from outbox_app.fleet.registry import new_registry

    assert type(new_registry()) is registry is not StaticRegistry
    assert list(check_fleet()) == []
