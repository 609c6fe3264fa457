"""A task's mode: by its attribute, else by the first pattern that matches its name."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from outbox_app import stage
from outbox_app.exceptions import NotAtomic
from tests.jobs.staging import tasks
from tests.jobs.staging.test_rules import FORMS
from tests.jobs.staging.transactions import rolled_back

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["default"]),
]


@pytest.fixture
def modes(settings):
    def choose(**patterns):
        settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": patterns}

    return choose


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
def test_in_each_form_a_task_of_mode_send_leaves_at_once(send, alias, add, staged, sent, modes):
    modes(**{"a?d": "send"})
    with rolled_back(alias):
        send(add)
        assert not staged()
    assert sent()


def test_the_first_pattern_that_matches_decides(alias, app, staged, sent, modes):
    modes(**{"shop.ping": "send", "shop.*": "stage", "*": "send"})
    with transaction.atomic(using=alias):
        for name in ("shop.ping", "shop.pay", "Shop.pay", "mail"):
            app.send_task(name, (name,))
        assert sent() == [["shop.ping"], ["Shop.pay"], ["mail"]]
    assert staged() == [["shop.pay"]]


def test_what_no_pattern_matches_is_staged(alias, add, staged, modes):
    modes(**{"mail.*": "send"})
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    assert staged() == [[1, 1]]


def test_the_attribute_of_a_task_wins(alias, app, staged, sent, modes):
    modes(**{"*": "send"})
    kept = app.task(name="kept", outbox="stage", shared=False)(tasks.add)
    app.task(name="ping", outbox="send", shared=False)(tasks.add)  # not asked for by now
    with transaction.atomic(using=alias):
        kept.delay(1, 1)
        modes()
        app.send_task("ping", (2, 2))
        assert sent() == [[2, 2]]
    assert staged() == [[1, 1]]


def test_an_app_that_the_project_finalizes_itself(alias, app, staged, sent):
    """Celery refuses to look into it before."""
    app.autofinalize = False
    app.task(name="ping", outbox="send", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        app.send_task("ping", (1, 1))
        app.finalize()
        app.send_task("ping", (2, 2))
    assert sent() == [[2, 2]]
    assert staged() == [[1, 1]]


def test_each_task_of_a_canvas_has_its_own(alias, app, add, staged, sent):
    ping = app.task(name="ping", outbox="send", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        group(add.s(1, 1), ping.s(2, 2), add.s(3, 3)).delay()
        chain(ping.s(4, 4), add.s(5)).delay()
        chain(add.s(6, 6), ping.s(7)).delay()
        assert sorted(sent()) == [[2, 2], [4, 4]]
    assert staged() == [[1, 1], [3, 3], [6, 6]]


def test_what_celery_calls_for_a_task_has_its_mode(alias, app, add, staged, modes, monkeypatch):
    """``celery.map``, and where a backend counts no chord ``celery.chord_unlock``."""
    monkeypatch.setattr(type(app.backend), "supports_native_join", False, raising=False)
    monkeypatch.setattr(type(app.backend), "implements_incr", False, raising=False)
    app.task(name="ping", outbox="send", shared=False)(tasks.add)
    modes(**{"celery.*": "stage", "add": "send"})
    with rolled_back(alias):
        add.map([1]).delay()
        add.starmap([(1, 1)]).delay()
        app.send_task("celery.chord_unlock", ("id", add.s(1)))
        app.send_task("celery.chord_unlock", ("id", add.s(1) | app.signature("kept")))
        assert not staged()
    with transaction.atomic(using=alias):
        app.send_task("celery.chord_unlock", ("id", app.signature("kept")))
        app.send_task("celery.chord_unlock")  # by hand
        app.send_task("celery.map", (), {})
    assert len(staged()) == 3


def test_an_explicit_stage_stages_in_any_mode(alias, add, staged, sent, modes):
    modes(add="send")
    with transaction.atomic(using=alias):
        stage(add, (1, 1), using=alias)
        stage(chord([add.s(2, 2)], add.s(3)), using=alias)
    assert staged() == [[1, 1], [2, 2]]
    assert not sent()


def test_on_commit_calls_of_mode_send_wait_for_the_commit(alias, add, staged, sent, modes):
    modes(add="send")
    with transaction.atomic(using=alias):
        add.delay_on_commit(1, 1)
        assert not sent()
        with rolled_back(alias):
            add.apply_async_on_commit((2, 2))
    assert sent() == [[1, 1]]
    assert not staged()


def test_an_order_is_refused_for_what_would_overtake(alias, add, staged, modes):
    modes(add="send")
    with (
        transaction.atomic(using=alias),
        pytest.raises(NotAtomic, match=r"but in the mode 'send'.* Give the task the mode 'stage'"),
    ):
        add.apply_async((1, 1), ordering_key="k")


@pytest.mark.parametrize("outbox", [False, "stag"])
def test_an_attribute_that_is_no_mode_is_refused(outbox, alias, app):
    ping = app.task(name="ping", outbox=outbox, shared=False)(tasks.add)
    with (
        transaction.atomic(using=alias),
        pytest.raises(ImproperlyConfigured, match=f"mode of task ping is {outbox!r}; expected one"),
    ):
        ping.delay(1, 1)
