"""Statistics of a log: events per minute, hot streams, skew of partitions, times until handled.

All results have the columns ``COLUMNS``, and a row for each figure. A row is about one minute; a
figure about the whole log has the minute of its newest event. Two runs over the same events give
the same rows, and the same bytes of a file.

Percentiles are exact in rank and interpolated, of times rounded to three significant digits: at
most ten thousand values for each type are in memory, however many events there are.
``percentile_approx`` would differ from run to run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyarrow import parquet
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

#: The columns of a statistic. These and the names are part of the API: files and dashboards refer
#: to them.
COLUMNS = ("source", "minute", "name", "dimension", "label", "value")
#: All statistics of a log.
NAMES = (
    # Events of one minute: all of them, by type, by topic.
    "events",
    # Events of the busiest streams: in all, and as a share of the log.
    *("stream_events", "stream_share"),
    # Events of each partition, and the largest partition in proportion to the mean.
    *("partition_events", "partition_skew"),
    # Events of a type that were handled, and that the inbox does not have.
    *("handled_events", "unmatched_events"),
    # Percentiles of the seconds from recorded to handled, by type.
    *(f"handled_seconds_p{percent}" for percent in (50, 90, 95, 99)),
)
#: The columns of a log that are read.
USED = ("topic", "stream", "type", "slice", "message_id", "recorded_at")
#: How many hot streams are named.
TOP = 100
#: The number of partitions for which the skew is computed.
PARTITIONS = 8
#: Other times were set by hand: infinity, or dates that do not exist (MySQL), which are NULL.
IS_MOMENT = (
    "recorded_at between timestamp'0001-01-01 00:00:00Z' and timestamp'9999-12-31 23:59:59.999999Z'"
)
#: The file that ``write_statistics`` leaves in its folder.
FILE = "statistics.parquet"

_STATISTICS = """
WITH whole AS (
    SELECT count(*) AS whole, max(date_trunc('minute', recorded_at)) AS newest
    FROM {events} HAVING count(*) > 0
), hot AS (
    SELECT stream AS label, count(*) AS events
    FROM {events} GROUP BY stream ORDER BY events DESC, label LIMIT {top}
), sliced AS (
    SELECT slice % {parts} AS id, count(*) AS events FROM {events} GROUP BY 1
), parts AS (
    SELECT id, coalesce(events, 0) AS events FROM range({parts}) LEFT JOIN sliced USING (id)
), handled AS (
    SELECT job_id AS message_id, min(handled_at) AS handled_at FROM {inbox} GROUP BY job_id
), times AS (
    SELECT type AS label, (unix_micros(handled_at) - unix_micros(recorded_at)) / 1e6D AS seconds
    FROM {events} LEFT JOIN handled USING (message_id)
), units AS (
    SELECT *, pow(10D, floor(log10(abs(seconds))) - 2) AS unit FROM times
), rounded AS (  -- there is no logarithm of 0
    SELECT label, coalesce(round(seconds / unit) * unit, seconds) AS seconds, count(*) AS events
    FROM units GROUP BY 1, 2
), types AS (
    SELECT label, sum(if(seconds IS NULL, 0, events)) AS handled,
        sum(if(seconds IS NULL, events, 0)) AS unmatched,
        percentile(seconds, array(0.5D, 0.9D, 0.95D, 0.99D), events) AS p
    FROM rounded GROUP BY label
)
SELECT date_trunc('minute', recorded_at) AS minute, 'events' AS name, dimension, label,
    double(count(*)) AS value
FROM {events} LATERAL VIEW
    stack(3, '', '', 'type', type, 'topic', topic) AS dimension, label
GROUP BY 1, 3, 4
UNION ALL
SELECT newest, name, 'stream', label, value FROM hot CROSS JOIN whole LATERAL VIEW
    stack(2, 'stream_events', double(events), 'stream_share', events / whole) AS name, value
UNION ALL
SELECT newest, 'partition_events', 'partition', concat_ws('/', id, {parts}), double(events)
FROM parts CROSS JOIN whole
UNION ALL
SELECT newest, 'partition_skew', 'partitions', string({parts}), max(events) / avg(events)
FROM parts CROSS JOIN whole GROUP BY newest
UNION ALL
SELECT newest, name, 'type', label, value FROM types CROSS JOIN whole LATERAL VIEW
    stack(6, 'handled_events', double(handled), 'unmatched_events', double(unmatched),
        'handled_seconds_p50', p[0], 'handled_seconds_p90', p[1],
        'handled_seconds_p95', p[2], 'handled_seconds_p99', p[3]) AS name, value
WHERE value IS NOT NULL
"""


def statistics(
    events: DataFrame,
    inbox: DataFrame,
    *,
    log: str,
    partitions: int | None = None,
) -> DataFrame:
    """Return all statistics of a log, in no order. An empty log has none.

    ``events``, with the columns ``USED``, is read several times, so give a frame that does not
    change meanwhile, as ``persist()`` makes it. Events whose time was set by hand to something
    outside the years 1 to 9999 are left out.

    - Of minutes: the events, in all, by type, and by topic.
    - Of streams: those with the most events; of equally many, the first by name.
    - Of ``partitions``: the events of each (``3/8`` is partition 3 of 8), and the skew: the events
      of the largest, divided by the mean. 1 is best; 8 means that all are in one of eight.
    - Of types: the time from recorded to handled. The inbox has the events whose idempotent task
      was staged under their id. All others are unmatched: they are not handled yet, or their
      handler records nothing. Times below 0, as two clocks disagree, count in the percentiles.
    """
    params = {"inbox": inbox, "parts": partitions or PARTITIONS, "top": TOP}
    found = _queried(_STATISTICS, events, events=events.where(IS_MOMENT), **params)
    return found.select(F.lit(log).alias("source"), *COLUMNS[1:])


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


def _queried(sql: str, frame: DataFrame, /, **params: Any) -> DataFrame:
    found = frame.sparkSession.sql(sql, **params)
    if frame.is_cached:  # sql() has dropped the cache, with its view
        frame.persist()
    return found
