"""The subscription updates a view, with the same number of statements for pages of any size."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import datetime

import pytest
from django.contrib.auth.models import User
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from outbox_app.events import NewEvent, Projection, publish_many, subscriber
from outbox_app.events.exceptions import InvalidSubscriber
from outbox_app.events.log.record import recorded
from outbox_app.events.models import Cursor, Event
from outbox_app.events.projections.rows import PendingEvent, ProjectionTable
from outbox_app.failpoints import set_failpoint
from tests.events.projections.declared import SoldOf, StatusOf, declare
from tests.events.projections.models import Bare, Hourly, Numbered, Seat, Sold, Stamped, Status

pytestmark = pytest.mark.django_db(transaction=True)


def sell(alias, *sales, stream="order-{}"):
    with transaction.atomic(using=alias):
        publish_many(
            NewEvent(stream.format(n), "sold", {"article": article, "count": count})
            for n, (article, count) in enumerate(sales)
        )


class SeatOf(Projection):
    model = Seat

    def apply(self, event, row):
        return event.data and Seat(**event.data)


def test_a_new_row_takes_the_unique_value_that_another_had(alias, run):
    declare(SeatOf, "seat")
    stands = {"number": None}
    pages = [
        [("ann", {"number": 1}), ("bob", {"number": 2})],
        [("ann", stands), ("bob", None), ("cid", {"number": 1}), ("dan", {"number": 2})],
    ]
    for page in pages:
        with transaction.atomic(using=alias):
            publish_many(NewEvent(stream, "seated", data) for stream, data in page)
        assert run("seat") == len(page)
    seats = Seat.objects.using(alias).exclude(number=None).order_by("number")
    assert list(seats.values_list("number", "stream")) == [(1, "cid"), (2, "dan")]
    assert Cursor.objects.using(alias).get().failures == 0


def test_many_streams_feed_one_row(alias, run, sold):
    declare(SoldOf, "sold", types=["sold"])
    sell(alias, (1, 2), (2, 1), (1, 5))
    assert run("sold") == 3
    assert sold() == {1: 7, 2: 1}
    sell(alias, (1, -7), (3, 1))  # nothing is left of the first
    run("sold")
    assert sold() == {2: 1, 3: 1}
    sell(alias, (1, 4), (2, -1), (4, 1), (4, -1))
    run("sold")
    assert sold() == {1: 4, 3: 1}


@pytest.mark.parametrize("versioned", [False, True], ids=["counted", "versioned"])
def test_statements_of_a_page_are_constant(alias, versioned):
    base = StatusOf if versioned else SoldOf
    projection = declare(base, "constant", push=versioned)()

    def statements(before, after):
        """Rows that are new, that change, and that go, in one page."""
        Event.objects.using(alias).all().delete()
        streams = [f"{before}-{after}-{n}" for n in range(after)]
        with transaction.atomic(using=alias):
            for kind in ("made", "made", "gone"):
                publish_many(
                    NewEvent(s, kind, {"article": n, "count": -2 if kind == "gone" else 1})
                    for n, s in enumerate(streams[: before // 2] if kind == "gone" else streams)
                )
            transaction.on_commit(lambda: None, using=alias)
            connections[alias].run_on_commit.clear()  # no push
        events = [recorded(e) for e in Event.objects.using(alias).order_by("id")]
        view = ProjectionTable(projection, using=alias)
        with transaction.atomic(using=alias):
            view.apply([PendingEvent(e) for e in events[:before]])
        with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as caught:
            view.apply([PendingEvent(e) for e in events[before:]])
        view.rows.all().delete()
        return [q["sql"].split()[0] for q in caught.captured_queries]

    few, many = statements(2, 6), statements(20, 60)
    assert few == many
    assert few.count("SELECT") == (2 if versioned else 1)
    assert few.count("INSERT") == 2
    assert few.count("DELETE") == (0 if versioned else 1)
    assert len(few) <= 6  # with the savepoint of the insert


def test_rows_that_exceed_the_servers_packet_together_are_written(alias, run, status):
    class Large(StatusOf):
        def apply(self, event, row):
            row = super().apply(event, row)
            row.path += "x" * 4_000_000
            return row

    declare(Large, "large")
    for _ in "new", "changed":
        with transaction.atomic(using=alias):
            publish_many((NewEvent(f"s{n}", "made") for n in range(3)), using=alias)
        run("large")
    assert {len(row.path) for row in Status.objects.using(alias)} == {8_000_004}


def test_a_time_without_a_zone_is_the_key_of_the_row_that_holds_it(alias, run):
    """As Django stores it: in the project's zone."""

    class ByHour(Projection):
        model = Hourly

        def key(self, event):
            return datetime(2026, 1, 31, event.data["article"])

        def apply(self, event, row):
            row = row or Hourly()
            row.count += event.data["count"]
            return row

    declare(ByHour, "by_hour")
    for sales in ((3, 1), (4, 1)), ((3, 5),):
        sell(alias, *sales)
        with pytest.warns(RuntimeWarning, match="naive datetime"):
            run("by_hour")
    rows = Hourly.objects.using(alias).order_by("hour")
    assert [(timezone.make_naive(row.hour).hour, row.count) for row in rows] == [(3, 6), (4, 1)]


