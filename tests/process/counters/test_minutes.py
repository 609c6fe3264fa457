"""The reader of counters: figures of the last minutes, from any rows, and with rows missing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.database import clock
from outbox_app.database.clock import DatabaseNow
from outbox_app.events import series as events_series
from outbox_app.models import StagedJob, Statistic
from outbox_app.monitoring import series
from outbox_app.process.counters import Counters
from outbox_app.process.lease import LeaseHolder
from tests import mysql
from tests.jobs.dead.rows import staged_jobs

from .planted import NOW, ago, plant

pytestmark = pytest.mark.django_db

JOBS = ("published", "dead")
ALL = (*JOBS, "handled", "failed")
SAMPLES = ("ready",)


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """The database's clock says NOW."""
    monkeypatch.setattr(series, "_now", lambda using: NOW)


def test_an_empty_table(alias):
    found = series.series(using=alias, minutes=3)
    assert found.starts == [ago(2), ago(1), ago(0)]
    for name in JOBS:
        assert getattr(found, name) == [0, 0, 0]
    for name in SAMPLES:
        assert getattr(found, name) == [None, None, None]
    assert series.rates(using=alias) == {}
    assert events_series.handled(using=alias) == {}
    assert series.delays(using=alias) == (None, None, None)


def test_processes_are_added_up_and_holes_are_nothing(alias):
    plant(
        alias,
        (3, "published", 10.0, "one"),
        (3, "published", 5.0, "other"),
        (1, "published", 7.0, "other"),
        (1, "dead", 1.0, "one"),
        (3, "handled", 4.0, "one", "subscription", "a"),
        (3, "handled", 6.0, "one", "subscription", "b"),
        (2, "failed", 1.0, "one", "subscription", "b"),
        (2, "events", 99.0, "outbox_event"),
    )
    found = series.series(using=alias, minutes=4)
    assert found.published == [15, 0, 7, 0]
    assert found.dead == [0, 0, 1, 0]
    assert events_series.handled(using=alias, minutes=4) == {"a": [4, 0, 0, 0], "b": [6, 0, 0, 0]}


def test_of_two_samples_the_higher_counts_and_without_one_it_is_not_known(alias):
    plant(
        alias,
        (2, "ready", 5.0),
        (2, "ready", 8.0, "other"),
        (0, "ready", 0.0),
    )
    found = series.series(using=alias, minutes=4)
    assert found.ready == [None, 8, None, 0]


def test_the_first_and_the_last_minute_are_within(alias):
    plant(alias, *((m, "published", 10.0**m if m > 0 else 7.0) for m in (5, 4, 3, 0)))
    plant(alias, (-1, "published", 100.0, "faster"), (-1, "ready", 9.0))
    found = series.series(using=alias, minutes=5)
    assert found.starts[0] == ago(4)
    assert found.published == [10**4, 10**3, 0, 0, 7]


def test_steps_are_per_minute_and_stay_where_they_are(alias, monkeypatch):
    plant(alias, *((m, "published", 10.0) for m in range(20)))
    plant(alias, (3, "ready", 4.0), (4, "ready", 9.0))
    found = series.series(using=alias, minutes=12, step=5)
    # 12:30 has begun; 12:25 to 12:30, and so on.
    assert found.starts == [ago(10), ago(5), ago(0)]
    assert found.published == [10, 10, 10]
    assert found.ready == [None, 9, None]
    monkeypatch.setattr(series, "_now", lambda using: NOW + timedelta(minutes=4))
    again = series.series(using=alias, minutes=12, step=5)
    assert again.starts == found.starts
    # Of the current step, five minutes have begun, and four of them have no rows.
    assert again.published == [10, 10, 2]
    assert all(start.tzinfo is not None for start in again.starts)


def test_times_are_in_utc_whatever_the_zone(alias, monkeypatch):
    here = timezone(timedelta(hours=5, minutes=30))
    plant(alias, (1, "published", 3.0))
    monkeypatch.setattr(series, "_now", lambda using: NOW.astimezone(here).astimezone(UTC))
    found = series.series(using=alias, minutes=2)
    assert [start.utcoffset() for start in found.starts] == [timedelta(0)] * 2
    assert found.published == [3, 0]


