"""Statistics of a log: events per minute, hot streams, skew of partitions, times until handled.

Every result has one shape, a row a figure: the columns of ``statistic_names``. A row is about one
minute; what is about the whole log bears the minute of its newest event. Two runs over the same
events give the same rows.

Percentiles are exact in rank and interpolated, of times rounded to three significant digits: what
is kept in memory is ten thousand values a type at most, however many events there are.
``percentile_approx`` would differ from run to run. Least and greatest time are not rounded.

They go into one Parquet file, which holds all of them, is replaced as a whole, and is in one order:
the same statistics are the same bytes. Or as rows into a table, which is given what it can hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path

from pyarrow import parquet
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .statistic_names import COLUMNS, PERCENTILES

#: Columns of a log that are read. ``message_id`` is for times until handled only.
USED = ("topic", "stream", "type", "slice", "message_id", "recorded_at")
#: Hot streams that are named.
TOP = 100
#: Partitions whose skew is computed.
PARTITIONS = 8
#: Minutes, and types or topics, that go into the table: a day, and fifty of each.
TABLE_MINUTES, TABLE_LABELS = 24 * 60, 50
#: Other times were set by hand: none, as MySQL keeps dates that there are not, or infinity.
_IS_MOMENT = (
    "recorded_at between timestamp'0001-01-01 00:00:00Z' and timestamp'9999-12-31 23:59:59.999999Z'"
)
#: The file that ``write_statistics`` leaves in its folder.
FILE = "statistics.parquet"


def statistics(
    events: DataFrame,
    *,
    log: str,
    handled: DataFrame | None = None,
    top: int = TOP,
    partitions: int = PARTITIONS,
) -> DataFrame:
    """Return all statistics of a log, in no order. An empty log has none.

    The events, with the columns ``USED``, are read several times, so give frames that do not change
    meanwhile: see ``read_once``. ``handled`` says when events were handled: ``message_id``,
    ``handled_at``. Ids of anything else do no harm; of several times of an id the first one counts.
    """
    parts = [per_minute(events), hot_streams(events, top=top)]
    parts.append(partition_skew(events, partitions=partitions))
    if handled is not None:
        parts.append(times_until_handled(events, handled))
    return reduce(DataFrame.unionByName, parts).select(F.lit(log).alias("source"), *COLUMNS[1:])


def per_minute(events: DataFrame) -> DataFrame:
    """Count the events of each minute: all, by type, by topic."""
    labels = {"": F.lit(""), "type": F.col("type"), "topic": F.col("topic")}
    keys = [
        F.struct(F.lit(dimension).alias("dimension"), label.alias("label"))
        for dimension, label in labels.items()
    ]
    minutes = events.select(_minute(), F.inline(F.array(*keys)))
    counted = minutes.groupBy("minute", "dimension", "label", F.lit("events").alias("name"))
    return counted.agg(F.count("*").cast("double").alias("value"))


def hot_streams(events: DataFrame, *, top: int = TOP) -> DataFrame:
    """Name the streams with the most events; the first by name where they have as many.

    ``stream_peak`` is the number of events in the stream's busiest minute, and bears that minute.
    """
    minutes = events.groupBy("stream", _minute()).agg(F.count("*").alias("events"))
    busiest = F.min_by("minute", F.struct(-F.col("events"), F.col("minute")))
    streams = minutes.groupBy(F.col("stream").alias("label")).agg(
        F.sum("events").alias("events"), F.max("events").alias("peak"), busiest.alias("busiest")
    )
    hot = streams.orderBy(F.desc("events"), "label").limit(top).crossJoin(_whole(events))
    share = F.col("events") / F.col("whole")
    counts = _figures(hot, "stream", stream_events=F.col("events"), stream_share=share)
    peaks = hot.withColumn("newest", F.col("busiest"))
    return counts.unionByName(_figures(peaks, "stream", stream_peak=F.col("peak")))


def partition_skew(events: DataFrame, *, partitions: int = PARTITIONS) -> DataFrame:
    """Count the events of each partition, those without any too, and compare the largest.

    Labels are ``3/8`` for partition 3 of 8, and ``8`` for the skew of all: the events of the
    largest partition, divided by the mean. 1 is best, 8 is everything in one of eight.
    """
    counted = events.groupBy((F.col("slice") % partitions).cast("bigint").alias("id")).count()
    numbers = events.sparkSession.range(partitions)
    each = numbers.join(counted, "id", "left").select(
        F.concat_ws("/", "id", F.lit(partitions)).alias("label"),
        F.coalesce("count", F.lit(0)).alias("events"),
    )
    whole = _whole(events)
    all_of_them = F.lit(str(partitions)).alias("label")
    skew = each.groupBy(all_of_them).agg((F.max("events") / F.avg("events")).alias("skew"))
    counts = _figures(each.crossJoin(whole), "partition", partition_events=F.col("events"))
    return counts.unionByName(
        _figures(skew.crossJoin(whole), "partitions", partition_skew=F.col("skew"))
    )


def times_until_handled(events: DataFrame, handled: DataFrame) -> DataFrame:
    """Measure the time from recorded to handled, by type.

    An event without a time is counted as unmatched: not handled yet, or by something that leaves no
    note. A time before the event was recorded is counted, and is part of all other figures.
    """
    first = handled.groupBy("message_id").agg(F.min("handled_at").alias("handled_at"))
    seconds = (F.unix_micros("handled_at") - F.unix_micros("recorded_at")) / F.lit(1e6)
    times = events.join(first, "message_id", "left").select(
        F.col("type").alias("label"), seconds.alias("seconds")
    )
    unit = F.pow(F.lit(10.0), F.floor(F.log10(F.abs("seconds"))) - 2)
    rounded = F.coalesce(F.round(F.col("seconds") / unit) * unit, "seconds")  # no logarithm of 0
    ends = F.min("seconds").alias("least"), F.max("seconds").alias("most")
    counted = times.groupBy("label", rounded.alias("rounded")).agg(
        F.count("*").alias("events"), *ends
    )
    types = counted.groupBy("label").agg(
        _sum_where(F.col("rounded").isNotNull()).alias("handled"),
        _sum_where(F.col("rounded").isNull()).alias("unmatched"),
        _sum_where(F.col("rounded") < 0).alias("negative"),
        F.min("least").alias("least"),
        F.max("most").alias("most"),
        F.percentile("rounded", [*PERCENTILES.values()], F.col("events")).alias("percentiles"),
    )
    return _figures(
        types.crossJoin(_whole(events)),
        "type",
        handled_events=F.col("handled"),
        unmatched_events=F.col("unmatched"),
        negative_events=F.col("negative"),
        handled_seconds_min=F.col("least"),
        handled_seconds_max=F.col("most"),
        **{name: F.col("percentiles")[n] for n, name in enumerate(PERCENTILES)},
    )


def handled_in_inbox(inbox: DataFrame) -> DataFrame:
    """Return when events were handled by idempotent tasks, from the table ``outbox_inbox``.

    For events whose task was staged under their id: ``task_id=str(event.message_id)``.
    """
    return inbox.select(F.col("job_id").alias("message_id"), "handled_at")


@contextmanager
def read_once(events: DataFrame) -> Iterator[DataFrame]:
    """Keep what is needed of the events while the block runs, on disk where memory ends.

    The log is then read once, and every figure is of the same events. One whose time was set by
    hand to no moment of the years 1 to 9999 is left out.
    """
    names = [name for name in USED if name in events.columns]
    kept = events.where(_IS_MOMENT).select(*names).persist()
    try:
        yield kept
    finally:
        kept.unpersist()


def write_statistics(frame: DataFrame, folder: str | os.PathLike[str]) -> Path:
    """Write the statistics as one Parquet file, in place of the one that is there.

    The driver writes it, as executors may have other disks: beside, then renamed. A run that is
    killed leaves the old file or the new one, and the next run writes over what it left beside.
    """
    target = Path(folder).resolve()
    target.mkdir(parents=True, exist_ok=True)
    beside = target / f"_{FILE}.new"  # readers pass over names that begin so
    rows = frame.select(*COLUMNS).orderBy("name", "dimension", "label", "minute", "source")
    # Without Arrow's schema, which has the time zone of the session.
    parquet.write_table(rows.toArrow(), beside, store_schema=False)
    os.replace(beside, target / FILE)
    return target / FILE


def for_table(frame: DataFrame) -> DataFrame:
    """Return of the statistics what a table can hold, however long and varied the log is.

    Of the events per minute the newest minutes; of types and topics those with the most events:
    what goes is still part of the events of all types and topics.
    """
    counts = frame.where("name = 'events'")
    end = counts.agg(F.unix_seconds(F.max("minute")).alias("end"))
    totals = counts.groupBy("dimension", "label").agg(F.sum("value").alias("total"))
    most = Window.partitionBy("dimension").orderBy(F.desc("total"), "label")
    is_kept = F.row_number().over(most) <= TABLE_LABELS
    kept = totals.select("dimension", "label", is_kept.alias("kept"))
    is_recent = F.unix_seconds("minute") > F.col("end") - 60 * TABLE_MINUTES
    return (
        frame.join(kept, ["dimension", "label"], "left")
        .crossJoin(end)
        .where((F.col("name") != "events") | is_recent)
        .where(~F.col("dimension").isin("type", "topic") | F.col("kept"))
        .select(*COLUMNS)
    )


def rows_of(frame: DataFrame) -> Iterator[tuple[str, datetime, str, str, str, float]]:
    """Yield statistics as tuples, a part of the frame at a time; all are computed first."""
    source, _, *others = COLUMNS
    kept = frame.select(source, F.unix_seconds("minute"), *others).persist()
    try:
        kept.count()
        for source, seconds, *values in kept.toLocalIterator():
            yield source, datetime.fromtimestamp(seconds, UTC), *values
    finally:
        kept.unpersist()


def _minute() -> Column:
    return F.date_trunc("minute", F.col("recorded_at")).alias("minute")


def _whole(events: DataFrame) -> DataFrame:
    """One row: the number of all events, and the minute of the newest one. None where none are."""
    whole = events.agg(F.count("*").alias("whole"), F.max(_minute()).alias("newest"))
    return whole.where(F.col("whole") > 0)


def _sum_where(condition: Column) -> Column:
    return F.sum(F.when(condition, F.col("events")).otherwise(0))


def _figures(frame: DataFrame, dimension: str, **figures: Column) -> DataFrame:
    pairs = [
        F.struct(F.lit(name).alias("name"), value.cast("double").alias("value"))
        for name, value in figures.items()
    ]
    about = [F.col("newest").alias("minute"), F.lit(dimension).alias("dimension"), F.col("label")]
    return frame.select(*about, F.inline(F.array(*pairs))).where("value is not null")