def test_partitions_meet_on_a_row(alias, sold, in_thread):
    """Two transactions that count up one row, and that both insert another."""
    projection = declare(SoldOf, "sold", partitions=2)()
    sell(alias, (1, 1), (2, 1), (1, 1), (2, 1))
    events = [PendingEvent(recorded(e)) for e in Event.objects.using(alias).order_by("id")]
    Sold.objects.using(alias).create(article=1, count=10)
    barrier = threading.Barrier(2)
    met = threading.local()

    def meet():
        # SQLite has one writer at a time, and a row's lock lets one pass: they meet where they can.
        if not hasattr(met, "once") and connections[alias].vendor != "sqlite":
            met.once = True
            with suppress(threading.BrokenBarrierError):
                barrier.wait(1)

    set_failpoint("view_read", meet)

    def count(part):
        with transaction.atomic(using=alias):
            ProjectionTable(projection, using=alias).apply(part)

    # The first alone, so that only the row that is not there yet can be raced for.
    threads = [in_thread(lambda p=p: count(p)) for p in (events[1:2], events[3:4])]
    for thread in threads:
        thread.join()
    threads = [in_thread(lambda p=p: count(p)) for p in (events[:1], events[2:3])]
    for thread in threads:
        thread.join()
    assert sold() == {1: 12, 2: 2}


def test_the_pull_passes_versions_that_the_projection_does_not_ask_for(
    alias, published, run, status
):
    declare(StatusOf, "status", types=["made", "sent"], push=True)
    set_failpoint("push", lambda: 1 / 0)
    for type in ("other", "made", "other", "sent", "other"):
        published("a", type=type)
    assert run("status") == 2
    assert status() == {"a": ("2 4", 4)}


def test_a_replay_does_nothing_twice_to_rows_with_versions(alias, published, run, status):
    declare(StatusOf, "status", push=True)
    published("a", "a", "b")
    published("b", type="gone")
    before = status()
    Cursor.objects.using(alias).all().delete()
    run("status")
    assert status() == before == {"a": ("1 2", 2)}
    assert Status.objects.using(alias).get(pk="b").version == 2


def test_on_error_park_sets_the_stream_aside(alias, published, run, status):
    declare(StatusOf, "status", on_error="park")
    published("a", "b")
    published("b", type="bad")
    published("a", "b")
    for _ in range(3):
        run("status")
        Cursor.objects.using(alias).update(retry_at=None)
    assert {stream: path for stream, (path, _) in status().items()} == {"a": "1 2", "b": "1"}


@pytest.mark.parametrize(
    ("base", "attributes", "text"),
    [
        (StatusOf, {"model": None}, "model must be the concrete model"),
        (StatusOf, {"model": Event.__mro__[1]}, "model must be the concrete model"),
        (StatusOf, {"model": User}, "must be one table of its own"),
        (StatusOf, {"model": Numbered}, "primary_key=True"),
        (Projection, {"model": Status}, r"define apply\(self, event, row\)"),
        (SoldOf, {"push": True}, "version = BigIntegerField"),
        (StatusOf, {"push": True, "logs": [Event, "x.Other"]}, "reads 2 logs"),
        (StatusOf, {"partitions": 0}, "partitions must be an integer"),
    ],
)
def test_declaration_is_refused(base, attributes, text):
    with pytest.raises(InvalidSubscriber, match=text):
        declare(base, "refused", **attributes)


def test_two_with_one_name_are_refused():
    declare(StatusOf, "twice")
    with pytest.raises(InvalidSubscriber, match="Two subscriptions have the name"):

        @subscriber("twice")
        def handle(events): ...


def test_a_base_without_a_name_is_no_subscription():
    class Base(StatusOf):
        pass

    class Named(Base):
        name = "named"

    assert Named().subscriber.name == "named"
    assert Named().subscriber.types is None


def test_what_apply_returns_is_checked(alias, published, run):
    declare(StatusOf, "status", apply=lambda self, event, row: {"status": "made"})
    published("a")
    assert run("status") == 0
    assert (
        "must return an instance of projections.Status" in Cursor.objects.using(alias).get().error
    )


def test_an_event_without_a_key_is_named(alias, published, run):
    declare(StatusOf, "status", key=lambda self, event: event.data.get("status_id"))
    published("a")
    assert run("status") == 0
    error = Cursor.objects.using(alias).get().error
    assert "Projection 'status': key() returned None for a@1. Return the primary key" in error


def test_a_row_that_cannot_be_inserted_stops_the_subscription(alias, run, sold):
    declare(SoldOf, "sold")
    sell(alias, (1, 10**6))
    assert run("sold") == 0
    assert "sold_possible" in Cursor.objects.using(alias).get().error
    assert sold() == {}


def test_a_deletion_needs_a_field_where_rows_have_versions(alias, published, run, caplog):
    declare(
        StatusOf,
        "status",
        model=Bare,
        push=True,
        apply=lambda self, event, row: None if event.type == "gone" else row or Bare(),
    )
    published("a")
    published("a", type="gone")
    assert run("status") == 0
    assert "deleted = BooleanField" in Cursor.objects.using(alias).get().error
    assert "deleted = BooleanField" in caplog.text
    assert Bare.objects.using(alias).get().version == 1


def test_the_time_of_the_first_insert_stays(alias, published, run):
    def apply(self, event, row):
        if event.type == "gone":
            return None
        row = row or Stamped()
        row.count += 1
        return row

    declare(StatusOf, "stamped", model=Stamped, apply=apply)
    published("a")
    run("stamped")
    first = Stamped.objects.using(alias).get()
    published("a")
    run("stamped")
    second = Stamped.objects.using(alias).get()
    assert (second.count, second.created_at) == (2, first.created_at)
    assert second.changed_at > first.changed_at
