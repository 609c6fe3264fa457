"""The contents of a log, for the charts of a report: events per day, types, the biggest streams.

They are computed in one pass over the events. Days are in UTC, not in the zone of the session.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .statistics import IS_MOMENT

#: How many types and streams are named.
TOP = 15
#: How many days are drawn, the newest. Days without events are left out.
DAYS = 60

Count = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    #: The newest days with events, in their order.
    days: list[Count]
    #: The most frequent types, and the biggest streams.
    types: list[Count]
    streams: list[Count]


def figures(events: DataFrame) -> Figures:
    day = F.date_from_unix_date(F.floor(F.unix_seconds("recorded_at") / 86400).cast("int"))
    drawn = F.when(F.expr(IS_MOMENT), day)  # other times are not drawn
    each = {"day": drawn.cast("string"), "type": F.col("type"), "stream": F.col("stream")}
    pairs = [F.struct(F.lit(of).alias("of"), value.alias("value")) for of, value in each.items()]
    counts = events.select(F.inline(F.array(*pairs))).groupBy("of", "value").count().persist()
    try:
        days = _first(counts.where("value is not null"), "day", DAYS, F.desc("value"))
        frequent = F.desc("count"), "value"
        types, streams = (_first(counts, of, TOP, *frequent) for of in ("type", "stream"))
        return Figures(days[::-1], types, streams)
    finally:
        counts.unpersist()


def _first(counts: DataFrame, of: str, limit: int, *order: Column | str) -> list[Count]:
    rows = counts.where(F.col("of") == of).orderBy(*order).limit(limit)
    return [(row["value"], row["count"]) for row in rows.collect()]
