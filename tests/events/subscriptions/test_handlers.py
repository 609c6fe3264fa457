"""Handlers that misbehave: only their own subscription is affected, and no event is lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import closing
from functools import partial

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db import OperationalError, connections, transaction

from outbox_app.events import subscriber
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.windows.time import TimeWindow
from outbox_app.events.models import Cursor, ParkedStream
from outbox_app.events.signals import page_failed, page_handled, stream_parked
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.subscriptions.control import release
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.jobs.staging import detector
from outbox_app.models import Incident, Process
from outbox_app.process.lease import LeaseHolder
from tests.faults.tools import eventually, on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def note(alias, event):
    Incident.objects.using(alias).create(
        kind="unknown", detail=event.stream, first_id=event.version, last_id=0
    )


def noted(alias):
    rows = Incident.objects.using(alias).order_by("id").values_list("detail", "first_id")
    return [f"{stream}{version}" for stream, version in rows]


def cut(alias, other):
    """End a session by another one."""
    with connections[alias].cursor() as cursor:
        if alias == "postgres":
            cursor.execute(
                f"SELECT pg_terminate_backend({other.connection.info.backend_pid}, 9000)"
            )
        else:
            cursor.execute(f"KILL {other.connection.thread_id()}")


@pytest.fixture
def run_on(alias, run):
    """``run_on("name")``: run it four times, without waiting for the next attempt."""

    def make(*names):
        for _ in range(4):
            run(*names)

    return make


def test_one_that_takes_the_events_out_of_its_list(alias, published, run_on):
    @subscriber("pops", on_error="park")
    def pop(events):
        while events:
            event = events.pop(0)
            if event.stream == "bad":
                raise ValueError("bad")
            note(alias, event)

    published("a", "b", "bad", "c")
    run_on("pops")
    assert noted(alias) == ["a1", "b1", "c1"]
    assert ParkedStream.objects.using(alias).get().stream == "bad"


def test_one_that_changes_the_data_of_its_events(alias, published, run_on):
    @subscriber("changes", on_error="park")
    def change(events):
        for event in events:
            event.data["handled"] = event.data.get("handled", 0) + 1
            assert event.data["handled"] == 1
            if event.stream == "bad":
                raise ValueError("bad")
            note(alias, event)

    published("a", "bad", "c")
    run_on("changes")
    assert noted(alias) == ["a1", "c1"]
    assert ParkedStream.objects.using(alias).get().stream == "bad"


def test_each_attempt_that_fails_is_told_with_its_error(alias, published, run):
    told, names = [], ("using", "subscription", "partition", "log", "failures", "error")

    def receive(sender, signal, **facts):
        told.append([facts[name] for name in names])

    @subscriber("fails")
    def fail(events):
        raise ValueError("no stock")

    published("a")
    page_failed.connect(receive)
    try:
        for _ in range(2):
            Cursor.objects.using(alias).update(retry_at=None)
            run("fails")
    finally:
        page_failed.disconnect(receive)
    expected = [alias, "fails", 0, "outbox_event"]
    assert [(each[:4], each[4], str(each[5]).partition("\n")[0]) for each in told] == [
        (expected, 1, "no stock"),
        (expected, 2, "no stock"),
    ]


@pytest.mark.parametrize("error", [ZeroDivisionError, SoftTimeLimitExceeded, SystemExit])
def test_a_callback_that_fails_after_the_commit(alias, published, run, caplog, error):
    """The page was handled, and no word says that it was not."""
    told = []

    def fail():
        raise error

    def receive(**facts):
        told.append(facts.get("count") or facts["error"])

    @subscriber("calls_back", batch_size=1, on_error="park")
    def handle(events):
        note(alias, events[0])
        transaction.on_commit(fail, using=alias)

    published("a", "b", "a")
    columns = {"subscription": "calls_back", "log": "outbox_event", "stream": "a"}
    ParkedStream.objects.using(alias).create(**columns, partition=0, version=1, position=1)
    page_handled.connect(receive)
    page_failed.connect(receive)
    try:
        assert run("calls_back") == 1
        assert release("calls_back", using=alias) == 1
        assert run("calls_back") == 2
        published("a")
        assert run("calls_back") == 1
    finally:
        page_handled.disconnect(receive)
        page_failed.disconnect(receive)
    assert noted(alias) == ["b1", "a1", "a2", "a3"]
    assert told == [1, 1]
    records = [each for each in caplog.records if each.name == "outbox_app.callbacks"]
    assert len(records) == 4
    assert {each.of for each in records} == {"the handler of 'calls_back'"}
    assert all(".<locals>.fail (" in each.callback for each in records)
    assert all(error.__name__ in each.error for each in records)
    assert "does not run again; delay() inside the transaction" in records[0].getMessage()


def test_a_callback_is_named_before_the_commit(alias, published, run, settings, monkeypatch):
    """The event that makes it fails, and is parked; nothing of it is committed."""
    monkeypatch.setattr(detector, "late", Counter())
    settings.OUTBOX = {**settings.OUTBOX, "DETECT": "raise"}
    called = []

    @subscriber("calls_back", on_error="park")
    def handle(events):
        for event in events:
            note(alias, event)
            transaction.on_commit(partial(called.append, event.stream), alias, robust=True)
            if event.stream == "b":
                transaction.on_commit(partial(called.append, event.stream), alias)

    published("a", "b", "c")
    for _ in range(4):
        run("calls_back")
    assert (noted(alias), called) == (["a1", "c1"], ["a", "c"])
    parked = ParkedStream.objects.using(alias).get()
    assert parked.stream == "b"
    assert "UnsafeCallback: The handler of 'calls_back' leaves builtins.list.append" in parked.error


def test_a_durable_block_in_a_handler_is_refused(alias, published, run):
    @subscriber("durable")
    def handle(events):
        note(alias, events[0])
        with transaction.atomic(using=alias, durable=True):
            pass

    published("a")
    assert run("durable") == 0
    assert noted(alias) == []
    assert "RuntimeError: A durable atomic block" in Cursor.objects.using(alias).get().error


def test_a_callback_that_fails_stops_no_others(alias, published, run):
    """Those of other events of its page, and the signal of a stream that is parked."""
    called, parked = [], []

    @subscriber("calls_back", on_error="park")
    def handle(events):
        for event in events:
            if event.stream == "b":
                raise ValueError(event)
            fails = event.stream == "a"
            transaction.on_commit(partial(called.append if not fails else int, event.stream), alias)

    def receive(**facts):
        parked.append(facts["parked"].stream)

    published("a", "b", "c")
    stream_parked.connect(receive)
    try:
        for _ in range(4):
            run("calls_back")
    finally:
        stream_parked.disconnect(receive)
    assert (called, parked) == (["c"], ["b"])


@on("default", "postgres")
def test_a_constraint_that_is_checked_at_the_commit(alias, published, run_on):
    """On SQLite only the commit fails: the event is found by halves, and its stream is parked."""

    @subscriber("late", on_error="park")
    def late(events):
        for event in events:
            note(alias, event)
            if event.stream == "bad":
                Permission.objects.using(alias).create(content_type_id=987654, codename="x")

    subscriber("works")(lambda events: None)
    published("a", "bad", "c")
    run_on("late", "works")
    cursors = {each.subscription: each for each in Cursor.objects.using(alias).all()}
    assert cursors["works"].handled == 3
    assert noted(alias) == ["a1", "c1"]
    assert "IntegrityError" in ParkedStream.objects.using(alias).get().error


def test_one_that_makes_others_look_guilty(alias, published, run_on):
    """An OperationalError is no event's fault; it stops this subscription, and no other one."""

    @subscriber("breaks", on_error="park")
    def broken(events):
        if len(events) > 1:
            raise ValueError("many")
        raise OperationalError("no such table")

    subscriber("works")(lambda events: None)
    published("a", "b")
    run_on("breaks", "works")
    cursors = {each.subscription: each for each in Cursor.objects.using(alias).all()}
    assert cursors["works"].handled == 2
    assert "no such table" in cursors["breaks"].error