def test_now_is_the_databases(alias, monkeypatch):
    monkeypatch.undo()
    now = series._now(alias)
    [job] = staged_jobs(using=alias)
    asked = StagedJob.objects.using(alias).annotate(now=DatabaseNow()).get(pk=job.pk).now
    assert timedelta(0) <= asked - now < timedelta(minutes=1)
    assert now.utcoffset() == timedelta(0)


@pytest.mark.django_db(transaction=True)
def test_without_time_zones_writer_and_reader_agree(settings, monkeypatch):
    monkeypatch.undo()
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    holder = LeaseHolder(using="default", lease_seconds=10)
    holder.join()
    counters = Counters(using="default")
    counters.of(holder).add("published", 5)
    counters.write()
    holder.leave()
    before = datetime.now(UTC)
    found = series.series(using="default", minutes=10)
    assert found.starts[-1] <= datetime.now(UTC)
    assert before < found.starts[-1] + timedelta(minutes=1)  # SQLite's clock is in UTC all the same
    assert sum(found.published) == 5
    assert {start.utcoffset() for start in found.starts} == {timedelta(0)}
    assert {start.second for start in found.starts} == {0}


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_without_time_zones_an_hour_comes_twice(alias, settings, monkeypatch):
    """The session is in the project's zone."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Vienna"
    monkeypatch.setattr(series, "_now", lambda using: datetime(2026, 10, 25, 2, 0, 9, tzinfo=UTC))
    row = {"source": "s", "name": "handled", "dimension": "subscription", "label": "a", "value": 1}
    for minute in (datetime(2026, 10, 25, 2, 59), datetime(2026, 10, 25, 3)):
        Statistic.objects.using(alias).create(minute=minute, **row)
    for module in (clock, series):
        monkeypatch.setattr(module, "zone_of", lambda using: ZoneInfo("Europe/Vienna"))
    assert events_series.handled(using=alias, minutes=2) == {"a": [0, 1]}


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_without_time_zones_the_number_of_statements_is_constant_too(alias, settings):
    """It asked for the zone of the session with each row: ten thousand times for the overview."""
    counted = []
    for minutes in (range(1), range(1, 60)):
        settings.USE_TZ = True
        for m in minutes:
            plant(
                alias,
                *((m, name, 1.0) for name in ("published", "ready")),
                (m, "handled", 1.0, "one", "subscription", "a"),
                (m, "newest_position", float(m), "one", "log", "a"),
            )
        settings.USE_TZ = False
        with CaptureQueriesContext(connections[alias]) as statements:
            everything(alias)
            events_series.published(using=alias)
        counted.append(len(statements))
    assert counted[0] == counted[1]


def test_the_rate_of_each_drainer(alias):
    plant(
        alias,
        (2, "published", 500.0, "one"),
        (1, "published", 60.0, "one"),
        (0, "published", 30.0, "one"),
        (0, "published", 15.0, "new"),
        (1, "dead", 5.0, "one"),
    )
    # Half of the current minute is over.
    assert series.rates(using=alias) == {"one": 60, "new": 10}


def delay(alias, **buckets):
    rows = [
        (m, "delay", value, source, "le", label)
        for label, planted in buckets.items()
        for m, source, value in planted
    ]
    plant(alias, *rows)


class TestDelays:
    """Percentiles, from a histogram."""

    def test_interpolated_within_a_bucket(self, alias):
        delay(alias, **{"0.1": [(0, "a", 60.0), (4, "b", 30.0)], "5": [(1, "a", 10.0)]})
        found = series.delays(using=alias)
        assert found.p50 == pytest.approx(0.05 + 0.05 * 50 / 90)
        assert found.p95 == pytest.approx(2.5 + 2.5 * 5 / 10)
        assert found.p99 == pytest.approx(2.5 + 2.5 * 9 / 10)

    def test_beyond_the_last_bucket_its_bound_is_all_that_is_known(self, alias):
        delay(alias, **{"+Inf": [(0, "a", 3.0)]})
        assert series.delays(using=alias).p50 == 3600

    def test_only_of_the_last_minutes(self, alias):
        delay(alias, **{"1": [(4, "a", 1.0)], "300": [(5, "a", 10.0), (-1, "a", 10.0)]})
        assert series.delays(using=alias).p99 < 1
        assert series.delays(using=alias, minutes=6).p50 > 60

    def test_buckets_of_another_version_are_in_their_place(self, alias):
        delay(alias, **{"0.07": [(0, "old", 10.0)], "0.1": [(0, "a", 10.0)]})
        found = series.delays(using=alias)
        assert found.p50 == pytest.approx(0.07)
        assert found.p95 == pytest.approx(0.07 + 0.03 * 0.9)


def test_handled_by_subscription(alias):
    plant(
        alias,
        (3, "handled", 4.0, "one", "subscription", "a"),
        (3, "handled", 5.0, "other", "subscription", "a"),
        (0, "handled", 1.0, "one", "subscription", "a"),
        (2, "handled", 6.0, "one", "subscription", "b"),
        (4, "handled", 9.0, "one", "subscription", "b"),
        (-1, "handled", 9.0, "one", "subscription", "b"),
        (1, "failed", 9.0, "one", "subscription", "b"),
    )
    assert events_series.handled(using=alias, minutes=4) == {"a": [9, 0, 0, 1], "b": [0, 6, 0, 0]}


def everything(alias):
    series.series(using=alias)
    series.rates(using=alias)
    series.delays(using=alias)
    events_series.handled(using=alias)


@pytest.mark.parametrize("sources", [1, 40])
def test_a_constant_number_of_statements(alias, sources):
    plant(
        alias,
        *(
            (m, name, float(m), f"source {source}")
            for m in range(10)
            for source in range(sources)
            for name in (*ALL, *SAMPLES)
        ),
    )
    with CaptureQueriesContext(connections[alias]) as statements:
        everything(alias)
    assert len(statements) == 4


def plant_300k(alias):
    """Two days of ten names of ten processes, around the minute of now, and a log's statistics."""
    made = "SELECT %s, %s, %s, '', '', 1, CURRENT_TIMESTAMP FROM %s"
    names = [*ALL, "ready", "immediate", "claimed", "delay", "events"]
    vendor = connections[alias].vendor
    if vendor == "postgresql":
        minute = "TIMESTAMPTZ '2026-03-29 12:30:00+00' - n * INTERVAL '1 minute'"
        numbers, label = (
            "generate_series(0, 2999) AS s(n), generate_series(1, 10) AS p(p)",
            "'s'||p",
        )
    else:
        minute = "TIMESTAMP '2026-03-29 12:30:00' - INTERVAL n MINUTE"
        of = mysql.numbers
        numbers = f"{of(0, 2999, 'n')} s, {of(1, 10, 'p')} p"
        label = "CONCAT('s', p)"
    with connections[alias].cursor() as cursor:
        for name in names:
            cursor.execute(
                "INSERT INTO outbox_statistic "
                "(source, minute, name, dimension, label, value, written_at) "
                + made
                % (label, minute, f"'{name}'", numbers)
            )
        cursor.execute(f"ANALYZE {'TABLE ' if vendor == 'mysql' else ''}outbox_statistic")


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


