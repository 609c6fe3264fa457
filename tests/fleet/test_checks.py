"""Each fault of ``OUTBOX["FLEET"]`` is an error that names its key."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.checks.values import check_settings
from outbox_app.entities.checks import check_routes
from outbox_app.fleet.checks import check_fleet, check_reach
from outbox_app.fleet.registries import StaticRegistry
from tests.entities.models import Account

URL = "http://127.0.0.1:1/outbox/"
STATIC = "outbox_app.fleet.registries.StaticRegistry"


def found(settings: Any, **given: Any) -> list[tuple[str | None, str]]:
    settings.OUTBOX = {"FLEET": given}
    assert check_settings() == []
    return [(each.id, each.msg) for each in check_fleet()]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SERVICE": "shop", "ADDRESS": URL, "WEIGHT": 0, "DEADLINE": 0.5},
        {"SERVICE": "shop", "ADDRESS": "https://shop.example:8443/outbox/", "WEIGHT": 100},
        {"REGISTRY": STATIC, "SERVERS": {"shop": [URL], "bank": ()}},
        {"REGISTRY": STATIC, "SERVERS": {"shop": [URL]}, "SERVICE": "shop", "ADDRESS": URL},
        {"BALANCE": "round_robin", "CLUSTER": "fail_fast"},
        {"SERVICE": "shop", "ADDRESS": URL, "TOPOLOGY": [URL]},
        {"TOPOLOGY": None},
    ],
    ids=repr,
)
def test_what_is_right(settings: Any, given: Any) -> None:
    assert found(settings, **given) == []


WRONG = {
    "SERVICE": [None, 7, "a b", "a:b", "a/b", "x" * 81],
    "ADDRESS": [
        None,
        7,
        "shop.example",
        "http://shop.example/",
        "https://a:b@c/",
        "ftp://x/",
        "https://0.0.0.0:8443/",
        "https://[::]/",
    ],
    "WEIGHT": [-1, 101, "x", 1.5, True, None],
    "DEADLINE": [0, -1, 1_000_000, "5", True, float("inf"), float("nan"), None],
    "TOPOLOGY": ["static", [], [URL, URL], ["x"], [7], URL, 1],
    "BALANCE": ["fair", None, 1],
    "CLUSTER": ["fail_later", None],
    "REGISTRY": ["nowhere.Registry", "", None, "outbox_app.fleet.models.Server", "json.loads"],
    "REGISTRY_URL": [None, 7],
    "SERVERS": [
        *(None, [URL], {"": [URL]}, {"a b": []}),
        *({"shop": each} for each in (URL, ["x"], [URL, URL], [7])),
    ],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}={value!r}") for name in WRONG for value in WRONG[name]],
)
def test_what_is_wrong(settings: Any, name: str, value: Any) -> None:
    [(id, text)] = found(settings, **{"SERVICE": "shop", name: value})
    assert id == "outbox.E046"
    assert text.startswith(f"OUTBOX['FLEET'][{name!r}] is {value!r}, which ")


def test_an_address_without_a_service(settings: Any) -> None:
    [(id, text)] = found(settings, ADDRESS=URL)
    assert (id, "SERVICE is empty" in text) == ("outbox.E046", True)


def test_a_key_that_there_is_not(settings: Any) -> None:
    [(id, text)] = found(settings, WEIGTH=3)
    assert id == "outbox.E046"
    assert "'WEIGTH'" in text
    assert "WEIGHT" in text.partition("Known keys")[2]


def test_a_static_list_without_this_server(settings: Any) -> None:
    given = {"REGISTRY": STATIC, "SERVICE": "shop", "ADDRESS": URL}
    [(id, text)] = found(settings, **given, SERVERS={"shop": ["https://other.example/"]})
    assert (id, repr(URL) in text) == ("outbox.W037", True)


@pytest.mark.parametrize("registry", [StaticRegistry, ".StaticRegistry", None], ids=repr)
def test_a_registry_that_is_no_path(settings: Any, registry: Any) -> None:
    [(id, text)] = found(settings, SERVICE="shop", ADDRESS=URL, REGISTRY=registry)
    assert (id, "cannot be imported" in text) == ("outbox.E046", True)


def test_a_server_that_leads_nothing(settings: Any) -> None:
    other = "http://127.0.0.1:2/outbox/"
    [(id, text)] = found(settings, SERVICE="shop", ADDRESS=URL, TOPOLOGY=[other])
    assert (id, URL in text) == ("outbox.W037", True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8443", "[::1]", "shop-1.example"])
def test_an_address_of_this_host(settings: Any, host: str) -> None:
    assert found(settings, SERVICE="shop", ADDRESS=f"https://{host}/outbox/") == []
    assert [each.id for each in check_reach()] == ["outbox.W041"] * (host != "shop-1.example")
    found(settings, SERVICE="shop", WEIGHT=-1)
    assert list(check_reach()) == []


def test_a_routed_type_without_a_service(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(**given: Any) -> list[str | None]:
        settings.OUTBOX = {"FLEET": given}
        return [each.id for each in check_routes()]

    assert ids() == []
    monkeypatch.setattr(Account, "routed", True)
    assert ids() == ["outbox.W040"]
    assert ids(SERVICE="shop") == []
    assert ids(SERVCE="shop") == [], "check_fleet reports it"
