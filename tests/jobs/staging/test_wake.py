"""The wake-up: after a commit, at most one in an interval, and no job depends on it."""

from __future__ import annotations

import logging

import psycopg
import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections, transaction

from outbox_app.events import publish
from outbox_app.process import wakeup
from tests.jobs.staging.transactions import rolled_back

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["postgres"], indirect=True),
]


@pytest.fixture
def notified(alias):
    """``notified()``: how many wake-ups came since the last call."""
    parameters = connections[alias].get_connection_params()
    names = ("dbname", "host", "port", "user", "password")
    known = {name: parameters[name] for name in names if name in parameters}
    with psycopg.connect(autocommit=True, **known) as listener:
        listener.execute(f"LISTEN {wakeup.JOBS}")

        def count():
            # A notification of one's own comes after all that were committed before it.
            listener.execute(f"NOTIFY {wakeup.JOBS}, 'end'")
            for found, notification in enumerate(listener.notifies()):
                if notification.payload == "end":
                    return found

        yield count


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that the test moves; DEBOUNCE uses it."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(wakeup, "time", made)
    monkeypatch.setattr(wakeup, "_last_sent", {})
    return made


def test_a_commit_wakes_and_nothing_before_it(alias, add, notified):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        with transaction.atomic(using=alias):
            add.delay(2, 2)
        assert notified() == 0

    assert notified() == 1


def test_a_rollback_wakes_nobody(alias, add, notified):
    with rolled_back(alias):
        add.delay(1, 1)
    with transaction.atomic(using=alias), rolled_back(alias):
        add.delay(2, 2)

    assert notified() == 0


def test_a_job_wakes_whatever_becomes_of_the_savepoints_beside_it(alias, add, notified):
    with transaction.atomic(using=alias):
        with transaction.atomic(using=alias):
            add.delay(1, 1)
        with rolled_back(alias):
            add.delay(2, 2)

    assert notified() == 1


def test_a_transaction_registers_one_callback(alias, add):
    with transaction.atomic(using=alias):
        for i in range(50):
            add.delay(i, i)
        assert len(connections[alias].run_on_commit) == 1


@pytest.mark.django_db(transaction=False)
def test_a_test_that_captures_callbacks_sees_its_own_only(
    alias, add, django_capture_on_commit_callbacks
):
    def own():
        pass

    with django_capture_on_commit_callbacks(using=alias) as callbacks:
        add.delay(1, 1)
        with transaction.atomic(using=alias):
            publish("orders:1", "order.placed", {}, using=alias)
            transaction.on_commit(own, using=alias)

    assert callbacks == [own]


def test_at_most_one_in_the_debounce_window(alias, add, notified, clock):
    for _ in range(3):
        with transaction.atomic(using=alias):
            add.delay(1, 1)
    assert notified() == 1

    clock.now += wakeup.DEBOUNCE * 1.01
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    assert notified() == 1


def test_the_setting_turns_it_off(alias, add, notified, settings):
    settings.OUTBOX = {**settings.OUTBOX, "WAKE": False}
    with transaction.atomic(using=alias):
        add.delay(1, 1)

    assert notified() == 0


@pytest.mark.parametrize("limit", [SoftTimeLimitExceeded, KeyboardInterrupt])
def test_a_time_limit_of_the_callers_task_is_not_swallowed(alias, add, monkeypatch, limit):
    """And its connection, which waits for an answer, is not left to the next statement."""

    def interrupt(*args):
        raise limit

    monkeypatch.setattr(wakeup, "wake", interrupt)
    with pytest.raises(limit), transaction.atomic(using=alias):
        add.delay(1, 1)
    assert connections[alias].connection is None


def test_a_wake_up_that_fails_is_logged_and_no_more(alias, add, staged, caplog):
    connection = connections[alias]
    after = []
    with transaction.atomic(using=alias):
        transaction.on_commit(lambda: _cut(connection), using=alias)
        add.delay(1, 1)
        transaction.on_commit(lambda: after.append("the next one"), using=alias)
    connection.close()

    assert after == ["the next one"]
    [record] = caplog.records  # on one line: the commit has not failed
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage().startswith("Readers not woken, they will poll database=")
    assert staged() == [[1, 1]]


def test_a_wake_up_that_cannot_log_its_error_does_not_reach_the_caller(alias, add, monkeypatch):
    monkeypatch.setattr(wakeup, "wake", lambda *args: 1 / 0)
    monkeypatch.setattr(wakeup.logger, "warning", lambda *args: 1 / 0)
    with transaction.atomic(using=alias):
        add.delay(1, 1)


def _cut(connection):
    other = connection.copy()
    with other.cursor() as cursor:
        pid = connection.connection.info.backend_pid
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    other.close()