#: Statements that drivers refuse with OperationalError for a value of the row, by alias.
OF_THE_ROW = {
    "postgres": ["SELECT repeat('x', 1073741824)"],
    "default": ["SELECT json('{')", "SELECT abs(-9223372036854775808)"],
    "mariadb": [
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no such article'",
        # MySQL's own: JSON that is too deep, keys that are too long, and functional indexes.
        *(
            f"SIGNAL SQLSTATE '22032' SET MYSQL_ERRNO = {number}"
            for number in (3140, 3141, 3151, 3157, 3158, 3751, 3752, 3903, 3907)
        ),
    ],
    "mysql": ["SELECT CAST(CONCAT(REPEAT('[', 101), REPEAT(']', 101)) AS JSON)"],
}


@pytest.mark.parametrize(
    ("alias", "refused"),
    [(alias, sql) for alias, statements in OF_THE_ROW.items() for sql in statements],
    indirect=["alias"],
)
def test_a_row_that_the_database_refuses_by_an_operational_error(alias, published, run_on, refused):
    """As a character that a column of MySQL has no room for, or a key beyond an index's page."""

    @subscriber("parks", on_error="park")
    def park(events):
        for event in events:
            if event.stream == "bad":
                with connections[alias].cursor() as cursor:
                    cursor.execute(refused)
            note(alias, event)

    published("a", "bad", "b")
    run_on("parks")
    assert noted(alias) == ["a1", "b1"]
    assert ParkedStream.objects.using(alias).get().error.startswith("OperationalError: ")
    ParkedStream.objects.using(alias).update(released=True)
    run_on("parks")
    parked = ParkedStream.objects.using(alias).get()
    assert (parked.stream, parked.version, parked.released) == ("bad", 1, False)


