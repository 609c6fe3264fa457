"""The watchdog ends a statement without an answer, even if the driver has no timeout."""

from __future__ import annotations

import os
import socket

import django.db
import pytest
from django.db import connections

from outbox_app.database.watchdog import Watchdog
from outbox_app.events import subscriber
from outbox_app.events.subscriptions.run import run_here
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.retention.run import Retention
from tests.patience import patience

from .tools import alias_for, on


@pytest.fixture(params=["POSTGRES_URL", "MARIADB_URL"])
def behind_a_proxy(request, proxy, django_db_blocker):
    """An alias without any timeout, and the proxy in front of its server."""
    if request.param not in os.environ:
        pytest.skip(f"{request.param} is not set")
    link, url = proxy(os.environ[request.param])
    with django_db_blocker.unblock(), alias_for(url) as alias:
        yield alias, link


def answer(alias):
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")
        return cursor.fetchone()


def assert_cut(watchdog, alias, link):
    watchdog.limit = 0.5
    with watchdog.watching():
        assert answer(alias) == (1,)
        link.mode = "blackhole"
        with pytest.raises(django.db.Error):
            answer(alias)


def test_statement_without_an_answer_is_cut(behind_a_proxy):
    alias, link = behind_a_proxy
    watchdog = Watchdog(using=alias, limit=0.5)
    with watchdog.watching():
        assert answer(alias) == (1,)
        link.mode = "blackhole"
        with pytest.raises(django.db.Error):
            answer(alias)
        connections[alias].close()
        link.mode = "pass"
        link.cut()
        assert answer(alias) == (1,)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_end_of_a_transaction_is_cut_too(behind_a_proxy, end):
    """A COMMIT is no statement to Django."""
    alias, link = behind_a_proxy
    watchdog = Watchdog(using=alias, limit=0.5)
    connections[alias].set_autocommit(False)
    with watchdog.watching():
        assert answer(alias) == (1,)
        link.mode = "blackhole"
        with pytest.raises(django.db.Error):
            getattr(connections[alias], end)()
    connections[alias].close()


def test_a_replica_is_cut_too(behind_a_proxy):
    alias, link = behind_a_proxy
    subscriber("late", by_time=True, on_gap="park", read_from=alias)(print)
    subscriber("wrong", by_time=True, on_gap="park", read_from="nowhere")(print)
    watchdog = Runner([subscriber_named("late"), subscriber_named("wrong")])._watchdog
    assert_cut(watchdog, alias, link)


def test_an_inbox_that_is_pruned_elsewhere_is_cut_too(behind_a_proxy, settings):
    alias, link = behind_a_proxy
    settings.OUTBOX = {**settings.OUTBOX, "INBOX_DATABASE": alias}
    watchdog = Retention(using="default")._watchdog
    assert_cut(watchdog, alias, link)


@on("postgres", "mariadb")
@pytest.mark.django_db
def test_connecting_to_a_replica_is_bounded(alias, monkeypatch):
    options = {**connections[alias].settings_dict["OPTIONS"]}
    options.pop("connect_timeout", None)  # as a command of another test has left it
    monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", options)
    monkeypatch.setattr(Runner, "run", lambda runner, once: 0)
    subscriber("late", by_time=True, on_gap="park", read_from=alias)(print)
    run_here([subscriber_named("late")], once=True, listen=lambda stop: None)
    assert options["connect_timeout"] == 10


def test_what_has_taken_the_place_of_its_socket_is_left_alone(behind_a_proxy):
    """While it connects anew, the number of the old one may be another part's, or a broker's."""
    alias, _ = behind_a_proxy
    watchdog = Watchdog(using=alias, limit=patience(0.2))
    one, other = socket.socketpair()
    with watchdog.watching():
        assert answer(alias) == (1,)
        number = connections[alias].connection.fileno()
        connections[alias].close()
        os.dup2(one.fileno(), number)
        try:
            with watchdog.busy():
                watchdog._ended.wait(4 * watchdog.limit)
            other.send(b"x")
            assert one.recv(1) == b"x"
        finally:
            os.close(number)
            one.close()
            other.close()


def test_time_spent_with_the_broker_is_not_the_database_s(behind_a_proxy):
    alias, _ = behind_a_proxy
    watchdog = Watchdog(using=alias, limit=patience(0.2))
    with watchdog.watching():
        assert answer(alias) == (1,)
        watchdog._ended.wait(4 * watchdog.limit)
        assert answer(alias) == (1,)
        watchdog._ended.wait(4 * watchdog.limit)
        assert answer(alias) == (1,)
