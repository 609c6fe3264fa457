"""Handlers that end the transaction of their page: they are detected and reported."""

from __future__ import annotations

import json
import threading
from contextlib import suppress

import pytest
from django.db import DatabaseError, close_old_connections, connections, transaction

from outbox_app.events import subscriber
from outbox_app.events.models import Cursor, ParkedStream
from outbox_app.events.subscriptions import control, rebase_outbox
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.models import Incident
from tests.database.endings import each_ending, end
from tests.events.subscriptions.test_handlers import note, noted
from tests.faults.tools import on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def execute(alias, *statements):
    with connections[alias].cursor() as cursor:
        for sql in statements:
            cursor.execute(sql)


def test_what_a_handler_may_do_inside(alias, published, run):
    @subscriber("fine")
    def handle(events):
        for event in events:
            with transaction.atomic(using=alias):
                note(alias, event)
            with transaction.atomic(using=alias):
                note(alias, event)
                transaction.set_rollback(True, using=alias)
        execute(alias, "CREATE TEMPORARY TABLE outbox_aside (id int)")
        execute(alias, f"DROP {'TEMPORARY ' if alias == 'mariadb' else ''}TABLE outbox_aside")

    published("a", "b")
    assert run("fine") == 2
    assert noted(alias) == ["a1", "b1"]


@each_ending
@pytest.mark.parametrize(
    ("then", "on_error"),
    [
        ("raises", "stop"),
        ("raises", "park"),
        ("returns", "park"),
        ("database error", "stop"),
        ("swallowed error", "stop"),
        ("model error", "park"),
    ],
)
def test_a_transaction_that_was_ended(alias, published, run, way, then, on_error):
    calls = []

    @subscriber("ends", on_error=on_error)
    def handle(events):
        calls.append([event.id for event in events])
        if len(calls) == 1:
            return
        note(alias, events[0])
        if len(calls) > 2:
            return
        end(way, alias)
        for event in events[1:]:
            note(alias, event)
        if then == "raises":
            raise ValueError("halfway")
        if then == "swallowed error":
            with suppress(DatabaseError):
                execute(alias, "SELECT nothing FROM nowhere")
        if then == "database error":
            execute(alias, "SELECT nothing FROM nowhere")
        if then == "model error":  # Django marks the transaction for a rollback
            Incident.objects.using(alias).create(kind=None, first_id=0, last_id=0)

    published("z")
    run("ends")
    before = Cursor.objects.using(alias).get()
    published("a", "b", "c")
    if on_error == "park":  # the third attempt goes event by event
        Cursor.objects.using(alias).update(failures=2, retry_at="2020-01-01T00:00Z")
    run("ends")
    stopped = Cursor.objects.using(alias).get()
    assert (stopped.state, stopped.position, stopped.handled) == (
        before.state,
        before.position,
        before.handled,
    )
    assert stopped.error.startswith("TransactionEnded: The handler of 'ends' ended its transaction")
    assert f"from position {before.position + 1} to {before.position + 3}" in stopped.error
    assert "outbox_subscriptions resume ends" in stopped.error
    assert (stopped.retry_at, len(calls)) == (None, 2)
    assert "a1" in noted(alias)
    assert not ParkedStream.objects.using(alias).exists()

    run("ends")
    assert len(calls) == 2  # a new process leaves it alone, too
    control.resume("ends")
    run("ends")
    assert {id for call in calls[2:] for id in call} == {before.position + i for i in (1, 2, 3)}
    cursor = Cursor.objects.using(alias).get()
    assert (cursor.error, cursor.failures, cursor.handled) == ("", 0, before.handled + 3)


def test_one_that_was_ended_while_an_event_is_looked_for(alias, published, run):
    calls = []

    @subscriber("ends")
    def handle(events):
        calls.append(len(events))
        if len(calls) == 3:  # a half of the page
            end("", alias)
        if len(calls) <= 3:
            raise ValueError("halfway")

    published("a", "b", "c", "d")
    run("ends")
    Cursor.objects.using(alias).update(retry_at="2020-01-01T00:00Z")
    run("ends")
    assert calls == [4, 4, 2]
    cursor = Cursor.objects.using(alias).get()
    assert cursor.error.startswith("TransactionEnded: ")
    assert (cursor.position, cursor.handled, cursor.retry_at) == (0, 0, None)


@on("mariadb")
def test_a_deadlock_that_is_swallowed_around_a_raw_cursor(alias, published, run):
    """The database has undone the transaction, cursor and all; what is written after that is no
    part of it."""
    for name in ("one", "two"):
        Incident.objects.using(alias).create(kind="unknown", detail=name, last_id=0, first_id=0)
    locked, swallowed = threading.Barrier(2, timeout=patience()), []
    update = "UPDATE outbox_incident SET last_id = last_id + 1 WHERE detail = '{}'"

    def other():
        try:
            with transaction.atomic(using=alias):
                Incident.objects.using(alias).bulk_create(
                    Incident(kind="unknown", detail="weight", last_id=0, first_id=0)
                    for _ in range(200)  # the lighter transaction is undone
                )
                execute(alias, update.format("two"))
                locked.wait()
                execute(alias, update.format("one"))
        finally:
            connections[alias].close()

    @subscriber("swallows")
    def handle(events):
        if not swallowed:
            execute(alias, update.format("one"))
            locked.wait()
            try:
                execute(alias, update.format("two"))
            except Exception as error:
                swallowed.append(error)
        for event in events:
            note(alias, event)

    execute(alias, "CREATE INDEX outbox_test_detail ON outbox_incident (detail(20))")
    thread = threading.Thread(target=other)
    try:
        published("a")
        thread.start()
        run("swallows")
    finally:
        thread.join()
        execute(alias, "DROP INDEX outbox_test_detail ON outbox_incident")
    assert swallowed[0].args[0] == 1213
    cursor = Cursor.objects.using(alias).get()
    assert cursor.error.startswith("SwallowedError: The handler of 'swallows' caught an error")
    assert (cursor.handled, cursor.retry_at is None) == (0, False)
    assert "a1" not in noted(alias)
    run("swallows")
    assert noted(alias).count("a1") == 1