@on("default", "mariadb")
@pytest.mark.mariadb_only
def test_a_parked_stream_with_a_row_that_is_nonsense(alias, published, run_on):
    """PostgreSQL and MySQL refuse such an edit."""
    broken = {"bad"}

    @subscriber("parks", on_error="park")
    def park(events):
        for event in events:
            if event.stream in broken:
                raise ValueError(event.stream)
            note(alias, event)

    subscriber("works")(lambda events: None)
    published("a", "bad", "b")
    run_on("parks")
    unchecked = {
        "default": "PRAGMA ignore_check_constraints = {:d}",
        "mariadb": "SET check_constraint_checks = {:d}",
    }[alias]
    with connections[alias].cursor() as cursor:
        cursor.execute(unchecked.format(alias == "default"))
        cursor.execute("UPDATE outbox_event SET data = '{nonsense' WHERE stream = 'bad'")
        cursor.execute(unchecked.format(alias != "default"))
    broken.clear()
    ParkedStream.objects.using(alias).update(released=True)
    published("c")
    run_on("parks", "works")
    assert noted(alias) == ["a1", "b1", "c1"]
    parked = ParkedStream.objects.using(alias).get()
    assert not parked.released
    assert "JSONDecodeError" in parked.error


def test_one_that_leaves_a_transaction_open(alias, published, run_on):
    entered = []

    @subscriber("leaves")
    def leave(events):
        for event in events:
            note(alias, event)
        if not entered:
            entered.append(transaction.atomic(using=alias))
            entered[0].__enter__()

    published("a", "b")
    run_on("leaves")
    connection = connections[alias]
    assert not connection.in_atomic_block
    assert noted(alias) == ["a1", "b1"]


def test_one_that_closes_the_connection(alias, published, run_on):
    closed = []

    @subscriber("closes")
    def close(events):
        for event in events:
            note(alias, event)
        if not closed:
            closed.append(1)
            connections[alias].close()

    subscriber("works")(lambda events: None)
    published("a", "b")
    run_on("closes", "works")
    assert noted(alias) == ["a1", "b1"]
    assert not Cursor.objects.using(alias).exclude(handled=2).exists()


@on("postgres", "mariadb")
def test_a_connection_that_is_killed_while_it_does_something_else(alias, published, run):
    """As by idle_in_transaction_session_timeout. It has caught nothing, and is not told so."""

    @subscriber("idle")
    def handle(events):
        connection = connections[alias]
        with connection.cursor() as cursor, closing(connection.copy()) as other:
            postgres = connection.vendor == "postgresql"
            cursor.execute(f"SELECT {'pg_backend_pid' if postgres else 'connection_id'}()")
            [(id,)] = cursor.fetchall()
            with other.cursor() as killer:
                killer.execute(f"SELECT pg_terminate_backend({id})" if postgres else f"KILL {id}")

    published("a")
    assert run("idle") == 0
    assert Cursor.objects.using(alias).get().error.startswith("OperationalError: ")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


class Listing(Exception):
    """An error that lists others; without any it counts as false."""

    def __len__(self):
        return len(self.args)


@pytest.mark.parametrize("error", [Unspeakable, Listing])
@pytest.mark.parametrize("on_error", ["stop", "park"])
def test_an_error_that_cannot_be_written_down(alias, published, run_on, on_error, error):
    @subscriber("fails", on_error=on_error)
    def fail(events):
        raise error

    subscriber("works")(lambda events: None)
    published("a", "b")
    run_on("fails", "works")
    cursors = {each.subscription: each for each in Cursor.objects.using(alias).all()}
    assert cursors["works"].handled == 2
    if on_error == "stop":
        assert error.__name__ in cursors["fails"].error
    else:
        assert ParkedStream.objects.using(alias).count() == 2


