"""A log is emptied under a running subscription: no event of the new log is skipped
silently."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from outbox_app.events import NewEvent, prune_events, publish_many, subscriber
from outbox_app.events.checks import check_log_tables
from outbox_app.events.exceptions import LogSetBack, ReadRefused, ReplayRefused
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.subscriptions.counting import count_events
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.skips import discard_stream, skip_event
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.events.log.own_log.models import Ledger
from tests.faults.tools import on
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)


def empty(alias, log):
    """As TRUNCATE does: positions begin at 1 again."""
    table = log._meta.db_table
    with connections[alias].cursor() as cursor:
        if alias == "postgres":
            cursor.execute(f"TRUNCATE {table} RESTART IDENTITY")
        elif alias == MARIADB:
            cursor.execute(f"TRUNCATE {table}")
        else:
            cursor.execute(f"DELETE FROM {table}")
            cursor.execute("DELETE FROM sqlite_sequence WHERE name = %s", [table])


def publish(alias, log, count, name):
    for number in range(count):
        with transaction.atomic(using=alias):
            publish_many([NewEvent(f"{name}-{number}", "made")], log=log, using=alias)


@pytest.mark.parametrize("log", [Event, Ledger])
@pytest.mark.parametrize("looks", [True, False], ids=["looks between", "has overtaken"])
@pytest.mark.parametrize("start", ["fresh", "again"])
def test_a_log_that_is_emptied(alias, log, looks, start):
    seen, now = [], [0.0]
    subscriber("all", logs=[log], batch_size=7)(
        lambda events: seen.extend(event.stream for event in events)
    )
    Subscription.objects.using(alias).create(name="all")
    partition = Partition(subscriber_named("all"), 0, clock=lambda: now[0])

    def turn():
        now[0] += 1000
        while partition.run_once():
            pass

    try:
        publish(alias, log, 30, "old")
        turn()
        if start == "again":  # with a cursor that it finds
            partition.close()
            partition = Partition(subscriber_named("all"), 0, clock=lambda: now[0])
            turn()
        assert len(seen) == 30
        empty(alias, log)
        if looks:
            publish(alias, log, 10, "new")
            turn()
            publish(alias, log, 50, "newer")
        else:
            publish(alias, log, 60, "new")
        for _ in range(3):
            turn()
        if alias != "postgres":  # rows are told by their transactions there
            cursor = Cursor.objects.using(alias).get()
            assert cursor.error.startswith("LogSetBack")
            assert len(seen) == 30
            partition.close()  # another process, which has not seen the old log, goes no further
            partition = Partition(subscriber_named("all"), 0, clock=lambda: now[0])
            turn()
            assert Cursor.objects.using(alias).get().error == cursor.error
            with pytest.raises(ReadRefused, match=r"Positions of|The cursor has read"):
                prune_events(using=alias, log=log._meta.db_table, older_than=1)
            assert len(seen) == 30
            control.replay("all", "beginning")
            turn()
        assert (len(seen), len(set(seen))) == (90, 90)
    finally:
        partition.close()


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_what_a_person_does_meanwhile_leaves_the_cursors_stopped(alias, wanted):
    """A new number of partitions, or a skip, would clear the error, which alone tells."""
    module._subscribers.pop("all", None)
    subscriber("all", partitions=wanted)(print)
    Subscription.objects.using(alias).create(name="all", partitions=2)
    state = LogReader(Event, using=alias).window.start(0).dump()
    failed = {"position": 5, "stream": "a"}
    for part in range(2):
        Cursor.objects.using(alias).create(
            subscription="all", partition=part, partitions=2, log="outbox_event", state=state,
            error="LogSetBack: it was emptied", failed_event=failed,
        )  # fmt: skip
    stopped = [*Cursor.objects.using(alias).order_by("pk").values()]
    if wanted != 2:
        refusals = "it was emptied|outbox_event refuses the cursor of partition 0"
        with pytest.raises((LogSetBack, ReplayRefused), match=refusals):
            control.repartition("all")
    ParkedStream.objects.using(alias).create(
        subscription="all", partition=1, log="outbox_event", stream="b", version=1, position=3,
        error="",
    )  # fmt: skip
    with pytest.raises(LogSetBack, match="it was emptied"):
        skip_event("all", 5, by="ann", reason="x", using=alias)
    with pytest.raises(LogSetBack, match="it was emptied"):
        discard_stream("all", "b", by="ann", reason="x", using=alias)
    with pytest.raises(LogSetBack, match="it was emptied"):
        count_events("all", using=alias)
    assert ParkedStream.objects.using(alias).exists()
    assert [*Cursor.objects.using(alias).order_by("pk").values()] == stopped
    assert [each.id for each in check_log_tables(databases=[alias])] == ["outbox.E012"] * 2


@pytest.mark.parametrize("count", [5, 3], ids=["looks between", "does not look"])
def test_a_move_ahead_over_the_events_of_the_new_log_is_refused(alias, count):
    subscriber("all")(lambda events: None)
    Subscription.objects.using(alias).create(name="all")
    partition = Partition(subscriber_named("all"), 0)
    try:
        publish(alias, Event, 5, "old")
        for _ in range(2):
            partition.run_once()
        empty(alias, Event)
        publish(alias, Event, count, "new")
        if alias != "postgres" and count == 5:
            partition.run_once()
            assert Cursor.objects.using(alias).get().was_set_back
        with pytest.raises(ReplayRefused, match=f"{count} events that"):
            control.replay("all", "now")
        control.replay("all", "beginning")
        assert Cursor.objects.using(alias).get().error == ""
    finally:
        partition.close()


def test_a_cursor_stays_stopped_when_the_number_is_changed_without_its_log(alias, published, run):
    """The log is read again later, when its new positions may have reached the cursor."""

    def declare(partitions, *logs):
        module._subscribers.pop("all", None)
        subscriber("all", partitions=partitions, logs=logs)(lambda events: None)

    declare(1, Event, Ledger)
    run("all")
    stopped = Cursor.objects.using(alias).filter(log=Ledger._meta.db_table)
    stopped.update(error="LogSetBack: it was emptied")
    declare(2, Event)
    published("a", "b")
    assert run("all") == 2
    assert [each.partitions for each in stopped] == [2, 2]
    declare(2, Event, Ledger)
    run("all")
    assert all(each.was_set_back for each in stopped.all())


@on("default", "mariadb")
def test_a_merge_over_the_events_of_the_new_log_is_refused(alias):
    """No process has looked since, and the new positions have not reached the cursors."""
    subscriber("all", partitions=3)(print)
    Subscription.objects.using(alias).create(name="all", partitions=2)
    empty(alias, Event)
    publish(alias, Event, 3, "new")
    state = LogReader(Event, using=alias).window.start(5).dump()
    for part in range(2):
        Cursor.objects.using(alias).create(
            subscription="all", partition=part, partitions=2, log="outbox_event", state=state,
            position=5,
        )  # fmt: skip
    with pytest.raises(ReplayRefused, match="outbox_event refuses the cursor of partition 0"):
        control.repartition("all")


def test_a_handler_may_fail_because_another_log_was_emptied(alias, published, run):
    """Its own cursor would wait for a replay."""
    emptied = [True]

    @subscriber("prunes")
    def handle(events):
        if emptied[0]:
            raise LogSetBack("Another log was emptied.")

    published("a")
    run("prunes")
    assert "Another log was emptied." in Cursor.objects.using(alias).get().error
    emptied[0] = False
    assert run("prunes") == 1
    assert Cursor.objects.using(alias).get().error == ""


def test_events_that_were_pruned_are_no_emptied_log(alias, published):
    seen = []
    subscriber("all")(seen.extend)
    Subscription.objects.using(alias).create(name="all")
    partition = Partition(subscriber_named("all"), 0)
    try:
        published("a", "b", "c")
        partition.run_once()
        rows = Event.objects.using(alias)
        for keep in (1, 0):
            ids = list(rows.order_by("pk").values_list("pk", flat=True))
            rows.filter(pk__in=ids[: len(ids) - keep])._raw_delete(alias)
            partition.run_once()
            assert partition.error == ""
        published("d")
        partition.run_once()
        assert [event.stream for event in seen] == ["a", "b", "c", "d"]
    finally:
        partition.close()
