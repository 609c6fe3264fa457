"""How often idle readers look, and what a look costs."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app import subscriber
from outbox_app.jobs.drain.drain import Drain
from outbox_app.subscriptions.runner import Runner
from outbox_app.subscriptions.subscriber import subscriber_named
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)

#: Where commits wake, and where nothing does.
DEFAULTS = {"postgres": 1.0, "mariadb": 0.1, "default": 0.1}


@pytest.fixture
def runner():
    subscriber("one")(lambda events: None)
    return lambda **options: Runner([subscriber_named("one")], **options)


def test_by_default(alias, runner):
    assert Drain(using=alias).interval == runner().interval == DEFAULTS[alias]


def test_without_wake_ups_it_polls_on_postgresql_too(alias, runner, settings):
    settings.OUTBOX = {**settings.OUTBOX, "WAKE": False}
    assert Drain(using=alias).interval == runner().interval == 0.1


def test_each_has_a_setting(alias, runner, settings):
    settings.OUTBOX = {**settings.OUTBOX, "INTERVAL": 3, "SUBSCRIPTION_INTERVAL": 4}
    assert (Drain(using=alias).interval, runner().interval) == (3, 4)
    assert (Drain(using=alias, interval=5).interval, runner(interval=6).interval) == (5, 6)


def test_a_poll_of_an_empty_outbox_is_one_statement(alias, make_app, monkeypatch):
    note = make_app().task(name="note")(tasks.note)
    drain = Drain(using=alias, lease_seconds=600)
    # What a minute costs, whether there are jobs or not: tests/process/counters.
    monkeypatch.setattr(drain._counters, "keep", lambda: None)
    stage(note, alias)
    while drain.run_once() or not drain.tally.published:
        pass
    for _ in range(2):
        with CaptureQueriesContext(connections[alias]) as statements:
            assert not drain.run_once()
        assert len(statements) == 1
    stage(note, alias)
    assert drain.run_once()
    assert drain.tally.published == 2
    drain.holder.leave()


def stage(note, alias):
    with transaction.atomic(using=alias):
        note.delay("", 1)
