"""The main path: the handler gets each event once, in order; its rows commit with the cursor."""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.events import publish, subscriber
from outbox_app.events.exceptions import ReplayRefused
from outbox_app.events.models import Cursor, Event, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as declared
from outbox_app.events.subscriptions.cursors import fail
from outbox_app.events.subscriptions.lag import lags
from outbox_app.models import InboxEntry, Process, StagedJob
from tests import tasks
from tests.events.log.own_log.models import Ledger

pytestmark = pytest.mark.django_db(transaction=True)


def test_every_event_once_in_order(alias, published, run, seen_by):
    seen = seen_by("all")
    published("a", "b", "a")
    assert run("all") == 3
    assert seen == [("a", 1), ("b", 1), ("a", 2)]
    assert run("all") == 0
    published("a")
    assert run("all") == 1
    assert seen[3:] == [("a", 3)]
    assert not Process.objects.using(alias).exists()


def test_pages_and_filters(alias, published, run):
    pages = []

    @subscriber("some", types=["order.*", "paid"], batch_size=2)
    def handle(events):
        pages.append([event.type for event in events])

    for type in ("order.placed", "ordered", "paid", "order.gone", "Order.x"):
        published("a", type=type)
    run("some")
    assert [type for page in pages for type in page] == ["order.placed", "paid", "order.gone"]
    assert max(map(len, pages)) <= 2


def test_a_page_that_fails_holds_up_the_other_log_too(alias, published, run):
    tried = []

    @subscriber("both", logs=[Event, Ledger])
    def handle(events):
        tried.append(events[0].log)
        raise ValueError

    published("a")
    with transaction.atomic(using=alias):
        publish("b", "made", log=Ledger, using=alias)
    run("both")
    assert set(tried) == {"outbox_event"}


def test_effects_and_cursor_are_one_transaction(alias, published, run):
    attempts = []

    @subscriber("fails")
    def handle(events):
        for event in events:
            InboxEntry.objects.using(alias).create(job_id=f"{event.stream}{event.version}")
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("the first time only")

    published("a", "b")
    assert run("fails") == 0
    assert not InboxEntry.objects.using(alias).exists()
    cursor = Cursor.objects.using(alias).get()
    ids = list(Event.objects.using(alias).order_by("id").values_list("id", flat=True))
    assert cursor.error == (
        "ValueError: the first time only\n"
        f"Handling outbox_event from position {ids[0]} to {ids[1]}."
    )
    assert cursor.failures == 1
    assert run("fails") == 2
    assert InboxEntry.objects.using(alias).count() == 2
    cursor.refresh_from_db()
    assert (cursor.error, cursor.failures, cursor.handled) == ("", 0, 2)


def test_partitions_share_the_streams(alias, published, run, seen_by):
    seen = seen_by("four", partitions=4)
    streams = [f"s{i}" for i in range(40)]
    published(*streams, *streams)
    assert run("four") == 80
    assert sorted(seen) == sorted((s, v) for s in streams for v in (1, 2))
    assert all(seen.index((s, 1)) < seen.index((s, 2)) for s in streams)
    assert Cursor.objects.using(alias).count() == 4


def test_a_log_that_is_named_twice_in_different_ways_is_read_once(alias, published, run, seen_by):
    seen = seen_by("twice", logs=[Event, "outbox_event", "outbox_events.event"])
    published("a", "b")
    assert run("twice") == 2
    assert seen == [("a", 1), ("b", 1)]
    assert Cursor.objects.using(alias).filter(subscription="twice").count() == 1


def test_from_now_on(alias, published, run, seen_by):
    seen = seen_by("new", start="now")
    published("a")
    assert run("new") == 0
    published("a")
    assert run("new") == 1
    assert seen == [("a", 2)]


def test_a_task_for_each_event(alias, published, run, make_app):
    app = make_app()
    task = app.task(name="note")(tasks.add)

    @subscriber("tasks", task=task)
    def arguments(event):
        return event.stream, event.version

    published("a", "b")
    run("tasks")
    jobs = StagedJob.objects.using(alias).order_by("id")
    assert list(jobs.values_list("task", "ordering_key")) == [("note", "a"), ("note", "b")]
    assert b'"a", 1' in jobs[0].body