# ANALYZE ends MariaDB's transaction: the rows would stay for the next test.
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_every_statement_is_an_index_range(alias):
    plant_300k(alias)
    assert Statistic.objects.using(alias).count() == 270_000
    with CaptureQueriesContext(connections[alias]) as statements:
        everything(alias)
    asked = [each["sql"] for each in statements if "outbox_statistic" in each["sql"]]
    assert len(asked) == 4
    for sql in asked:
        with connections[alias].cursor() as cursor:
            if alias == "postgres":
                cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
                found = list(nodes(cursor.fetchone()[0][0]["Plan"]))
                scans = [node for node in found if "Scan" in node["Node Type"]]
                assert "Seq Scan" not in {node["Node Type"] for node in scans}
                conditions = [node["Index Cond"] for node in scans if "Index Cond" in node]
                assert conditions
                assert all("name" in each and "minute" in each for each in conditions)
            else:
                cursor.execute(mysql.explain(sql))
                [row] = mysql.plan_of(cursor)
                assert (row["table"], row["type"]) == ("outbox_statistic", "range")
                assert row["key"] == "outbox_statistic_figure"


def test_the_beginning_of_steps(alias, monkeypatch):
    moment = datetime(2026, 3, 29, 0, 7, 59, tzinfo=UTC)
    monkeypatch.setattr(series, "_now", lambda using: moment)
    found = series.series(using=alias, minutes=60, step=15)
    assert [start.minute for start in found.starts] == [15, 30, 45, 0]
    assert found.starts[-1] == moment.replace(minute=0, second=0)
