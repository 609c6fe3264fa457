"""The names of a log's statistics, and the columns of their rows.

They have a module of their own, so that the admin and the table need no Spark. They are part of the
API: Parquet files, dashboards and the table ``outbox_statistic`` refer to them.
"""

from __future__ import annotations

#: The columns of a statistic in Parquet and in the table. See ``models.Statistic``.
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
