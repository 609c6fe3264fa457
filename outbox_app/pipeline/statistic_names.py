"""The names of the statistics of a log, and the columns of a row of them.

Apart from what computes them, so that the admin and the table need no Spark. They are part of the
API: Parquet files, dashboards and the table ``outbox_statistic`` refer to them.
"""

from __future__ import annotations

#: Columns of a statistic, in Parquet and in the table: of what, when, what, by what, which, how
#: much.
COLUMNS = ("source", "minute", "name", "dimension", "label", "value")

#: Events of one minute: all of them, by type, by topic.
EVENTS = "events"
#: Of the streams with the most events: how many, as a share of the log, and in its busiest minute.
STREAM_EVENTS, STREAM_SHARE, STREAM_PEAK = "stream_events", "stream_share", "stream_peak"
#: Events of each partition, and the largest partition in proportion to the mean.
PARTITION_EVENTS, PARTITION_SKEW = "partition_events", "partition_skew"
#: Events of a type that were handled, that the inbox does not have, and that were handled before
#: they were recorded: two clocks disagree.
HANDLED, UNMATCHED, NEGATIVE = "handled_events", "unmatched_events", "negative_events"
#: Seconds from recorded to handled, by type.
SECONDS_MIN, SECONDS_MAX = "handled_seconds_min", "handled_seconds_max"
#: Percentiles of the same.
PERCENTILES = {
    "handled_seconds_p50": 0.5,
    "handled_seconds_p90": 0.9,
    "handled_seconds_p95": 0.95,
    "handled_seconds_p99": 0.99,
}

#: All statistics of a log.
NAMES = (
    EVENTS,
    STREAM_EVENTS,
    STREAM_SHARE,
    STREAM_PEAK,
    PARTITION_EVENTS,
    PARTITION_SKEW,
    HANDLED,
    UNMATCHED,
    NEGATIVE,
    SECONDS_MIN,
    *PERCENTILES,
    SECONDS_MAX,
)
