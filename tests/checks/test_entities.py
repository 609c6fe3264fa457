"""Entity types that are declared wrongly are named by ``manage.py check``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import models
from django.test.utils import isolate_apps

from outbox_app.checks import entities
from outbox_app.entities import Entity
from outbox_app.models import EntityVersion
from tests.entities.models import Account, AccountVersion


@pytest.fixture
def found(monkeypatch, settings):
    """``found(*types)``: ids and texts of what is said of these types."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": None}

    def check(*types):
        monkeypatch.setattr(
            entities, "apps", SimpleNamespace(get_models=lambda: [*types, AccountVersion])
        )
        return [(message.id, message.msg) for message in entities.check_entities()]

    return check


def test_a_type_that_is_right(found):
    assert found(Account) == []


@pytest.mark.parametrize("versions", [None, models.Model, EntityVersion, "AccountVersion"])
def test_versions_that_are_none(found, monkeypatch, versions):
    monkeypatch.setattr(Account, "versions", versions)
    [(id, text)] = found(Account)
    assert id == "outbox.E034"
    assert "must be a concrete model derived from EntityVersion" in text


@isolate_apps("tests.entities")
def test_two_types_with_one_log(found):
    class Twin(Entity):
        versions = AccountVersion

        class Meta:
            app_label = "entities"

    told = "Twin has the same versions: ids of the one would be ids of the other."
    assert ("outbox.E034", told) in found(Account, Twin)


@isolate_apps("tests.entities")
def test_a_type_that_is_derived_from_another(found):
    class SavingsVersion(EntityVersion):
        class Meta(EntityVersion.Meta):
            abstract = False
            app_label = "entities"

    class Savings(Account):
        versions = SavingsVersion

        class Meta:
            app_label = "entities"

    [(id, text)] = found(Savings)
    assert id == "outbox.E034"
    assert "derived from another type" in text


@isolate_apps("tests.entities")
def test_a_proxy_is_no_type_of_its_own(found):
    class Shown(Account):
        class Meta:
            proxy = True
            app_label = "entities"

    assert found(Account, Shown) == []


def test_the_second_unique_index(found, monkeypatch):
    monkeypatch.setattr(AccountVersion._meta, "constraints", AccountVersion._meta.constraints[:1])
    [(id, _)] = found(Account)
    assert id == "outbox.E039"


def test_two_databases(found, settings):
    settings.DATABASE_ROUTERS = [Apart()]
    [(id, text)] = found(Account)
    assert id == "outbox.E040"
    assert "'default'" in text
    assert "'elsewhere'" in text


class Apart:
    """Writes versions elsewhere."""

    def db_for_write(self, model, **hints):
        return "elsewhere" if model is AccountVersion else "default"
