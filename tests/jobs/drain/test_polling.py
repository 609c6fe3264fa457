"""How often idle readers poll, and the cost of a poll."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.events import subscriber
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.jobs.drain.drain import Drain
from outbox_app.process import wakeup
from tests import tasks
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)

#: Where commits wake, and where nothing does.
DEFAULTS = {"postgres": 1.0, MARIADB: 0.1, "default": 0.1}


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


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_commit_whose_wake_up_was_left_out_waits_no_longer_than_one_that_sent_it(alias):
    """After a wake-up it looks for longer than commits may be silent, at shorter intervals."""
    drain = Drain(using=alias, interval=30, lease_seconds=600)
    pauses, woken = [], iter([False, True])

    class Waiter:
        def wait(self, seconds):
            pauses.append(seconds)
            if pauses.count(30) == 3:
                drain.stop()
            return seconds == 30 and next(woken, False)

        def close(self):
            pass

    drain._waiter = Waiter()
    drain.run()

    *_, first, second, third = (n for n, pause in enumerate(pauses) if pause == 30)
    assert second == first + 1  # nothing woke it
    silent = pauses[second + 1 : third]
    assert sum(silent) > wakeup.DEBOUNCE >= max(silent)


def stage(note, alias):
    with transaction.atomic(using=alias):
        note.delay("", 1)
