"""Statistics of random events, compared with figures counted by hand; and their file."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from math import ceil, floor
from uuid import UUID

import duckdb
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from outbox_app.events.log.newevent import slice_of
from outbox_app.pipeline import statistics as module
from outbox_app.pipeline.statistics import (
    COLUMNS,
    NAMES,
    statistics,
    write_statistics,
)

LOG = "outbox_event"
TOP, PARTITIONS = 10, 7
PERCENTILES = {f"handled_seconds_p{percent}": percent / 100 for percent in (50, 90, 95, 99)}
SCHEMA = (
    "topic string, stream string, type string, slice int, message_id string, recorded_at timestamp"
)
INBOX = "job_id string, handled_at timestamp"
FRAME = "source string, minute timestamp, name string, dimension string, label string, value double"
START = datetime(2026, 3, 28, 23, 40, tzinfo=UTC)
STREAMS = ["a", "A", "a ", "ä", "😀", "", *(f"order-{n}" for n in range(60))]


def event(stream, recorded_at, *, type="Made", topic="", id=0):
    return topic, stream, type, slice_of(stream), str(UUID(int=id)), recorded_at


def random_events(count=3000):
    """Events, most of them in few streams, and when they were handled, if at all."""
    rng = random.Random(4)
    events, handled = [], []
    for id in range(count):
        stream = STREAMS[min(int(rng.expovariate(0.08)), len(STREAMS) - 1)]
        at = START + timedelta(microseconds=rng.randrange(40 * 60 * 10**6))
        type, topic = rng.choice(["Made", "made", "Paid", "Gone"]), rng.choice(["", "eu", "us"])
        events.append(event(stream, at, type=type, topic=topic, id=id))
        if type != "Gone" and rng.random() < 0.8:
            seconds = rng.choice([0, -rng.random(), rng.expovariate(1), rng.expovariate(0.001)])
            handled.append((str(UUID(int=id)), at + timedelta(seconds=seconds)))
            if rng.random() < 0.1:  # once more, later
                handled.append((str(UUID(int=id)), handled[-1][1] + timedelta(days=1)))
    return events, [*handled, ("a task of its own", START)]


EVENTS, TIMES = random_events()
NEWEST = max(row[5] for row in EVENTS).replace(second=0, microsecond=0)


def figures(frame):
    """The rows of a frame, by all columns but the source and the value; none is there twice."""
    return by_key(frame.toArrow())


def by_key(table):
    rows = [tuple(row[name] for name in COLUMNS[1:]) for row in table.to_pylist()]
    found = {row[:-1]: row[-1] for row in rows}
    assert len(found) == len(rows)
    return found


def named(result, name):
    return {key[0:1] + key[2:]: value for key, value in result.items() if key[1] == name}


@pytest.fixture(scope="module", autouse=True)
def few_streams():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOP", TOP)
        yield


@pytest.fixture(scope="module")
def events(spark):
    found = spark.createDataFrame(EVENTS, SCHEMA).persist()
    yield found
    found.unpersist()


@pytest.fixture
def inbox(spark):
    """An inbox that has no event."""
    return spark.createDataFrame([], INBOX)


@pytest.fixture(scope="module")
def frame(spark, events):
    handled = spark.createDataFrame(TIMES, INBOX)
    found = statistics(events, handled, log=LOG, partitions=PARTITIONS).persist()
    yield found
    found.unpersist()


@pytest.fixture(scope="module")
def result(frame):
    return figures(frame)


def test_columns_and_names(frame, result):
    assert tuple(frame.columns) == COLUMNS
    assert {row.source for row in frame.collect()} == {LOG}
    assert {key[1] for key in result} == set(NAMES)


def test_events_per_minute_type_and_topic(result):
    expected = Counter()
    for topic, _, type, _, _, at in EVENTS:
        minute = at.replace(second=0, microsecond=0)
        for key in (("", ""), ("type", type), ("topic", topic)):
            expected[minute, *key] += 1
    assert named(result, "events") == expected


def test_hot_streams(result):
    expected = Counter(row[1] for row in EVENTS)
    hot = sorted(expected, key=lambda stream: (-expected[stream], stream))[:TOP]
    at_end = [(NEWEST, "stream", stream) for stream in hot]
    assert named(result, "stream_events") == {key: expected[key[2]] for key in at_end}
    assert named(result, "stream_share") == {key: expected[key[2]] / len(EVENTS) for key in at_end}


def test_partition_skew(result):
    expected = Counter(row[3] % PARTITIONS for row in EVENTS)
    assert named(result, "partition_events") == {
        (NEWEST, "partition", f"{part}/{PARTITIONS}"): expected[part] for part in range(PARTITIONS)
    }
    [(key, skew)] = named(result, "partition_skew").items()
    assert key == (NEWEST, "partitions", str(PARTITIONS))
    assert skew == pytest.approx(max(expected.values()) * PARTITIONS / len(EVENTS))


def test_partitions_without_events_are_told(spark, inbox):
    events = spark.createDataFrame([event("a", START)] * 3, SCHEMA)
    result = figures(statistics(events, inbox, log=LOG, partitions=4))
    assert sorted(named(result, "partition_events").values()) == [0, 0, 0, 3]
    assert [*named(result, "partition_skew").values()] == [4]


def test_times_until_handled(result):
    first = {}
    for id, at in sorted(TIMES, reverse=True):
        first[id] = at
    times = defaultdict(list)
    for *_, type, _, id, at in EVENTS:
        times[type].append((first[id] - at).total_seconds() if id in first else None)
    for type, seconds in times.items():
        known = sorted(second for second in seconds if second is not None)
        of_type = {key[1]: value for key, value in result.items() if key[2:] == ("type", type)}
        of_type.pop("events")
        assert of_type.pop("handled_events") == len(known)
        assert of_type.pop("unmatched_events") == len(seconds) - len(known)
        if not known:
            assert of_type == {}, "no figure of nothing"
            continue
        assert any(second < 0 for second in known)
        assert set(of_type) == set(PERCENTILES)
        for name, part in PERCENTILES.items():
            place = part * (len(known) - 1)
            low, high = known[floor(place)], known[ceil(place)]
            expected = low + (high - low) * (place - floor(place))
            assert of_type[name] == pytest.approx(expected, rel=0.005), name
    assert {key[0] for key in result if key[1].startswith("handled")} == {NEWEST}


def test_percentiles_keep_three_digits_of_times_of_every_size(spark):
    seconds = [0.0, 0.000123, -0.00123, 1.2345, 123456.0, -98765.4]
    events = [event("a", START, type=str(id), id=id) for id in range(len(seconds))]
    handled = [
        (row[4], START + timedelta(seconds=each)) for row, each in zip(events, seconds, strict=True)
    ]
    result = figures(
        statistics(
            spark.createDataFrame(events, SCHEMA), spark.createDataFrame(handled, INBOX), log=LOG
        )
    )
    median = {key[2]: value for key, value in named(result, "handled_seconds_p50").items()}
    expected = [0.0, 0.000123, -0.00123, 1.23, 123000.0, -98800.0]
    assert [median[str(id)] for id in range(len(seconds))] == pytest.approx(expected, rel=1e-9)


def test_of_equals_the_first_streams_count(spark, inbox, monkeypatch):
    monkeypatch.setattr(module, "TOP", 2)
    events = spark.createDataFrame([event(stream, START) for stream in "cab"], SCHEMA)
    result = figures(statistics(events, inbox, log=LOG))
    assert [key[2] for key in sorted(named(result, "stream_events"))] == ["a", "b"]


def test_an_empty_log_has_none(spark, inbox, tmp_path):
    frame = statistics(spark.createDataFrame([], SCHEMA), inbox, log=LOG)
    assert pq.read_table(write_statistics(frame, tmp_path)).num_rows == 0


def test_minutes_are_in_utc_wherever_the_driver_is(spark, frame, tmp_path, monkeypatch):
    """In Berlin the hour from 02:00 comes twice, or never."""
    file = write_statistics(frame, tmp_path).read_bytes()
    assert by_key(pq.read_table(tmp_path)) == figures(frame)
    zone = "spark.sql.session.timeZone"
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    spark.conf.set(zone, "Asia/Kolkata")
    try:
        assert write_statistics(frame, tmp_path).read_bytes() == file
    finally:
        spark.conf.set(zone, "UTC")
        monkeypatch.undo()
        time.tzset()


def test_the_log_is_read_once(spark, inbox):
    read = spark.sparkContext.accumulator(0)

    @F.udf("string", useArrow=False)
    def counted(text):
        read.add(1)
        return text

    events = spark.createDataFrame(EVENTS[:50], SCHEMA).repartition(2)
    kept = events.withColumn("type", counted("type")).persist()
    assert figures(statistics(kept, inbox, log=LOG))
    assert read.value == 50
    kept.unpersist()


def test_times_that_were_set_by_hand_are_left_out(spark, inbox):
    events = spark.createDataFrame([event("a", START, id=1)], SCHEMA)
    one = figures(statistics(events, inbox, log=LOG))
    for moment in ("null", "timestamp_micros(9223372036854775807L)", "timestamp'-0044-03-15'"):
        events = events.unionByName(events.limit(1).withColumn("recorded_at", F.expr(moment)))
    assert events.count() > 1
    assert figures(statistics(events, inbox, log=LOG)) == one


class TestTheFile:
    def test_others_read_it(self, frame, result, tmp_path):
        path = write_statistics(frame, tmp_path / "new" / "100 % of #1 [x]")
        assert [each.name for each in path.parent.iterdir()] == ["statistics.parquet"]
        rows = pq.read_table(path.parent).to_pylist()
        assert [*rows[0]] == [*COLUMNS]
        keys = [(*(row[name] for name in COLUMNS[1:-1]),) for row in rows]
        assert {key: row["value"] for key, row in zip(keys, rows, strict=True)} == result
        places = [(name, dimension, label, minute) for minute, name, dimension, label in keys]
        assert places == sorted(places)
        connection = duckdb.connect()
        [(count, total)] = connection.execute(
            f"SELECT count(*), sum(value) FILTER (name = 'events' AND dimension = '') FROM '{path}'"
        ).fetchall()
        assert (count, total) == (len(result), len(EVENTS))

    def test_the_driver_writes_it(self, spark, tmp_path):
        """Executors may be on machines with disks of their own."""
        frame = spark.createDataFrame([(LOG, START, "events", "", "", 1.0)], FRAME)
        spark.conf.set("fs.file.impl", "executors.HaveNoFolder")
        spark.conf.set("fs.file.impl.disable.cache", "true")
        try:
            assert pq.read_table(write_statistics(frame, tmp_path)).num_rows == 1
        finally:
            spark.conf.unset("fs.file.impl")
            spark.conf.unset("fs.file.impl.disable.cache")

    def test_twice_is_the_same(self, spark, frame, tmp_path):
        first = write_statistics(frame, tmp_path).read_bytes()
        events = spark.createDataFrame(EVENTS[::-1], SCHEMA).repartition(3)
        handled = spark.createDataFrame(TIMES[::-1], INBOX)
        again = statistics(events, handled, log=LOG, partitions=PARTITIONS)
        assert write_statistics(again, tmp_path).read_bytes() == first

    def test_a_failed_run_leaves_the_old_one(self, spark, frame, tmp_path, monkeypatch):
        path = write_statistics(frame, tmp_path)
        old = path.read_bytes()
        broken = frame.withColumn("value", F.raise_error(F.lit("disk full")).cast("double"))
        with pytest.raises(Exception, match="disk full"):
            write_statistics(broken, tmp_path)
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_bytes() == old

    def test_what_a_killed_run_left_is_passed_over_and_removed(self, spark, tmp_path, monkeypatch):
        rows = [(LOG, START, "events", "", "", 1.0)]
        frame = spark.createDataFrame(rows, FRAME)
        path = write_statistics(frame, tmp_path)
        with monkeypatch.context() as patch:
            # Killed just before the new file takes the place of the old one.
            patch.setattr(module.os, "replace", lambda *paths: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                write_statistics(frame.withColumn("value", F.lit(2.0)), tmp_path)
        assert len([*tmp_path.iterdir()]) == 2
        assert pq.read_table(tmp_path)["value"].to_pylist() == [1.0]
        write_statistics(frame.withColumn("value", F.lit(3.0)), tmp_path)
        assert [*tmp_path.iterdir()] == [path]
        assert pq.read_table(path)["value"].to_pylist() == [3.0]
