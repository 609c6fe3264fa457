"""The lag of subscriptions: correct, bounded, with few statements that use indexes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from io import StringIO
from uuid import uuid4

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.events.log.filter import EventFilter
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.unread import count_unread
from outbox_app.events.log.windows.time import TimeWindow
from outbox_app.events.management.commands.outbox_subscriptions import Command
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions import control, lag
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import Subscriber, register, subscriber_named
from outbox_app.models import Lease, Process, counting
from outbox_app.monitoring import outbox_status, problems
from tests.events.log.own_log.models import Ledger
from tests.faults.tools import eventually, on

pytestmark = pytest.mark.django_db(transaction=True)


def one(alias, name):
    [found] = lag.lags(using=alias, names=[name])
    return found


def test_what_is_behind(alias, published, run, seen_by):
    seen_by("all")
    seen_by("some", types=["order.*"])
    seen_by("parts", partitions=4)
    published(*"abc", type="order.placed")
    published(*"abc")
    run("all", "some", "parts")
    assert [each.behind for each in lag.lags(using=alias)] == [0, 0, 0]
    published(*"abcdefgh", type="order.paid")
    published(*"abcd")
    Event.objects.using(alias).update(recorded_at=DatabaseNow() - timedelta(minutes=5))
    found = {each.name: each for each in lag.lags(using=alias)}
    assert {name: each.behind for name, each in found.items()} == {
        "all": 12,
        "some": 8,
        "parts": 12,
    }
    for each in found.values():
        assert each.complete
        assert 300 <= each.oldest_seconds < 400
    run("all")
    assert (one(alias, "all").behind, one(alias, "all").oldest_seconds) == (0, 0)


def test_in_the_middle_of_a_backlog(alias, published, run, seen_by):
    """Every state that a cursor goes through, compared with what is then handled."""
    seen = seen_by("all", batch_size=3)
    published(*"abcdefgh")
    runner = Runner([subscriber_named("all")])
    for turn in range(6):
        runner.run_once()
        if turn == 1:
            published(*"abcd")
        assert one(alias, "all").behind == (8 if turn < 1 else 12) - len(seen)
    runner._leave()
    assert len(seen) == 12


def test_a_replayed_one(alias, published, run, seen_by):
    seen_by("all")
    published(*"abcdef")
    run("all")
    ids = list(Event.objects.using(alias).order_by("id").values_list("id", flat=True))
    control.replay("all", ids[1], skip_ahead=True)
    assert one(alias, "all").behind == 4
    control.replay("all", "beginning")
    assert one(alias, "all").behind == 6
    control.replay("all", "now", skip_ahead=True)
    assert one(alias, "all").behind == 0


def test_counting_stops_and_says_so(alias, published, run, seen_by, monkeypatch):
    monkeypatch.setattr(lag, "LEAST", 3)
    monkeypatch.setattr(counting, "MANY", 3)
    seen_by("all")
    control.replay("all", "beginning")
    published(*"abc")
    assert one(alias, "all").shown == "3"
    published("d")
    assert one(alias, "all").shown == "3+"


def test_states_errors_parked_and_gaps(alias, published, run, seen_by):
    seen_by("all")
    assert one(alias, "all").state == "waiting"
    published("a")
    run("all")
    assert one(alias, "all").state == "stopped"
    for stream in "ab":
        ParkedStream.objects.using(alias).create(
            subscription="all", partition=0, log="outbox_event", stream=stream, version=1,
            position=1, error="",
        )  # fmt: skip
    Gap.objects.using(alias).create(
        kind="version", subscription="all", log="outbox_event", first=1, last=1
    )
    Gap.objects.using(alias).create(
        kind="version", subscription="all", log="outbox_event", first=3, last=3, state="filled"
    )
    Cursor.objects.using(alias).update(state="nonsense")
    found = one(alias, "all")
    assert (found.state, found.parked, found.gaps) == ("failing", 2, 1)
    assert "cannot be read" in found.error
    assert found.shown == "0+"
    control.pause("all")
    assert one(alias, "all").state == "paused"


def test_what_waits_in_a_log_that_was_left_out_does_not_count(alias, published, run, seen_by):
    seen_by("moves", logs=[Event, Ledger])
    published("a")
    run("moves")
    here = {"subscription": "moves", "partition": 0, "log": "outbox_event", "stream": "a"}
    ParkedStream.objects.using(alias).create(**here, version=2, position=2, error="")
    Gap.objects.using(alias).create(**here, kind="version", first=1, last=1)
    assert (one(alias, "moves").parked, one(alias, "moves").gaps) == (1, 1)
    register(replace(subscriber_named("moves"), log_names=("own_log.Ledger",)))
    run("moves")
    assert (one(alias, "moves").parked, one(alias, "moves").gaps) == (0, 0)


def test_a_subscription_that_no_process_runs_is_not_running(alias, published, running, seen_by):
    seen_by("all")
    seen_by("other")
    published("a")
    with running("all"):
        eventually(lambda: one(alias, "all").state == "running")
        # Killed: the row of its process stays, and is silent.
        drainers = Process.objects.using(alias).filter(resource="subscription:all")
        row = drainers.get()
        row.pk = uuid4()
        row.resource = "subscription:other"
        row.heartbeat_at -= timedelta(seconds=row.lease_seconds + 60)
        row.save(using=alias, force_insert=True)
        assert not one(alias, "other").served
        assert one(alias, "all").served
    assert one(alias, "all").state == "stopped"


def test_statements_do_not_depend_on_the_rows(alias, published, run, seen_by):
    seen_by("all", partitions=8)
    control.replay("all", "beginning")
    counts = []
    for _ in range(2):
        published(*(f"s{i}" for i in range(40)))
        with CaptureQueriesContext(connections[alias]) as queries:
            assert one(alias, "all").behind
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 9


def test_more_cursors_than_one_statement_takes(alias, published, seen_by):
    seen_by("all", partitions=150)
    control.replay("all", "beginning")
    published(*(f"s{i}" for i in range(30)))
    assert one(alias, "all").behind == 30


@on("postgres")
@pytest.mark.parametrize("place", ["beginning", "now", "middle"])
def test_each_part_is_an_index_range(alias, published, seen_by, place):
    """Ten thousand rows of other transactions: none of them is looked at by a scan."""
    seen_by("all")
    published("a")
    [first] = Event.objects.using(alias).values_list("id", flat=True)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, "
            "message_id) SELECT '', 'x' || i, 1, 't', '{}', '{}', 1, gen_random_uuid() "
            "FROM generate_series(1, 10000) i"
        )
        cursor.execute("ANALYZE outbox_event")
    at = {"middle": first + 5000}.get(place, place)
    control.replay("all", at, skip_ahead=True)
    published("b")
    reader = LogReader(Event, using=alias)
    state = reader.load(Cursor.objects.using(alias).get().state)
    with CaptureQueriesContext(connections[alias]) as queries:
        [found] = count_unread(reader, [(state, EventFilter(types=["made"]))], bound=100)
    assert found.rows == {"beginning": 2, "now": 1, "middle": 1}[place]
    with connections[alias].cursor() as cursor:
        cursor.execute("EXPLAIN (ANALYZE, BUFFERS) " + queries[0]["sql"])
        text = "\n".join(row[0] for row in cursor.fetchall())
    assert "Seq Scan" not in text, text


def test_subscriptions_of_another_alias_are_not_shown(alias, seen_by):
    class Elsewhere(Subscriber):
        using = "elsewhere"

    seen_by("all")
    register(Elsewhere(name="far", handle=print))
    Subscription.objects.using(alias).create(name="old")
    assert [each.name for each in lag.lags(using=alias)] == ["all", "old"]


def test_one_that_cannot_run_is_shown_and_says_why(alias):
    register(Subscriber(name="broken", handle=print, log_names=("no.Log",)))
    [found] = lag.lags(using=alias)
    assert (found.name, found.state, found.unread) == ("broken", "failing", False)
    assert found.error == found.fault != ""


def test_what_the_code_asks_for_counts_and_not_what_it_did(alias, published, run, seen_by):
    seen_by("all")
    run("all")
    published("a", "b")
    register(replace(subscriber_named("all"), types=("order.*",)))
    published("c", type="order.paid")
    assert one(alias, "all").behind == 1


@on("postgres", "mariadb")
def test_a_replica_that_is_away(alias, published, run, seen_by, monkeypatch):
    """What reads from it cannot be measured; the others can."""
    monkeypatch.setattr(TimeWindow, "behind", 0)
    connections.settings["replica"] = connections.settings[alias]
    replica = connections["replica"] = connections.create_connection(alias)
    try:
        seen_by("copy", by_time=True, on_gap="park", read_from="replica")
        seen_by("all")
        published("a")
        run("copy", "all")
        replica.close()
        replica.settings_dict = {**replica.settings_dict, "HOST": "127.0.0.1", "PORT": "1"}
        published("b")
        found = {each.name: each for each in lag.lags(using=alias)}
        assert (found["all"].behind, found["all"].error) == (1, "")
        assert found["copy"].cursors[0].behind is None
        assert found["copy"].error.startswith("replica cannot be read: OperationalError: ")
    finally:
        replica.close()
        del connections["replica"], connections.settings["replica"]


@on("postgres", "mariadb")
def test_what_only_its_processes_know(alias, published, seen_by):
    """It cannot begin to read, so no cursor has the error: the rows of its processes have it."""
    connections.settings["replica"] = connections.settings[alias]
    replica = connections["replica"] = connections.create_connection(alias)
    replica.settings_dict = {**replica.settings_dict, "HOST": "127.0.0.1", "PORT": "1"}
    seen_by("copy", by_time=True, on_gap="park", read_from="replica")
    published("a")
    runner, spare = (Runner([subscriber_named("copy")]) for _ in range(2))
    try:
        runner.run_once()
        [worker] = runner.workers
        worker.holder._beaten_at = float("-inf")
        worker.beat()
        found = one(alias, "copy")
        assert (found.cursors, found.served, found.state) == ([], True, "failing")
        assert found.error.startswith("OperationalError")
        [problem] = [each for each in problems(outbox_status()) if each.code == "failing"]
        assert "copy: OperationalError" in problem.detail
        Command(stdout=(listed := StringIO()))._list(name="copy", using=alias, json=False)
        assert "\n  OperationalError" in listed.getvalue()
        spare.run_once()  # has no partition, so it meets no trouble, and handles nothing
        row = Process.objects.using(alias).get(trouble="")
        assert one(alias, "copy").state == "failing"
        Lease.objects.using(alias).filter(resource=row.resource).update(owner=row.pk)
        assert (one(alias, "copy").state, one(alias, "copy").error) == ("waiting", "")
    finally:
        spare._leave()
        runner._leave()
        replica.close()
        del connections["replica"], connections.settings["replica"]
