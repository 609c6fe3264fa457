"""All facts at once: correct on each database, bounded, with a constant number of statements."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.entities import doors as entities_doors
from outbox_app.entities import series as commands
from outbox_app.events import series as of_events
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.series import EventsPerMinute
from outbox_app.management.commands.outbox_status import table
from outbox_app.models import DeadJob, Incident, StagedJob, Statistic, counting
from outbox_app.monitoring import series
from outbox_app.monitoring import status as facts_module
from outbox_app.monitoring.status import PerMinute, outbox_status
from outbox_app.process import counters
from outbox_app.views import health
from tests.patience import eventually

pytestmark = pytest.mark.django_db(transaction=True)

NOW = datetime(2026, 1, 31, 12, 0, 30, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def gap(alias, first=1, **columns):
    values = {"kind": "version", "log": "outbox_event", "first": first, "last": first, **columns}
    return Gap.objects.using(alias).create(**values)


def figure(alias, name, value, *, ago=1, dimension="", label="", source="one"):
    minute = NOW.replace(second=0) - ago * timedelta(minutes=1)
    Statistic.objects.using(alias).create(
        source=source, minute=minute, name=name, dimension=dimension, label=label, value=value
    )


def dead(found):
    return found.as_json()["dead"]


def test_of_an_empty_outbox(alias):
    found = outbox_status()
    assert found.database == alias
    assert (found.backlog.rows, found.waiting, found.drainers, len(found.unowned_shards)) == (
        0,
        0,
        [],
        128,
    )
    assert dead(found) == {"jobs": 0, "complete": True, "by_error": {}}
    assert found.incidents == {
        "takeover": 0,
        "unknown": 0,
        "requeue": 0,
        "contradiction": 0,
        "no_receipt": 0,
    }
    assert found.per_minute == PerMinute(published=0, dead=0)
    assert (found.delay.p50, found.delay.p95, found.delay.p99) == (None, None, None)
    events = found.sections["events"]
    assert (events.subscriptions, events.gaps) == ([], 0)
    assert events.per_minute == EventsPerMinute(handled=0, failed=0)


def test_of_jobs(alias, staged, died):
    staged(2, age=500)
    due, later = staged(2)
    held = StagedJob.objects.using(alias)
    held.filter(pk=due.pk).update(available_at=DatabaseNow() - SECOND)
    held.filter(pk=later.pk).update(available_at=DatabaseNow() + timedelta(days=2))
    died(2, error="E")
    died(3, error="F")
    Incident.objects.using(alias).bulk_create(
        Incident(kind=kind, first_id=1, last_id=1) for kind in ("takeover", "takeover", "unknown")
    )
    old = Incident.objects.using(alias).create(kind="unknown", first_id=1, last_id=1)
    Incident.objects.using(alias).filter(pk=old.pk).update(
        created_at=DatabaseNow() - timedelta(hours=25)
    )

    found = outbox_status()

    assert found.backlog.rows == 2
    assert 500 <= found.backlog.oldest_seconds < 600
    assert (found.held.due, found.held.later) == (1, 1)
    assert found.waiting == found.as_json()["backlog"]["jobs"] == 3
    assert json.loads(health(RequestFactory().get("/")).content)["backlog"] == 3
    assert "ready       3, the oldest 8 min old" in table(found, [])
    assert dead(found) == {"jobs": 5, "complete": True, "by_error": {"F": 3, "E": 2}}
    assert found.incidents == {
        "takeover": 2,
        "unknown": 1,
        "requeue": 0,
        "contradiction": 0,
        "no_receipt": 0,
    }


def test_a_project_stages_that_has_an_app_a_declaration_or_a_row(alias, staged, monkeypatch):
    monkeypatch.setattr(facts_module, "staging_apps", lambda: [])
    assert outbox_status().stages, "models of the tests declare jobs"
    monkeypatch.setattr(facts_module, "declared", lambda *_: [])
    assert not outbox_status().stages
    monkeypatch.setattr(facts_module, "staging_apps", lambda: ["shop"])
    assert outbox_status().stages
    monkeypatch.setattr(facts_module, "staging_apps", lambda: [])
    staged()
    assert outbox_status().stages
    assert outbox_status(parts=()).stages


def test_of_drainers(alias, drainer, monkeypatch):
    monkeypatch.setattr(series, "_now", lambda using: NOW)
    one = drainer(shards=100, done=9, dead=1, trouble="broker is away")
    drainer(pid=8, shards=8, silent=900)
    figure(alias, counters.PUBLISHED, 90, source=str(one.pk))

    found = outbox_status()

    first, second = found.drainers
    row = first.drainer
    assert (row.id, row.host, row.pid, first.shards) == (one.pk, "web-1", 7, 100)
    assert (row.done, row.dead) == (9, 1)
    assert (row.trouble, first.is_silent, row.lease_seconds) == ("broker is away", False, 10)
    assert found.rate(first) == pytest.approx(60)  # 90 in the minute and a half
    assert (found.rate(second), second.is_silent) == (0, True)
    assert 900 <= second.silent_seconds < 1000
    assert found.alive == [first]
    assert len(found.unowned_shards) == 20


def test_per_minute_is_the_last_full_one(alias, monkeypatch):
    monkeypatch.setattr(series, "_now", lambda using: NOW)
    names = (counters.PUBLISHED, counters.DEAD)
    for number, name in enumerate([*names, of_events.HANDLED, of_events.FAILED], 1):
        figure(alias, name, 1000, ago=0)
        figure(alias, name, number)
        figure(alias, name, 10 * number, source="two")
        figure(alias, name, 5000, ago=2)
    for bucket in counters.BUCKETS[:2]:
        figure(alias, counters.DELAY, 50, dimension=counters.LE, label=str(bucket))

    found = outbox_status()

    assert found.per_minute == PerMinute(published=11, dead=22)
    assert found.sections["events"].per_minute == EventsPerMinute(handled=33, failed=44)
    assert found.delay.p50 == pytest.approx(float(counters.BUCKETS[0]))
    assert found.delay.p50 < found.delay.p95 < found.delay.p99 <= float(counters.BUCKETS[1])


def test_of_subscriptions_and_gaps(alias, published, run, seen_by):
    seen_by("stock")
    published("a")
    run("stock")
    published("a", "b")
    seen_by("new")
    gap(alias, subscription="stock")
    gap(alias, 2)
    gap(alias, 3, state=Gap.State.FILLED)
    ParkedStream.objects.using(alias).create(
        subscription="stock", partition=0, log="outbox_event", stream="s", version=1, position=1,
        error="",
    )  # fmt: skip
    Cursor.objects.using(alias).update(error="ValueError: no")

    found = outbox_status().sections["events"]

    new, stock = found.subscriptions
    assert (stock.name, stock.state, stock.declared, stock.served) == (
        "stock",
        "failing",
        True,
        False,
    )
    assert (stock.behind, stock.complete, stock.handled) == (2, True, 1)
    assert (stock.parked, stock.gaps, stock.error) == (1, 1, "ValueError: no")
    assert (new.name, new.state, new.unread, stock.unread) == ("new", "waiting", True, False)
    assert found.gaps == 2


def test_every_subscription_is_told(alias, monkeypatch):
    monkeypatch.setattr(counting, "LISTED", 2)
    names = [f"s{number}" for number in range(5)]
    rows = Subscription.objects.using(alias)
    rows.bulk_create(Subscription(name=name) for name in names)
    assert [each.name for each in outbox_status().sections["events"].subscriptions] == names


def test_one_that_has_never_run_is_not_unread_without_events(alias, seen_by):
    seen_by("new")
    [new] = outbox_status().sections["events"].subscriptions
    assert not new.unread


def test_counting_stops(alias, died, staged, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    monkeypatch.setattr(counting, "LISTED", 2)
    monkeypatch.setattr(facts_module, "INCIDENTS", 2)
    for error in ("A", "E", "F", "F"):
        died(1, error=error)
    staged(9)
    for number in range(9):
        gap(alias, number)
        Incident.objects.using(alias).create(kind="takeover", first_id=1, last_id=1)

    found = outbox_status()

    assert found.backlog.rows == found.sections["events"].gaps == 4
    assert dead(found) == {"jobs": 4, "complete": False, "by_error": {"F": 2, "E": 1}}
    assert found.incidents["takeover"] == 2


def test_what_died_lately_is_told_of_tasks_that_are_not_listed(alias, died, monkeypatch):
    monkeypatch.setattr(counting, "LISTED", 2)
    for task in "aabb":
        died(1, task=task)
    DeadJob.objects.using(alias).update(died_at=DatabaseNow() - timedelta(hours=2))
    assert outbox_status().dead.lately == 0
    died(1, task="c")
    found = outbox_status()
    assert [row.name for row in found.dead.tasks] == ["a", "b"]
    assert found.dead.lately == 1


def test_errors_that_are_not_listed_are_told(alias, died, monkeypatch):
    monkeypatch.setattr(counting, "LISTED", 2)
    for error in "ABBCC":
        died(1, error=error)
    expected = {"jobs": 5, "complete": False, "by_error": {"B": 2, "C": 2}}
    assert dead(outbox_status()) == expected


def test_the_number_of_statements_does_not_depend_on_the_rows(
    alias, staged, died, drainer, published, run, seen_by
):
    seen_by("stock")
    published("a")
    run("stock")
    drainer(shards=128)

    def statements():
        eventually(all_visible)  # a transaction of autovacuum may hide events until it ends
        with CaptureQueriesContext(connections[alias]) as queries:
            outbox_status()
        return len(queries)

    def all_visible():
        with closing(LogReader(Event, using=alias)) as reader:
            events, _ = reader.read(reader.window.start(0), 100)
        return len(events) == Event.objects.using(alias).count()

    def more(count):
        staged(count)
        died(count, error=f"E{count}")
        published(*(f"s{number}" for number in range(count)))
        for number in range(count):
            gap(alias, 100 * count + number)
            drainer(pid=100 * count + number)
            Incident.objects.using(alias).create(kind="takeover", first_id=1, last_id=1)
            figure(alias, counters.PUBLISHED, 1, source=f"{count}-{number}")
            [job] = staged(1)
            StagedJob.objects.using(alias).filter(pk=job.pk).update(
                sent_at=DatabaseNow(), available_at=DatabaseNow(), queue=f"q{number}"
            )

    more(1)
    before = statements()
    more(30)
    assert before <= 52  # some of them for each log, four for entities, three for receipts
    eventually(lambda: statements() == before)  # one more if another session is in the way


def test_commands(alias, monkeypatch):
    monkeypatch.setattr(series, "_now", lambda using: NOW)
    for source in ("one", "two"):
        for ago, count in ((0, 1000), (1, 30), (4, 100), (5, 7777)):
            figure(alias, commands.COMMANDS, count, ago=ago, source=source)
        figure(alias, commands.CONFLICTS, 2, source=source)
        figure(alias, commands.REJECTED, 4, dimension="code", label="balance", source=source)
        figure(alias, commands.REJECTED, 9, ago=2, dimension="code", label="b", source=source)
        figure(alias, commands.WAITING, 70, source=source)
        for label, count in (("1", 60), ("2", 30), ("1000", 10)):
            figure(alias, commands.BATCH_SIZE, count, dimension="le", label=label, source=source)
        for label, count in (("0.005", 50), ("0.01", 45), ("+Inf", 5)):
            figure(alias, commands.COMMIT_TIME, count, dimension="le", label=label, source=source)
    figure(alias, commands.WAITING, 3, ago=0, source="two")

    found = outbox_status().sections["entities"].commands

    assert (found.recorded, found.conflicts, found.rejected) == (60, 4, {"balance": 8})
    assert found.batch_size == (1, 750)
    assert found.commit_seconds == (0.005, 0.01)
    assert found.waiting == 73
    assert "entities" not in outbox_status(parts=()).sections


def test_commands_where_none_was_asked_anything_or_none_is_declared(alias, monkeypatch):
    assert outbox_status().sections["entities"].commands == commands.Commands()
    monkeypatch.setattr(entities_doors, "entity_types", lambda: [])
    assert "entities" not in outbox_status().sections
