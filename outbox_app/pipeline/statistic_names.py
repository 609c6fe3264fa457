"""The names of the statistics of a log, and the columns of a row of them.

Apart from what computes them, so that the admin and the table need no Spark. They are part of the
API: Parquet files, dashboards and the table ``outbox_statistic`` refer to them.
"""

from __future__ import annotations

#: Columns of a statistic, in Parquet and in the table: of what, when, what, by what, which, how
#: much.
COLUMNS = ("source", "minute", "name", "dimension", "label", "value")

#: Percentiles of the seconds from recorded to handled, by type.
PERCENTILES = {f"handled_seconds_p{percent}": percent / 100 for percent in (50, 90, 95, 99)}

#: All statistics of a log.
NAMES = (
    # Events of one minute: all of them, by type, by topic.
    "events",
    # Of the streams with the most events: how many, as a share of the log, and in its busiest
    # minute.
    *("stream_events", "stream_share", "stream_peak"),
    # Events of each partition, and the largest partition in proportion to the mean.
    *("partition_events", "partition_skew"),
    # Events of a type that were handled, that the inbox does not have, and that were handled before
    # they were recorded: two clocks disagree.
    *("handled_events", "unmatched_events", "negative_events"),
    # Seconds from recorded to handled, by type.
    *("handled_seconds_min", *PERCENTILES, "handled_seconds_max"),
)