@on("postgres", "mariadb")
def test_a_connection_of_the_handler_that_was_lost(alias, published, run_on):
    """To another database than the log's. Nobody else would open it again."""
    connections.settings["lost"] = connections.settings[alias]
    other = connections["lost"] = connections.create_connection(alias)

    @subscriber("looks")
    def look(events):
        with connections["lost"].cursor() as cursor:
            cursor.execute("SELECT 1")
        for event in events:
            note(alias, event)

    try:
        other.connect()
        published("a")
        run_on("looks")
        cut(alias, other)
        published("b")
        run_on("looks")
        assert noted(alias) == ["a1", "b1"]
    finally:
        other.close()
        del connections["lost"], connections.settings["lost"]


@pytest.mark.slow
def test_a_database_error_under_one_subscription(alias, published, run_on, monkeypatch):
    """As a page of it that takes too long, or a replica of its own that is away."""
    read = LogReader.read

    def fail(reader, state, limit):
        if reader.only.types == ("away",):
            raise OperationalError("canceling statement due to statement timeout")
        return read(reader, state, limit)

    monkeypatch.setattr(LogReader, "read", fail)
    subscriber("a-fails", types=["away"])(lambda events: None)
    subscriber("works")(lambda events: None)
    published("a", "b")
    runner = Runner([subscriber_named(name) for name in ("a-fails", "works")])
    assert runner.run(once=True) == 2  # and it ends
    assert "a-fails: OperationalError: canceling" in runner.trouble


@pytest.mark.slow
def test_a_replica_that_is_not_configured(alias, published):
    subscriber("copy", by_time=True, on_gap="park", read_from="nowhere")(lambda events: None)
    published("a")
    with pytest.raises(SystemExit) as stop:
        call_command("run_subscriptions", "copy", "--once")
    assert stop.value.code == 1
    runner = Runner([subscriber_named("copy")])
    assert runner.run(once=True) == 0
    assert "The connection 'nowhere' doesn't exist" in runner.trouble


def test_a_database_error_while_partitions_are_shared(alias, published, monkeypatch):
    """As a deadlock with another process that joins."""
    claim, failures = LeaseHolder._claim, [OperationalError("deadlock")]

    def fail_once(holder, free):
        if failures:
            raise failures.pop()
        claim(holder, free)

    monkeypatch.setattr(LeaseHolder, "_claim", fail_once)
    subscriber("works")(lambda events: None)
    published("a")
    assert Runner([subscriber_named("works")]).run(once=True) == 1


@on("postgres", "mariadb")
def test_a_replica_that_was_away(alias, published, monkeypatch):
    monkeypatch.setattr(TimeWindow, "behind", 0)
    connections.settings["replica"] = connections.settings[alias]
    replica = connections["replica"] = connections.create_connection(alias)
    seen = []
    subscriber("copy", by_time=True, on_gap="park", read_from="replica")(seen.extend)
    runner = Runner([subscriber_named("copy")])
    try:
        published("a")
        runner.run_once()
        cut(alias, replica)
        published("b")
        eventually(lambda: runner.run_once() or len(seen) == 2)
    finally:
        runner._leave()
        replica.close()
        del connections["replica"], connections.settings["replica"]


@on("postgres", "mariadb")
def test_a_page_that_another_process_still_handles(alias, published):
    """It has lost its lease, and not its transaction: nobody waits for that."""
    subscriber("slow")(lambda events: None)
    subscriber("works")(lambda events: None)
    published("a")
    runner = Runner([subscriber_named(name) for name in ("slow", "works")])
    runner.run(once=True)
    held, release = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic(using=alias):
            Cursor.objects.using(alias).filter(subscription="slow").update(position=1)
            held.set()
            release.wait(patience())
        connections[alias].close()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        held.wait(patience())
        published("b")
        both = [subscriber_named(name) for name in ("slow", "works")]
        second = Runner(both, lease_seconds=patience())  # or it takes what rests for moved
        assert second.run(once=True) == 1
        assert not release.is_set()
        assert "slow: The process that had" in second.trouble
    finally:
        release.set()
        thread.join(patience())
    assert Runner([subscriber_named("slow")]).run(once=True) == 1


