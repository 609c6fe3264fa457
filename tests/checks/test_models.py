"""Checks of declarations in models that cannot work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import _state
from django.apps import apps
from django.db import models
from django.test.utils import isolate_apps

from outbox_app import OutboxMixin, on_create, on_delete, on_update
from outbox_app import models as core
from outbox_app.checks import models as checked
from outbox_app.checks.models import check_models
from outbox_app.events import models as events


@pytest.fixture
def app(make_app):
    """The current app, as in a project."""
    before = getattr(_state._tls, "current_app", None)
    app = make_app(imports=["tests.mixin.tasks"])
    app.set_current()
    yield app
    _state._set_current_app(before)


@pytest.fixture
def check(app, monkeypatch):
    """``check(outbox, **fields)``: the ids of the findings for a model with this declaration."""

    def check(outbox, **fields):
        with isolate_apps("tests.mixin"):
            members = {"__module__": "tests.mixin.models", "outbox": outbox, **fields}
            model = type("Checked", (OutboxMixin, models.Model), members)
            monkeypatch.setattr(checked, "apps", SimpleNamespace(get_models=lambda: [model]))
            messages = check_models()
        assert all(message.obj is model for message in messages)
        return [message.id for message in messages]

    return check


def test_models_of_the_tests_are_well(app):
    assert check_models() == []
    assert check_models(app_configs=[apps.get_app_config("auth")]) == []


@pytest.mark.parametrize(
    "outbox",
    [
        (),
        [on_create("mixin.created"), on_update(lambda order: None, when=lambda order: True)],
        (on_delete("mixin.deleted", ordered=True),),
    ],
)
def test_declarations_that_work(check, outbox):
    assert check(outbox) == []


@pytest.mark.parametrize(
    "outbox",
    [
        "mixin.created",
        on_create("mixin.created"),
        ["mixin.created"],
        [on_create(None)],
        [on_create("mixin.created", when="paid")],
    ],
)
def test_declarations_that_cannot_work(check, outbox):
    assert check(outbox) == ["outbox.E006"]


def test_unknown_task(check, make_app):
    assert check([on_create("mixin.create"), on_delete("mixin.deleted")]) == ["outbox.W005"]
    assert check([on_create("mixin.created", app=make_app(accept_content=["json"]))]) == []


def test_unknown_task_of_a_plain_project_is_its_own_business(check, app):
    from celery import Celery

    Celery("plain").set_current()
    assert check([on_create("mixin.create")]) == []


def test_field_named_outbox(check):
    assert check(models.TextField()) == ["outbox.E006"]


@pytest.mark.parametrize(("app", "module"), [("app", core), ("events", events)])
def test_a_star_import_takes_all_models_and_hides_no_transaction(app, module):
    own = {each.__name__ for each in apps.get_app_config(f"outbox_{app}").get_models()}
    assert own <= set(module.__all__)
    assert "transaction" not in module.__all__