@on("postgres")
def test_an_error_that_is_swallowed_around_a_raw_cursor(alias, published, run):
    """PostgreSQL would take its COMMIT for a ROLLBACK, in silence."""

    @subscriber("swallows")
    def handle(events):
        for event in events:
            note(alias, event)
        try:
            execute(alias, "SELECT nothing FROM nowhere")
        except Exception:
            return

    published("a")
    run("swallows")
    cursor = Cursor.objects.using(alias).get()
    assert cursor.error.startswith("SwallowedError: The handler of 'swallows' caught an error")
    assert (cursor.handled, noted(alias)) == (0, [])


def test_one_that_was_ended_while_a_parked_stream_is_handled(alias, published, run):
    """Its stream gets no error of its own: the partition stops, and says so."""
    ways = iter(["raise"] * 6 + ["end", "return"])

    @subscriber("ends", on_error="park")
    def handle(events):
        way = next(ways, "return") if events[0].stream == "a" else "return"
        if way == "raise":
            raise ValueError("not now")
        if way == "end":
            end("", alias)

    published("a")
    for _ in range(4):
        Cursor.objects.using(alias).update(failures=2, retry_at="2020-01-01T00:00Z")
        run("ends")
        if parked := ParkedStream.objects.using(alias).first():
            break
    assert parked.stream == "a"
    ways = iter(["end", "return"])
    control.release("ends")
    run("ends")
    stopped = Cursor.objects.using(alias).get()
    assert stopped.error.startswith("TransactionEnded: The handler of 'ends' ended its transaction")
    assert "Handling version 1 and later of 'a'." in stopped.error
    assert stopped.retry_at is None
    control.resume("ends")
    run("ends")
    assert not ParkedStream.objects.using(alias).exists()
    assert Cursor.objects.using(alias).get().error == ""


@pytest.mark.parametrize("how", ["more partitions", "rebase"])
def test_one_that_stopped_stays_so_until_a_person_decides(alias, published, run, how):
    calls = []

    def declare(partitions):
        module._subscribers.pop("ends", None)

        @subscriber("ends", partitions=partitions)
        def handle(events):
            calls.append(len(events))
            if len(calls) == 1:
                end("", alias)

    declare(1)
    published(*"abcdefgh")
    run("ends")
    if how == "more partitions":
        declare(2)
    elif alias == "postgres":
        cursor = Cursor.objects.using(alias).get()
        state = {**json.loads(cursor.state), "cluster": "1"}
        Cursor.objects.using(alias).update(state=json.dumps(state))
        rebase_outbox(using=alias, log="outbox_event", last_id=10**6)
    run("ends")
    assert calls == [8]
    errors = Cursor.objects.using(alias).values_list("error", flat=True)
    assert all(error.startswith("TransactionEnded: ") for error in errors)
    control.resume("ends")
    run("ends")
    assert sum(calls[1:]) == 8


def closed(alias):
    connections[alias].close()


def all_closed(alias):
    connections.close_all()


def old_closed(alias):
    close_old_connections()


def closed_and_used(alias):
    connections[alias].close()
    execute(alias, "SELECT 1")


@pytest.mark.parametrize("on_error", ["stop", "park"])
@pytest.mark.parametrize("way", [closed, all_closed, old_closed, closed_and_used])
def test_a_connection_that_was_closed(alias, published, run, way, on_error):
    """The drivers say that it is lost, or that an error came before. The handler did it."""

    @subscriber("closes", on_error=on_error)
    def handle(events):
        for event in events:
            note(alias, event)
        if any(event.stream == "b" for event in events):
            way(alias)

    published("a", "b", "c")
    run("closes")
    error = "ConnectionClosed: The handler of 'closes' closed the connection of its transaction"
    assert Cursor.objects.using(alias).get().error.startswith(error)
    assert noted(alias) == []
    for _ in range(3):
        run("closes")
    if on_error == "stop":
        cursor = Cursor.objects.using(alias).get()
        assert cursor.error.startswith(error)
        assert cursor.failed_event["stream"] == "b"
        assert noted(alias) == ["a1"]
        return
    parked = ParkedStream.objects.using(alias).get()
    assert (parked.stream, parked.error.startswith(error)) == ("b", True)
    assert noted(alias) == ["a1", "c1"]


def test_a_connection_that_was_closed_and_opened_again(alias, published, run):
    """No position is passed in memory, though the new connection has nothing to roll back."""
    ways = iter([True])

    @subscriber("opens")
    def handle(events):
        note(alias, events[0])
        if next(ways, False):
            connections[alias].close()
            connections[alias].connect()

    published("a")
    run("opens")
    cursor = Cursor.objects.using(alias).get()
    assert cursor.error.startswith("TransactionEnded: The handler of 'opens' closed the connection")
    assert (cursor.handled, noted(alias)) == (0, [])
    assert run("opens") == 1
    assert noted(alias) == ["a1"]
