"""A figure is declared once: JSON, text, metrics and overview are made from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from outbox_app import capability
from outbox_app.capability import Doors, Figure, Section
from outbox_app.metrics import all_metrics, exposition
from outbox_app.monitoring.status import Question

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Kitchen(Section):
    steaming: int = 0

    def figures(self) -> Iterator[Figure]:
        yield Figure(
            self.steaming,
            "outbox_teapots",
            "Teapots that steam.",
            json="teapots",
            lines=[f"teapots     {self.steaming} steaming"],
            title="Teapots",
            shown=f"{self.steaming} of 9",
            note="all kitchens",
            place=("outbox_app.deadjob", {"died": "1h"}),
        )


class KitchenDoors(Doors):
    name = "kitchen"
    empty = Kitchen()

    def read(self, question: Question) -> Kitchen:
        return Kitchen(7)


@pytest.fixture
def kitchen(drainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    drainer(shards=128)
    installed = [apps.get_app_config("outbox_app"), SimpleNamespace(doors=KitchenDoors())]
    monkeypatch.setattr(capability, "capabilities", lambda: installed)
    capability.all_doors.cache_clear()
    capability.kinds.cache_clear()
    yield
    monkeypatch.undo()
    capability.all_doors.cache_clear()
    capability.kinds.cache_clear()


def told(*options: str) -> str:
    out = StringIO()
    call_command("outbox_status", *options, stdout=out)
    return out.getvalue()


@pytest.mark.django_db(transaction=True, databases="__all__")  # users are on the default alias
def test_a_figure_of_a_capability_is_everywhere(alias: str, kitchen: None) -> None:
    assert json.loads(told("--json"))["teapots"] == 7
    assert told().splitlines()[-1] == "teapots     7 steaming"
    text = exposition("")[0].decode()
    assert "# HELP outbox_teapots Teapots that steam.\n# TYPE outbox_teapots gauge\n" in text
    assert f'outbox_teapots{{database="{alias}"}} 7.0' in text
    client = Client()
    client.force_login(User.objects.create_superuser("ann"))
    page = client.get("/admin/outbox_app/overview/").content.decode()
    assert '<dt><a href="/admin/outbox_app/deadjob/?died=1h">Teapots</a></dt>' in page
    assert "<dd>7 of 9</dd>" in page
    assert "all kitchens" in page


def test_its_metric_is_declared_without_facts(alias: str, kitchen: None) -> None:
    assert all_metrics()["outbox_teapots"].help == "Teapots that steam."


def test_samples_have_the_labels_of_their_keys() -> None:
    def samples(value: Any, *labels: str) -> list[capability.Sample]:
        return list(Figure(value, "m", "help", labels).samples())

    assert samples(3) == [("m", (), 3)]
    assert samples(None) == []
    assert samples({"p": 1, "b": None}, "state") == [("m", ("p",), 1)]
    assert samples({("a", "b"): 0}, "state", "route") == [("m", ("a", "b"), 0)]
    percentiles = {"p50": 0.1, "p95": None, "p99": 2}
    assert samples(percentiles, "percentile") == [("m", ("50",), 0.1), ("m", ("99",), 2)]
