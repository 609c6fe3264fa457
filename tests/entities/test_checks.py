"""``manage.py check`` names entity types with wrong declarations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import connections, models
from django.test.utils import isolate_apps

from outbox_app.entities import Entity, command, maintenance
from outbox_app.entities import checks as entities
from outbox_app.entities.models import EntityVersion
from tests.entities.models import Account, AccountVersion


@pytest.fixture
def found(monkeypatch, settings):
    """``found(*types)``: the ids and texts of the findings about these types."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": None}

    def check(*types):
        monkeypatch.setattr(
            maintenance, "apps", SimpleNamespace(get_models=lambda: [*types, AccountVersion])
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

    told = "Twin has the same versions: an id would name an entity of each type."
    assert ("outbox.E034", told) in found(Account, Twin)


@isolate_apps("tests.entities")
def test_a_proxy_is_no_type_of_its_own(found):
    class Shown(Account):
        class Meta:
            proxy = True
            app_label = "entities"

    assert found(Account, Shown) == []


def test_the_second_unique_index(found, monkeypatch):
    first, *_ = AccountVersion._meta.total_unique_constraints
    monkeypatch.setattr(AccountVersion._meta, "total_unique_constraints", [first])
    [(id, _)] = found(Account)
    assert id == "outbox.E039"


def test_two_databases(found, settings):
    settings.DATABASE_ROUTERS = [Apart()]
    [(id, text)] = found(Account)
    assert id == "outbox.E040"
    assert "'default'" in text
    assert "'elsewhere'" in text


def make(fields=(), constraints=(), **attributes):
    """A type with fields, constraints and attributes of its own."""

    class LooseVersion(EntityVersion):
        class Meta(EntityVersion.Meta):
            abstract = False
            app_label = "entities"

    meta = type("Meta", (), {"app_label": "entities", "constraints": list(constraints)})
    names = {"__module__": __name__, "versions": LooseVersion, "Meta": meta}
    return type("Loose", (Entity,), names | dict(fields) | attributes)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number from 1 on"),
        ({"batch_size": 1.5}, "batch_size must be a whole number from 1 on"),
        ({"batch_size": True}, "batch_size must be a whole number from 1 on"),
        ({"timeout": 0}, "timeout must be above 0, at most 1000000"),
        ({"timeout": "1"}, "timeout must be above 0, at most 1000000"),
        ({"timeout": None}, "timeout must be above 0, at most 1000000"),
        ({"timeout": float("nan")}, "timeout must be above 0, at most 1000000"),
        ({"timeout": 1_000_001}, "timeout must be above 0, at most 1000000"),
        ({"timeout": float("inf")}, "timeout must be above 0, at most 1000000"),
        ({"states": "all"}, 'states must be "every" or "last"'),
        ({"states": ["last"]}, 'states must be "every" or "last"'),
    ],
    ids=repr,
)
@isolate_apps("tests.entities")
def test_values_that_make_no_sense(found, attributes, text):
    assert found(make(**attributes)) == [("outbox.E041", f"{text}.")]


@isolate_apps("tests.entities")
def test_a_batch_handler_needs_the_last_states(found):
    def sell(self, requests):
        return []

    sell = command(batch=True)(sell)
    [(id, text)] = found(make(sell=sell))
    assert id == "outbox.E041"
    assert 'states must be "last"' in text


@isolate_apps("tests.entities")
def test_a_batch_handler_with_the_last_states(found):
    assert found(make(sell=command(batch=True)(lambda self, requests: []), states="last")) == []


@isolate_apps("tests.entities")
def test_what_the_database_looks_at_when_it_commits(found):
    late = models.UniqueConstraint(fields=["n"], name="late", deferrable=models.Deferrable.DEFERRED)
    fields = {
        "n": models.IntegerField(null=True),
        "owner": models.ForeignKey("entities.Person", models.CASCADE, null=True),
        "twin": models.OneToOneField("entities.Stock", models.CASCADE, null=True),
    }
    [(id, text)] = found(make(fields, [late]))
    assert id == "outbox.E042"
    assert "checks late, owner, twin only at COMMIT" in text


@isolate_apps("tests.entities")
def test_columns_that_a_batch_may_have(found):
    owner = models.ForeignKey("entities.Person", models.DO_NOTHING, null=True, db_constraint=False)
    seat = models.UniqueConstraint(fields=["owner"], name="seat")
    assert found(make({"owner": owner}, [seat])) == []


@isolate_apps("tests.entities")
def test_a_check_constraint_belongs_into_a_rule(found):
    positive = models.CheckConstraint(condition=models.Q(version__gt=0), name="positive")
    [(id, text)] = found(make((), [positive]))
    assert id == "outbox.W033"
    assert "violates positive raises IntegrityError" in text


def test_requests_with_transactions_of_their_own(found, monkeypatch):
    found(Account)
    settings = connections.settings["default"]
    assert entities.check_requests() == []
    monkeypatch.setitem(settings, "ATOMIC_REQUESTS", True)
    [message] = entities.check_requests()
    assert message.id == "outbox.W034"
    assert "'default'" in message.msg
    assert "Account is written there" in message.msg
    assert "Put @transaction.non_atomic_requests('default') on the views" in message.hint
    monkeypatch.setitem(connections.settings, "elsewhere", settings)
    [message] = entities.check_requests()  # a view is to have neither: it could not execute
    marks = "@transaction.non_atomic_requests('default') and @transaction.non_atomic_requests('e"
    assert marks in message.hint
    found()
    assert entities.check_requests() == []


class Apart:
    """Writes versions elsewhere."""

    def db_for_write(self, model, **hints):
        return "elsewhere" if model is AccountVersion else "default"