@on("postgres", "mariadb")
def test_what_another_process_held_is_no_trouble_any_more(alias, published, run):
    """Said while it lasts, and not after it, although there is nothing to handle."""
    subscriber("idle")(lambda events: None)
    published("a")
    run("idle")
    partition = Partition(subscriber_named("idle"), 0)
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT id FROM outbox_cursor WHERE subscription = 'idle' FOR UPDATE")
        partition.run_once()
        assert "The process that had" in partition.error
        other.rollback()
    finally:
        other.close()
    partition._rest_until = 0.0
    partition.run_once()
    partition.close()
    assert partition.error == ""


def test_older_code_beside_newer_code(alias, published, run):
    """The older one has fewer partitions: it leaves all of them to the newer one."""
    seen = []

    def declare(partitions):
        module._subscribers.pop("noted", None)
        subscriber("noted", partitions=partitions)(seen.extend)
        return Runner([subscriber_named("noted")], lease_seconds=10)

    old = declare(1)
    published(*"abcdefgh")
    old.run_once()
    new = declare(4)
    new.run_once()
    old.workers[0].holder._shared_at = new.workers[0].holder._shared_at = -1e9
    old.run_once()
    assert "repartition" in old.trouble
    published(*"abcdefgh")
    new.workers[0].holder._shared_at = -1e9
    eventually(lambda: new.run_once() or len(seen) == 16)
    assert Process.objects.using(alias).count() == 1
    old._leave()
    new._leave()


def test_the_exit_code_says_that_one_stands_still(alias, published, caplog):
    @subscriber("fails")
    def fail(events):
        raise ValueError("always")

    published("a")
    caplog.set_level("INFO", "outbox_app")
    with pytest.raises(SystemExit) as end:
        call_command("run_subscriptions", "fails", "--once")
    assert end.value.code == 1
    assert 'trouble="fails: ValueError: always' in caplog.text


@pytest.mark.parametrize("on_error", ["stop", "park"])
def test_one_that_raises_inside_a_generator_of_its_own(alias, published, run_on, on_error):
    """The error holds the generator, and that the transaction it has entered."""
    broken = {"bad"}

    def inside(events):
        with transaction.atomic(using=alias):
            yield from events

    @subscriber("generates", on_error=on_error)
    def generate(events):
        for event in inside(events):
            note(alias, event)
            if event.stream in broken:
                raise ValueError("bad")

    published("a", "bad", "c")
    run_on("generates")
    cursor = Cursor.objects.using(alias).get()
    if on_error == "park":
        assert noted(alias) == ["a1", "c1"]
        assert not cursor.error
    else:
        assert noted(alias) == ["a1"]
        assert cursor.error.startswith("ValueError: bad")
        assert cursor.failures == 4
    assert not connections[alias].in_atomic_block
    broken.clear()
    ParkedStream.objects.using(alias).update(released=True)
    run_on("generates")
    assert sorted(noted(alias)) == ["a1", "bad1", "c1"]


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), asyncio.CancelledError(), PanicException("index out of bounds")],
    ids=["exit", "cancel", "panic"],
)
def test_one_that_wants_to_end_the_process(alias, published, run, error):
    @subscriber("ends")
    def end(events):
        raise error

    subscriber("works")(lambda events: None)
    published("a")
    assert run("ends", "works") == 1
    assert type(error).__name__ in Cursor.objects.using(alias).get(subscription="ends").error


@pytest.mark.slow
def test_a_cursor_that_somebody_has_taken_away(alias, published, run):
    """Nobody can tell where its partition stood, and so where its parts would begin."""
    subscriber("cut", partitions=2)(lambda events: None)
    subscriber("works")(lambda events: None)
    published("a", "b")
    run("cut", "works")
    Cursor.objects.using(alias).filter(subscription="cut", partition=1).delete()
    module._subscribers.pop("cut")
    subscriber("cut", partitions=4)(lambda events: None)
    published("c")
    runner = Runner([subscriber_named("cut"), subscriber_named("works")])
    assert runner.run(once=True) == 1
    assert "cut: " in runner.trouble


async def coroutine(events):
    raise AssertionError


def generator(events):
    yield


async def asynchronous_generator(events):
    yield


@pytest.mark.parametrize("body", [coroutine, generator, asynchronous_generator])
def test_one_whose_body_would_never_run(alias, published, run, body):
    """A decorator hides from the declaration what it is."""
    subscriber("hidden")(lambda events: body(events))
    published("a")
    assert run("hidden") == 0
    cursor = Cursor.objects.using(alias).get()
    assert "which was not run" in cursor.error
    assert (cursor.handled, cursor.position) == (0, 0)
