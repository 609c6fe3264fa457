"""The registry of tooz, on Redis, does what every registry has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outbox_app.exceptions import InvalidArgument
from outbox_app.fleet.registries.static import StaticRegistry
from outbox_app.fleet.registry import Member, Registry

from .test_registries import (  # noqa: F401
    here,
    test_a_watch_sees_changes,
    test_half_gone_at_once_is_kept,
    test_registered_until_it_leaves,
    test_removed_when_silent_for_its_lease,
    test_the_last_list_stays_while_the_registry_is_away,
    test_two_threads_that_register_at_once,
    watch,
)

pytest.importorskip("tooz", reason="the extra coordination is not installed")
TOOZ = "outbox_app.fleet.registries.ToozRegistry"


@pytest.fixture
def registry(redis_url: str, fleet: Any) -> Callable[[], Registry]:
    from outbox_app.fleet.registries.tooz import ToozRegistry

    fleet(REGISTRY=TOOZ, REGISTRY_URL=redis_url)
    return ToozRegistry


def test_servers_of_others_are_not_changed(here: Registry) -> None:  # noqa: F811
    with pytest.raises(InvalidArgument, match="ToozRegistry cannot be changed"):
        here.change("http://127.0.0.1:1/outbox/", draining=True)


def test_a_redis_that_has_forgotten(here: Registry, redis_url: str) -> None:  # noqa: F811
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


def test_fields_of_a_newer_version_are_left_out(here: Any) -> None:  # noqa: F811
    member = Member(service="shop", address="http://127.0.0.1:1/outbox/")
    here.register(member)
    said = {"id": str(member.id), "service": "shop", "zone": "a", "address": member.address}
    here._coordinators[member.id].update_capabilities(b"outbox-shop", said).get()
    [found] = here.members("shop")
    assert (found.id, found.address) == (member.id, member.address)


@pytest.mark.parametrize(
    "said", [b"x", None, {}, {"id": 7}, {"id": "x"}, {"weight": "x"}], ids=repr
)
def test_what_another_project_has_left_there(here: Any, said: Any) -> None:  # noqa: F811
    ours = Member(service="shop", address="http://127.0.0.1:1/outbox/")
    other = Member(service="shop", address="http://127.0.0.1:2/outbox/")
    for each in (ours, other):
        here.register(each)
    if said == {"weight": "x"}:
        said = {"id": str(other.id), "service": "shop", **said}
    here._coordinators[other.id].update_capabilities(b"outbox-shop", said).get()
    assert [each.id for each in here.members("shop")] == [ours.id]


def test_by_the_settings(registry: Any, redis_url: str) -> None:
    from outbox_app.checks.fleet import check_fleet
    from outbox_app.fleet.registry import new_registry

    assert type(new_registry()) is registry is not StaticRegistry
    assert list(check_fleet()) == []