def test_a_stream_that_could_be_no_ordering_key_has_its_hash_as_key(
    alias, published, run, make_app
):
    task = make_app().task(name="note", typing=False)(tasks.note)
    subscriber("tasks", task=task)
    streams = "ü" * 255, "line\nbreak", "x" * 255
    published(*streams, streams[0])
    assert run("tasks") == 4
    keys = StagedJob.objects.using(alias).order_by("id").values_list("ordering_key", flat=True)
    hashes = [sha256(stream.encode()).hexdigest() for stream in streams]
    assert list(keys) == [*hashes[:2], streams[2], hashes[0]]


def test_a_stream_is_parked_for_an_error_whose_argument_cannot_be_compared(alias, published, run):
    class Column:
        """Like an array: whether it equals a number is no truth value."""

        def __eq__(self, other):
            raise ValueError("ambiguous")

    @subscriber("parks", on_error="park")
    def handle(events):
        raise KeyError(Column())

    published("a")
    for _ in range(3):
        run("parks")
        Cursor.objects.using(alias).update(retry_at=None)
    assert ParkedStream.objects.using(alias).get().error.startswith("KeyError")


def test_a_failing_stream_is_parked_and_released(alias, published, run):
    broken, seen = {"b"}, []

    @subscriber("parks", on_error="park")
    def handle(events):
        for event in events:
            if event.stream in broken:
                raise ValueError(event.stream)
        seen.extend((event.stream, event.version) for event in events)

    published("a", "b", "c", "b", "a")
    for _ in range(3):
        run("parks")
        Cursor.objects.using(alias).update(retry_at=None)
    assert seen == [("a", 1), ("c", 1), ("a", 2)]
    parked = ParkedStream.objects.using(alias).get()
    assert (parked.stream, parked.version, parked.error) == ("b", 1, "ValueError: b")
    published("b", "c")
    run("parks")
    assert seen[3:] == [("c", 2)]
    ParkedStream.objects.using(alias).update(released=True)
    run("parks")  # still broken
    parked.refresh_from_db()
    assert not parked.released
    broken.clear()
    ParkedStream.objects.using(alias).update(released=True)
    run("parks")
    assert seen[4:] == [("b", 1), ("b", 2), ("b", 3)]
    assert not ParkedStream.objects.using(alias).exists()
    published("b")
    run("parks")
    assert seen[7:] == [("b", 4)]


def test_a_failure_is_on_the_cursor_of_its_partition(alias, published, run):
    @subscriber("fails", partitions=2)
    def handle(events):
        raise ValueError("no")

    published("a")
    run("fails")
    other, failed = Cursor.objects.using(alias).order_by("failures")
    assert (other.error, other.failures, failed.error[:14]) == ("", 0, "ValueError: no")
    failed.failures = 20
    delay = fail(failed, ValueError("no"), using=alias)
    failed = Cursor.objects.using(alias).annotate(now=DatabaseNow()).get(pk=failed.pk)
    assert timedelta(0) < failed.retry_at - failed.now <= timedelta(seconds=delay)


def test_a_rolled_back_event_reaches_nobody(alias, published, run, seen_by):
    seen = seen_by("all")
    with transaction.atomic(using=alias):
        published("a")
        transaction.set_rollback(True, using=alias)
    published("b")
    run("all")
    assert seen == [("b", 1)]


def test_what_it_reads_is_on_its_row(alias, published, run, seen_by):
    """So that a deployment without its code can tell how far it is behind."""

    def declare(**options):
        declared._subscribers.clear()
        seen_by("some", **options)

    rows = Subscription.objects.using(alias)
    declare(types=["order.*"])
    published("a", type="order.placed")
    run("some")
    first = {"logs": ["outbox_event"], "topics": None, "types": ["order.*"]}
    assert rows.get().reads == first
    with CaptureQueriesContext(connections[alias]) as queries:
        run("some")
    assert not [q for q in queries if 'UPDATE "outbox_subscription"' in q["sql"].replace("`", '"')]
    published("a", type="paid")
    published("a", type="order.gone")
    declared._subscribers.clear()
    [lag] = lags(using=alias)
    assert (lag.declared, lag.behind) == (False, 1)
    with pytest.raises(ReplayRefused, match="1 event that"):
        control.replay("some", "now", using=alias)
    declare(topics=["eu"])
    run("some")
    assert rows.get().reads == {"logs": ["outbox_event"], "topics": ["eu"], "types": None}
