"""Statistics of a log: events per minute, hot streams, skew of partitions, times until handled.

All results have the columns of ``statistic_names``, and a row for each figure. A row is about one
minute; a figure about the whole log has the minute of its newest event. Two runs over the same
events give the same rows, and the same bytes of a file.

Percentiles are exact in rank and interpolated, of times rounded to three significant digits: at
most ten thousand values for each type are in memory, however many events there are.
``percentile_approx`` would differ from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

from pyarrow import parquet
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .statistic_names import COLUMNS, PERCENTILES

#: The columns of a log that are read.
USED = ("topic", "stream", "type", "slice", "message_id", "recorded_at")
#: How many hot streams are named.
TOP = 100
#: The number of partitions for which the skew is computed.
PARTITIONS = 8
#: How many minutes, types and topics go into the table: a day, and fifty of each.
TABLE_MINUTES, TABLE_LABELS = 24 * 60, 50
#: Other times were set by hand: infinity, or dates that do not exist (MySQL), which are NULL.
IS_MOMENT = (
    "recorded_at between timestamp'0001-01-01 00:00:00Z' and timestamp'9999-12-31 23:59:59.999999Z'"
)
#: The file that ``write_statistics`` leaves in its folder.
FILE = "statistics.parquet"


def statistics(
    events: DataFrame,
    inbox: DataFrame,
    *,
    log: str,
    partitions: int | None = None,
) -> DataFrame:
    """Return all statistics of a log, in no order. An empty log has none.

    ``events``, with the columns ``USED``, is read several times, so give a frame that does not
    change meanwhile: see ``read_once``.
    """
    parts = [
        per_minute(events),
        hot_streams(events),
        partition_skew(events, partitions=partitions or PARTITIONS),
        times_until_handled(events, inbox),
    ]
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


def hot_streams(events: DataFrame) -> DataFrame:
    """Return the streams with the most events; of streams with equally many, the first by name."""
    streams = events.groupBy(F.col("stream").alias("label")).agg(F.count("*").alias("events"))
    hot = streams.orderBy(F.desc("events"), "label").limit(TOP).crossJoin(_whole(events))
    share = F.col("events") / F.col("whole")
    return _figures(hot, "stream", stream_events=F.col("events"), stream_share=share)


def partition_skew(events: DataFrame, *, partitions: int) -> DataFrame:
    """Count the events of each partition, including empty ones, and compute the skew.

    Labels are ``3/8`` for partition 3 of 8, and ``8`` for the skew: the events of the largest
    partition, divided by the mean. 1 is best; 8 means that all events are in one of eight.
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


def times_until_handled(events: DataFrame, inbox: DataFrame) -> DataFrame:
    """Measure the time from recorded to handled, by type.

    The inbox has the events whose idempotent task was staged under their id. All others are counted
    as unmatched: they are not handled yet, or their handler records nothing. Times before the
    recording, as two clocks disagree, are part of the percentiles.
    """
    handled_at = F.min("handled_at").alias("handled_at")
    first = inbox.groupBy(F.col("job_id").alias("message_id")).agg(handled_at)
    seconds = (F.unix_micros("handled_at") - F.unix_micros("recorded_at")) / F.lit(1e6)
    times = events.join(first, "message_id", "left").select(
        F.col("type").alias("label"), seconds.alias("seconds")
    )
    unit = F.pow(F.lit(10.0), F.floor(F.log10(F.abs("seconds"))) - 2)
    rounded = F.coalesce(F.round(F.col("seconds") / unit) * unit, "seconds")  # no logarithm of 0
    counted = times.groupBy("label", rounded.alias("rounded")).agg(F.count("*").alias("events"))
    types = counted.groupBy("label").agg(
        _sum_where(F.col("rounded").isNotNull()).alias("handled"),
        _sum_where(F.col("rounded").isNull()).alias("unmatched"),
        F.percentile("rounded", [*PERCENTILES.values()], F.col("events")).alias("percentiles"),
    )
    return _figures(
        types.crossJoin(_whole(events)),
        "type",
        handled_events=F.col("handled"),
        unmatched_events=F.col("unmatched"),
        **{name: F.col("percentiles")[n] for n, name in enumerate(PERCENTILES)},
    )


@contextmanager
def read_once(events: DataFrame) -> Iterator[DataFrame]:
    """Cache the events for the block, on disk if they exceed the memory.

    So the log is read once, and all figures are of the same events. Events whose time was set by
    hand to something outside the years 1 to 9999 are left out.
    """
    kept = events.where(IS_MOMENT).persist()
    try:
        yield kept
    finally:
        kept.unpersist()


def write_statistics(frame: DataFrame, folder: str | os.PathLike[str]) -> Path:
    """Write the statistics as one Parquet file, which replaces an existing one.

    The driver writes it, as executors may have other disks, to a temporary file, and renames that.
    A killed run leaves the old file or the new one; the next run overwrites its temporary file.
    """
    target = Path(folder).resolve()
    target.mkdir(parents=True, exist_ok=True)
    beside = target / f"_{FILE}.new"  # readers ignore names that begin with _
    rows = frame.select(*COLUMNS).orderBy("name", "dimension", "label", "minute", "source")
    # Without Arrow's schema, which has the time zone of the session.
    parquet.write_table(rows.toArrow(), beside, store_schema=False)
    os.replace(beside, target / FILE)
    return target / FILE


def for_table(frame: DataFrame) -> DataFrame:
    """Return the statistics that a table can hold, however long and varied the log is.

    These are the newest minutes of the events per minute, and the types and topics with the most
    events. Types and topics that are left out still count in the totals.
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


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return statistics as tuples."""
    source, _, *others = COLUMNS
    rows = frame.select(source, F.unix_seconds("minute"), *others).collect()
    return [(name, datetime.fromtimestamp(at, UTC), *values) for name, at, *values in rows]


def _minute() -> Column:
    return F.date_trunc("minute", F.col("recorded_at")).alias("minute")


def _whole(events: DataFrame) -> DataFrame:
    """Return a row with the number of events and the newest one's minute; no row without events."""
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
