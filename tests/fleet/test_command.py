"""``manage.py outbox_fleet``: its output, its changes, and its exit codes."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from outbox_app.fleet.models import Server

pytestmark = pytest.mark.django_db
ONE, TWO = "http://127.0.0.1:1/outbox/", "http://127.0.0.1:2/outbox/"


def run(*args: Any, **options: Any) -> str:
    out = StringIO()
    call_command("outbox_fleet", *args, stdout=out, **options)
    return out.getvalue()


@pytest.fixture
def two(alias: str, fleet: Any) -> list[Server]:
    given = {"service": "shop", "version": "1", "lease_seconds": 600}
    make = Server.objects.using(alias).create
    make(node="caller:7", kind="client", **given)
    return [make(node=f"host:{n}", address=each, **given) for n, each in enumerate((ONE, TWO))]


def test_servers(two: list[Server]) -> None:
    lines = run("servers").splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["client", "caller:7"],
        ["server", "host:0"],
        ["server", "host:1"],
    ]
    assert lines[1].endswith(f"lease 600 s  weight 100 {ONE}")
    assert lines[3] == "shop: 3 registered"
    [_, first, _] = json.loads(run("servers", "--json"))
    assert (first["id"], first["address"]) == (str(two[0].id), ONE)
    assert run("servers", "--service", "bank") == "bank: 0 registered\n"


def test_drain_and_weight(two: list[Server], alias: str) -> None:
    assert run("drain", ONE) == "Changed 1 server.\n"
    assert f"draining {ONE}" in run("servers")
    assert run("weight", "host:0", "7") == "Changed 1 server.\n"
    assert f"weight 7 {ONE}" in run("servers")
    assert run("weight", str(two[1].id), "0") == "Changed 1 server.\n"
    two[1].refresh_from_db(using=alias)
    assert two[1].weight == 0


def test_topology(two: list[Server], fleet: Any) -> None:
    lines = run("topology").splitlines()
    counts = {line.split()[2]: int(line.split()[0]) for line in lines}
    assert counts.keys() == {ONE, TWO}
    assert sum(counts.values()) == 1024
    assert run("topology", "--id", "a-17") in (f"a-17: {ONE}\n", f"a-17: {TWO}\n")
    fleet(TOPOLOGY=None)
    assert run("topology", "--id", "a-17").startswith("No server leads")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["drain", "nothing"], 1, "There is no server 'nothing'"),
        (["drain", "caller:7"], 1, "There is no server"),  # a client
        (["weight", ONE, "101"], 2, "from 0 to 100; got 101"),
        (["weight", ONE, "-1"], 2, "from 0 to 100|unrecognized|required"),
        (["weight", ONE, "x"], 1, "invalid int"),
    ],
)
def test_refused(two: list[Server], args: list[str], code: int, said: str) -> None:
    with pytest.raises(CommandError, match=said) as refused:
        run(*args)
    assert refused.value.returncode == code or "unrecognized" in said


def test_without_a_service(alias: str, fleet: Any) -> None:
    fleet(SERVICE="")
    with pytest.raises(CommandError, match="Which service"):
        run("servers")


def test_another_registry(alias: str, fleet: Any) -> None:
    fleet(
        REGISTRY="outbox_app.fleet.registries.StaticRegistry", SERVERS={"shop": [ONE]}, SERVICE=""
    )
    assert f"weight 100 {ONE}" in run("servers", "--service", "shop")
    with pytest.raises(CommandError, match="cannot be changed") as refused:
        run("drain", ONE)
    assert refused.value.returncode == 2
