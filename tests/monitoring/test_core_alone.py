"""Jobs alone: without the doors of capabilities, the core shows and runs itself only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from outbox_app import capability, supervisor
from outbox_app.metrics import exposition
from outbox_app.monitoring import outbox_status, problems

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def alone(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    core = apps.get_app_config("outbox_app")
    monkeypatch.setattr(capability, "capabilities", lambda: [core])
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    capability.all_doors.cache_clear()
    capability.kinds.cache_clear()


def test_the_status(alias: str) -> None:
    facts = outbox_status()
    assert facts.sections == {}
    assert [each.code for each in problems(facts)] == ["no_drainer"]
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("outbox_status", "--json", stdout=out)
    assert {"subscriptions", "gaps", "prepared"}.isdisjoint(json.loads(out.getvalue()))


def test_the_metrics(alias: str) -> None:
    text = exposition("")[0].decode()
    assert "outbox_backlog_jobs" in text
    assert "outbox_subscription" not in text
    assert 'code="gaps"' not in text


@pytest.mark.django_db(transaction=True, databases="__all__")  # users are on the default alias
def test_the_overview(alias: str) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("ann"))
    page = client.get("/admin/outbox_app/overview/").content.decode()
    assert "Drainers" in page
    assert "Ready" in page
    assert "Subscriptions behind" not in page


def test_what_is_pruned(alias: str) -> None:
    call_command("outbox_prune", "--inbox", "--incidents", "--counters", stdout=StringIO())
    with pytest.raises(CommandError, match="unrecognized arguments: --events"):
        call_command("outbox_prune", "--events", stdout=StringIO())


def test_what_runs(alias: str) -> None:
    assert [name for name, _ in supervisor._loops(alias, only=None)] == ["jobs", "retention"]
