"""The counters of processes that run subscriptions, by subscription."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.events import NewEvent, publish_many, subscriber
from outbox_app.events import series as events_series
from outbox_app.events.models import Cursor, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.models import Statistic

from .conftest import stop_the_clock_of
from .planted import totals

pytestmark = pytest.mark.django_db(transaction=True)


def publish(alias, *streams):
    with transaction.atomic(using=alias):
        publish_many(NewEvent(stream, "made") for stream in streams)


def turned(*names, turns=3):
    """A process that has turned its subscriptions some times, and has not stopped."""
    runner = Runner([subscriber_named(name) for name in names], lease_seconds=600)
    stop_the_clock_of(runner._counters)
    for _ in range(turns):
        runner.run_once()
    return runner


def killed(runner):
    """It is gone, and has written nothing; its leases have run out."""
    for worker in runner.workers:
        worker.leave()


def found(alias, **only):
    return totals(alias, dimension="subscription", **only)


def test_events_that_were_handled_by_subscription(alias):
    subscriber("all")(lambda events: None)
    subscriber("shared", partitions=3)(lambda events: None)
    publish(alias, *(f"s{i % 10}" for i in range(40)))
    runner = Runner([subscriber_named("all"), subscriber_named("shared")])
    runner.run(once=True)
    assert found(alias) == {"handled all": 40, "handled shared": 40}
    rows = Statistic.objects.using(alias).filter(dimension="subscription")
    sources = {(row.label, row.source) for row in rows}
    assert sources == {(s.subscriber.name, str(s.holder.id)) for s in runner.workers}

    publish(alias, "a", "b")
    Runner([subscriber_named("all")]).run(once=True)
    assert found(alias) == {"handled all": 42, "handled shared": 40}
    handled = events_series.handled(using=alias)
    assert {name: sum(values) for name, values in handled.items()} == {"all": 42, "shared": 40}


def test_attempts_that_failed(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "MAX_RETRY_DELAY": 0.001}
    failures = 3

    @subscriber("failing")
    def fail(events):
        nonlocal failures
        if failures:
            failures -= 1
            raise ValueError("on purpose")

    subscriber("well")(lambda events: None)
    publish(alias, "a")  # the search for an event in a page counts as one attempt
    runner = turned("failing", "well")
    while failures:
        runner.run_once()
    runner.run(once=True)
    while not found(alias).get("handled failing"):
        runner.run(once=True)
    assert found(alias) == {"failed failing": 3, "handled failing": 1, "handled well": 1}


@pytest.mark.parametrize("partitions", [1, 3])
def test_cursors_that_cannot_be_read(alias, partitions):
    subscriber("damaged", partitions=partitions)(lambda events: None)
    control.replay("damaged", "beginning", using=alias)
    Cursor.objects.using(alias).update(state="nonsense")
    Runner([subscriber_named("damaged")]).run(once=True)
    counted = found(alias)
    assert counted.keys() == {"failed damaged"}
    assert counted["failed damaged"] >= partitions  # more, where the turn takes longer than a pause


def test_events_that_set_their_stream_aside(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "MAX_RETRY_DELAY": 0.001}

    @subscriber("parks", on_error="park")
    def fail(events):
        if any(event.stream == "bad" for event in events):
            raise ValueError("on purpose")

    publish(alias, "a", "bad", "b")
    while not found(alias).get("handled parks"):
        Runner([subscriber_named("parks")]).run(once=True)
    # Two attempts at the page, and the event.
    assert found(alias)["failed parks"] == 3


def test_a_killed_process_loses_what_was_not_written(alias):
    subscriber("all")(lambda events: None)
    publish(alias, "a", "b", "c")
    runner = turned("all")
    assert found(alias) == {}
    runner._counters._tried_at = float("-inf")
    runner.run_once()
    assert found(alias) == {"handled all": 3}
    publish(alias, "d", "e")
    runner.run_once()
    killed(runner)
    assert found(alias) == {"handled all": 3}

    publish(alias, "f")
    Runner([subscriber_named("all")]).run(once=True)
    assert found(alias) == {"handled all": 4}


def test_a_page_that_is_handled_before_another_log_fails_counts(alias):
    subscriber("all")(lambda events: None)
    publish(alias, "a", "b", "c")
    runner = turned("all", turns=1)
    [worker] = runner.workers
    [partition] = worker.partitions.values()
    publish(alias, "d")

    def look(*args):
        raise ValueError("after the page was committed")

    partition._id_gaps.look = look
    runner.run_once()
    assert worker.backoff.text
    runner._leave()
    assert found(alias) == {"handled all": 4}


def test_a_write_that_fails_disturbs_no_subscription(alias):
    def refuse(execute, sql, *args):
        if "outbox_statistic" in sql:
            raise OperationalError("refused on purpose")
        return execute(sql, *args)

    subscriber("all")(lambda events: None)
    publish(alias, "a", "b", "c")
    with connections[alias].execute_wrapper(refuse):
        runner = turned("all")
        runner._counters.write()
        publish(alias, "d")
        runner.run_once()
        assert not runner.trouble
    assert runner.done == 4
    assert Subscription.objects.using(alias).filter(name="all").exists()
    runner._counters.write()
    assert found(alias) == {"handled all": 4}
    killed(runner)
