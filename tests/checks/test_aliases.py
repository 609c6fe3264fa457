"""Checks of the aliases of the outbox and of the business rows, and of their connections."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.db import connections

from outbox_app.checks.aliases import (
    check_autocommit,
    check_business,
    check_zones,
    written_aliases,
)
from outbox_app.checks.databases import _check_primary
from outbox_app.checks.models import check_models
from outbox_app.events.models import Event
from outbox_app.models import StagedJob
from tests.mixin.models import Order


class Router:
    """Writes orders elsewhere, or all models of the business."""

    business = (Order,)

    def db_for_write(self, model, **hints):
        return "elsewhere" if model in self.business else None


def alias_messages(**kwargs):
    """Say what is told of their aliases: the tasks that are loaded depend on other tests."""
    found = check_models(**kwargs)
    return [each for each in found if each.id == "outbox.E023"]


@pytest.fixture
def business():
    """The models of the project, without those of Django and of the package."""
    ours = [config for config in apps.get_app_configs() if config.name.startswith("tests")]
    return tuple(model for config in ours for model in config.get_models())


def test_one_database():
    assert alias_messages() == []
    assert check_business() == []
    assert alias_messages(app_configs=[apps.get_app_config("auth")]) == []


def test_model_that_is_written_elsewhere(settings):
    settings.DATABASE_ROUTERS = [Router()]
    [message] = alias_messages()
    assert (message.id, message.obj) == ("outbox.E023", Order)
    assert "'elsewhere'" in message.msg
    assert "--database elsewhere" in message.hint
    assert "'elsewhere' needs the tables" in message.hint
    assert alias_messages(app_configs=[apps.get_app_config("auth")]) == []


def test_nothing_is_written_where_jobs_are_staged(settings, monkeypatch, business):
    settings.DATABASE_ROUTERS = [Router()]
    monkeypatch.setattr(Router, "business", business)
    [message] = check_business()
    assert message.id == "outbox.E024"
    assert "staged on 'default'" in message.msg
    assert "models to 'elsewhere' only" in message.msg
    monkeypatch.setattr(Router, "business", business[1:])
    assert check_business() == []


def test_an_outbox_beside_the_business(settings):
    settings.OUTBOX = {"DATABASE": "elsewhere"}
    [message] = check_business()
    assert "staged on 'elsewhere'" in message.msg
    assert "models to 'default' only" in message.msg


def test_routers_of_a_project_with_fewer_databases(settings, monkeypatch):
    """As on a developer's machine: every command raised KeyError."""
    monkeypatch.setattr(Router, "business", (Event, StagedJob))
    settings.OUTBOX, settings.DATABASE_ROUTERS = {}, [Router()]
    assert check_autocommit() == check_zones() == []


def test_a_project_without_models(monkeypatch):
    theirs = [StagedJob, *apps.get_app_config("auth").get_models()]
    monkeypatch.setattr("outbox_app.checks.aliases.apps.get_models", lambda: theirs)
    assert check_business() == []


def test_the_inbox_is_written_to(settings, monkeypatch):
    settings.OUTBOX = {"DATABASE": "default", "INBOX_DATABASE": "other"}
    monkeypatch.setitem(connections.settings, "other", connections.settings["default"])
    assert written_aliases() == {"default", "other"}


def test_a_primary_is_no_standby(alias):
    assert list(_check_primary(alias)) == []


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Vienna"])
def test_times_are_stored_in_another_zone_than_that_of_the_clock(alias, zone, monkeypatch):
    """There a job that is held for ten minutes left after seventy, or at once west of UTC."""
    monkeypatch.setitem(connections[alias].settings_dict, "TIME_ZONE", zone)
    if zone != "Europe/Vienna" or connections[alias].vendor == "postgresql":
        assert check_zones() == []
        return
    [warning] = check_zones()
    assert warning.id == "outbox.W045"
    assert f"DATABASES[{alias!r}]['TIME_ZONE'] is 'Europe/Vienna'" in warning.msg
