"""Where statistics go: into one Parquet file, or as rows into a table.

The file holds all there is, is replaced as a whole, and is in one order: the same statistics are
the same bytes. A table gets what it can hold.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from .statistic_names import COLUMNS, EVENTS

#: Minutes, and types or topics, that go into the table: a day, and fifty of each.
TABLE_MINUTES, TABLE_LABELS = 24 * 60, 50
#: The file that ``write_statistics`` leaves in its folder.
FILE = "statistics.parquet"


def write_statistics(frame: DataFrame, folder: str | os.PathLike[str]) -> Path:
    """Write the statistics as one Parquet file, in place of the one that is there.

    It is written beside and renamed. A run that is killed leaves the old file or the new one, and
    what it left beside is removed by the next run.
    """
    target = Path(folder).resolve()
    target.mkdir(parents=True, exist_ok=True)
    beside = target / f"_{FILE}.new"  # readers pass over names that begin so
    one = frame.select(*COLUMNS).repartition(1)
    try:
        one.sortWithinPartitions("name", "dimension", "label", "minute", "source").write.parquet(
            f"file://{beside}", mode="overwrite"
        )
        [part] = beside.glob("part-*.parquet")
        os.replace(part, target / FILE)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target / FILE


def for_table(
    frame: DataFrame, *, minutes: int = TABLE_MINUTES, labels: int = TABLE_LABELS
) -> DataFrame:
    """Return of the statistics what a table can hold, however long and varied the log is.

    Args:
        frame: What ``statistics`` returned, or was written by ``write_statistics``.
        minutes: How many, up to the newest event, are kept of the events per minute.
        labels: How many types and topics are kept, those with the most events. What goes is still
            part of the events of all types and topics.
    """
    counts = frame.where(F.col("name") == EVENTS)
    end = counts.agg(F.unix_seconds(F.max("minute")).alias("end"))
    totals = counts.groupBy("dimension", "label").agg(F.sum("value").alias("total"))
    most = Window.partitionBy("dimension").orderBy(F.desc("total"), "label")
    kept = totals.select("dimension", "label", (F.row_number().over(most) <= labels).alias("kept"))
    is_recent = F.unix_seconds("minute") > F.col("end") - 60 * minutes
    return (
        frame.join(kept, ["dimension", "label"], "left")
        .crossJoin(end)
        .where((F.col("name") != EVENTS) | is_recent)
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
