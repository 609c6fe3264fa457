"""Actions of a person while a page is being handled, at each isolation level of the alias."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from django.db import connections

from outbox_app.events import subscriber
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Cursor, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.subscriptions.cursors import PartitionsDiffer
from outbox_app.events.subscriptions.repartition import adopt_partitions, replace_cursors
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.events.log.sessions import Session
from tests.faults.tools import eventually, on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


@pytest.fixture
def repeatable_read(alias, monkeypatch):
    """New connections of the alias use REPEATABLE READ."""
    level = "repeatable read"
    if alias == "postgres":
        from psycopg import IsolationLevel

        level = IsolationLevel.REPEATABLE_READ
    monkeypatch.setitem(connections.settings[alias]["OPTIONS"], "isolation_level", level)


@on("postgres", "mariadb")
@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_stream_that_is_parked_while_a_reset_waits_comes_again(
    alias, published, run, request, level
):
    """The reset has looked before that page was committed, and goes on after it."""
    seen, poison, errors = [], {"bad"}, []
    locks = threading.Event()

    def note(execute, sql, params, many, context):
        if "outbox_cursor" in sql and "FOR UPDATE" in sql:
            locks.set()
        return execute(sql, params, many, context)

    def reset():
        try:
            with connections[alias].execute_wrapper(note):
                control.replay("shop", "beginning", using=alias)
        except Exception as error:
            errors.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=reset)

    @subscriber("shop", on_error="park")
    def handle(events):
        streams = [event.stream for event in events]
        if poison.intersection(streams):
            raise ValueError
        if poison and streams == ["last"]:  # event by event: "bad" is parked by now
            thread.start()
            assert locks.wait(patience())
            poison.clear()
        seen.extend(streams)

    published("bad", "last")
    run("shop")
    run("shop")
    if level == "repeatable read":
        request.getfixturevalue("repeatable_read")
    run("shop")
    thread.join(patience())
    assert not errors
    run("shop")
    assert not ParkedStream.objects.using(alias).exists()
    assert seen == ["last", "bad", "last"]


@on("postgres", "mariadb")
@pytest.mark.parametrize("parts", [1, 2])
def test_a_page_of_another_subscription_is_not_waited_for(
    alias, published, run, seen_by, monkeypatch, parts
):
    """MySQL walks a small table from its beginning, and waits for each row that is locked."""
    monkeypatch.setattr(control, "LOCK_SECONDS", 1)
    published("a", "b", "c")
    for name in ("first", "shop", "last"):
        seen_by(name, partitions=parts)
        run(name)
    with Session(alias).begin() as page:
        for cursor in Cursor.objects.using(alias).exclude(subscription="shop"):
            page.sql(f"UPDATE outbox_cursor SET error = '' WHERE id = {cursor.pk}")
        control.pause("shop", using=alias)
        control.resume("shop", using=alias)
        control.replay("shop", "beginning", using=alias)
        run("shop")
        module._subscribers.pop("shop")
        seen = seen_by("shop", partitions=3)
        control.repartition("shop", using=alias)
        control.replay("shop", "beginning", using=alias)
        run("shop")
    assert len(seen) == 3


@on("postgres", "mariadb")
@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_stream_that_is_parked_while_the_number_of_partitions_changes(
    alias, published, run, request, level
):
    """The page of the old number commits after the new code has looked, and before it writes."""
    seen, errors, locks, threads = [], [], threading.Event(), []
    bad = next(name for name in map(str, range(99)) if slice_of(name) % 2)

    def note(execute, sql, params, many, context):
        if "outbox_cursor" in sql and "FOR UPDATE" in sql:
            locks.set()
        return execute(sql, params, many, context)

    def adopt():
        try:
            with connections[alias].execute_wrapper(note):
                adopt_partitions(subscriber_named("shop"), using=alias)
        except Exception as error:
            errors.append(error)
        finally:
            connections[alias].close()

    def handle(events):
        streams = [event.stream for event in events]
        if bad in streams and not seen:
            raise ValueError
        if len(events) == 1 and not threads:  # event by event: the stream is parked by now
            subscriber("shop", on_error="park", partitions=2)(handle)
            threads.append(threading.Thread(target=adopt))
            threads[0].start()
            assert locks.wait(patience())
        seen.extend(streams)

    subscriber("shop", on_error="park")(handle)
    published(bad, "last")
    old = Runner([subscriber_named("shop")])
    run("shop")
    run("shop")
    if level == "repeatable read":
        request.getfixturevalue("repeatable_read")
    old.run(once=True)
    [thread] = threads
    thread.join(patience())
    assert not errors
    assert ParkedStream.objects.using(alias).get().partition == 1
    published(bad)
    assert run("shop") == 0


@pytest.fixture
def has_run(published, run, seen_by):
    """The subscription ``shop`` has run, and is declared no more."""
    published("a")
    seen_by("shop")
    run("shop")
    module._subscribers.pop("shop")


@pytest.fixture
def a_session_waits(alias):
    """``a_session_waits()``: whether one waits for a lock, seen from outside all transactions."""

    def waits():
        with watcher.cursor() as cursor:
            cursor.execute(
                "SELECT 1 FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            return cursor.fetchone()

    with closing(connections.create_connection(alias)) as watcher:
        yield waits


@on("postgres")
def test_a_deletion_takes_the_cursor_that_another_act_is_making(alias, has_run, a_session_waits):
    """Left behind, it would keep events from being pruned for ever."""

    def delete():
        control.delete_subscription("shop", using=alias)
        connections[alias].close()

    thread = threading.Thread(target=delete)
    with control.locked("shop", alias) as (_, [cursor]):
        cursor.pk, cursor.partition = None, 1
        cursor.save(using=alias)
        thread.start()
        eventually(a_session_waits)
    thread.join(patience())
    assert not Cursor.objects.using(alias).exists()


@on("postgres")
def test_of_two_changes_of_the_number_of_partitions_the_second_sees_the_first(
    alias, has_run, seen_by, a_session_waits
):
    """Else the subscription has the number of one and the cursors of the other: neither runs."""
    seen_by("shop", partitions=3)
    errors = []

    def change():
        try:
            adopt_partitions(subscriber_named("shop"), using=alias)
        except PartitionsDiffer as error:
            errors.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=change)
    with control.locked("shop", alias) as (row, [cursor]):
        thread.start()
        eventually(a_session_waits)
        replace_cursors([cursor], [(cursor.state, cursor.position)] * 2)
        row.partitions = 2
        row.save(using=alias)
    thread.join(patience())
    assert "has 2 partitions in the database and 3 in the code" in str(errors)
    assert Subscription.objects.using(alias).get().partitions == 2
