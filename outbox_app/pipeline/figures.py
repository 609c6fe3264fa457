"""The contents of a log, for the charts of a report: events over time, types, the biggest streams.

They are computed in one pass over the events. Times are in UTC, not in the zone of the session.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .statistics import IS_MOMENT

#: How many types and streams are named.
TOP = 15
#: The most days that are drawn one by one; more are drawn as months.
MOST_DAYS = 120

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Count = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    #: "hour", "day" or "month".
    unit: str
    #: All units from the first to the last, including those without events.
    over_time: list[Count]
    #: The most frequent types, and the biggest streams.
    types: list[Count]
    streams: list[Count]


def figures(events: DataFrame) -> Figures:
    hour = F.floor(F.unix_seconds("recorded_at") / 3600)
    drawn = F.when(F.expr(IS_MOMENT), hour)  # other times are not drawn
    each = {"hour": drawn.cast("string"), "type": F.col("type"), "stream": F.col("stream")}
    pairs = [F.struct(F.lit(of).alias("of"), value.alias("value")) for of, value in each.items()]
    counts = events.select(F.inline(F.array(*pairs))).groupBy("of", "value").count().persist()
    try:
        hours = counts.where("of = 'hour' and value is not null").select("value", "count").collect()
        unit, over_time = _over_time((int(row["value"]), row["count"]) for row in hours)
        return Figures(unit, over_time, _top(counts, "type"), _top(counts, "stream"))
    finally:
        counts.unpersist()


def _top(counts: DataFrame, of: str) -> list[Count]:
    rows = counts.where(F.col("of") == of).orderBy(F.desc("count"), "value").limit(TOP)
    return [(row["value"], row["count"]) for row in rows.collect()]


def _over_time(hours: Iterable[tuple[int, int]]) -> tuple[str, list[Count]]:
    counted = dict(hours)
    if not counted:
        return "day", []
    first, last = min(counted), max(counted)
    days = last // 24 - first // 24 + 1
    unit = "hour" if days == 1 else "day" if days <= MOST_DAYS else "month"
    step = 1 if unit == "hour" else 24
    drawn = range(first // step * step, last + 1, step)
    totals = dict.fromkeys((_label(hour, unit) for hour in drawn), 0)
    for hour, number in counted.items():
        totals[_label(hour, unit)] += number
    return unit, list(totals.items())


def _label(hour: int, unit: str) -> str:
    length = {"hour": 16, "day": 10, "month": 7}[unit]
    return (_EPOCH + timedelta(hours=hour)).isoformat(" ", "minutes")[:length]
