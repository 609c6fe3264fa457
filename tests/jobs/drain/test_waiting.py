"""Waiting on PostgreSQL: commits wake the drainer, several at once; without LISTEN it polls."""

from __future__ import annotations

from multiprocessing.connection import wait

import pytest
from django.db import connections

from outbox_app.database.watchdog import Watchdog
from outbox_app.process import waiting
from outbox_app.retention.run import Retention

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["postgres"], indirect=True),
]


@pytest.fixture
def listener(alias):
    stop = waiting.StopFlag()
    watchdog = Watchdog(using=alias, limit=60)
    made = waiting.waiter(stop, using=alias, watchdog=watchdog, channel="outbox_jobs")
    yield made
    made.close()


def notify(alias, payload=""):
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_notify('outbox_jobs', %s)", [payload])


def test_a_commit_wakes_it(alias, listener):
    listener.wait(0)  # listens from now on
    notify(alias)
    assert listener.wait(60)


def test_all_that_has_piled_up_wakes_it_once(alias, listener):
    """Or a few times, where the server is so busy that the last of it comes late."""
    listener.wait(0)
    for _ in range(2000):
        notify(alias)
    assert listener.wait(60)
    assert sum(1 for _ in iter(lambda: listener.wait(0.1), False)) < 20


def test_a_busy_loop_reads_what_has_come(alias, listener):
    """Otherwise the server keeps it, after hours in a queue that all its databases share."""
    listener.wait(0)
    heard = listener.watchdog.listener.connection
    while listener._token:  # its test of itself
        listener.wait(0.1)
    turns = iter([True, True, True, False])

    class Busy(Retention):
        def _turn(self):
            notify(alias)
            assert wait([heard.fileno()], timeout=60)  # for the server, which may be slow
            return next(turns)

    loop = Busy(using=alias)
    loop._waiter = listener
    loop._turns(once=True)
    assert len(list(heard.notifies(timeout=0.5))) == 1  # of the last turn, which is idle


def test_the_tests_of_other_drainers_do_not_wake_it(alias, listener):
    listener.wait(0)
    notify(alias, "a token")
    assert not listener.wait(0.3)


def test_nothing_is_waited_for_after_a_stop(listener):
    listener.wait(0)
    listener.stop.set()
    assert not listener.wait(60)


def test_one_that_hears_nothing_is_given_up(alias, listener, monkeypatch, caplog):
    listener.channel = "another_channel"
    monkeypatch.setattr(waiting, "TEST_SECONDS", 0.0)
    listener.wait(0)
    listener.channel = "outbox_jobs"
    listener._token = "never sent"
    assert not listener.wait(0.5)
    [record] = [each for each in caplog.records if each.msg.startswith("LISTEN does not work")]
    assert record.reason.startswith("OperationalError: a NOTIFY was not heard")
    assert listener.watchdog.listener is None
    # It is tried again after a while.
    monkeypatch.setattr(waiting, "TEST_SECONDS", 60.0)
    listener._test_at = 0.0
    listener.wait(0)
    notify(alias)
    assert listener.wait(60)


def test_a_listener_that_was_killed_is_no_trouble(alias, listener, caplog):
    listener.wait(0)
    pid = listener.watchdog.listener.connection.info.backend_pid
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
    assert not listener.wait(0.5)
    assert "LISTEN does not work, polling instead" in caplog.text
