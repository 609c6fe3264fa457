"""The counters of the last minutes as series, for the overview, the charts and the metrics.

Every function makes a fixed number of statements, each of which reads a range of the index (name,
minute); the database adds up the processes. ``process.counters`` explains who writes the counters:
those of the last ten seconds are not in the table yet. Minutes are those of the database's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Max, Q, QuerySet, Sum
from django.db.models.sql import Query
from django.utils.timezone import is_aware, make_aware

from ..database.clock import DatabaseNow, stored, zone_of
from ..models import Statistic
from ..process import counters

MINUTE = timedelta(minutes=1)
#: Counters whose values are added up over processes.
COUNTED = (counters.PUBLISHED, counters.DEAD, counters.IMMEDIATE)


@dataclass(frozen=True, slots=True)
class Series:
    """Figures by step, the oldest first; the last step is the current one and not yet over."""

    #: Beginning of each step, in UTC.
    starts: list[datetime]
    #: Per minute: jobs published, dead jobs, and jobs published right after their commit.
    published: list[float]
    dead: list[float]
    immediate: list[float]
    #: Ready jobs: the highest sample of several processes and minutes; None without a sample.
    ready: list[float | None]


class Delays(NamedTuple):
    """Seconds from staging a job until the broker had accepted it. None: no jobs."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


def series(*, using: str, minutes: int = 60, step: int = 1) -> Series:
    """Return the counters of the last minutes, the current one included.

    Steps begin at multiples of their length since 2000, so they do not shift as time goes on.
    """
    now = _now(using)
    width = step * MINUTE
    current = now - (now - datetime(2000, 1, 1, tzinfo=UTC)) % width
    starts = [current - width * n for n in reversed(range(max(1, math.ceil(minutes / step))))]
    found: dict[str, dict[datetime, float]] = {n: {} for n in (*COUNTED, counters.READY)}
    last = _minute(now)
    rows = rows_of(using, found, starts[0], last).values_list("name", "minute")
    utc = to_utc(using)
    for name, minute, total, highest in rows.annotate(Sum("value"), Max("value")):
        found[name][utc(minute)] = total if name in COUNTED else highest

    def inside(values: dict[datetime, float], start: datetime) -> list[float]:
        each = (start + MINUTE * n for n in range(step))
        return [values[minute] for minute in each if minute in values]

    def counted(name: str) -> list[float]:
        # In the current step, only the minutes that have begun count.
        begun = [min(step, (last - start) // MINUTE + 1) for start in starts]
        return [sum(inside(found[name], start)) / n for start, n in zip(starts, begun, strict=True)]

    figures: dict[str, Any] = {name: counted(name) for name in COUNTED}
    figures["ready"] = [max(inside(found[counters.READY], at), default=None) for at in starts]
    return Series(starts, **figures)


def rates(*, using: str) -> dict[str, float]:
    """Return the jobs published per minute by each drainer, by the id of its row.

    The period is the last complete minute and the current minute so far.
    """
    now = _now(using)
    current = _minute(now)
    rows = rows_of(using, [counters.PUBLISHED], current - MINUTE, current)
    found = rows.order_by("source").values_list("source").annotate(Sum("value"))
    return {source: total / (1 + (now - current) / MINUTE) for source, total in found}


def delays(*, using: str, minutes: int = 5) -> Delays:
    """Return how long the jobs of the last minutes took, the current minute included."""
    rows = rows_of(using, [counters.DELAY], *last_minutes(using, minutes)).order_by("label")
    totals = rows.filter(dimension=counters.LE).values_list("label").annotate(Sum("value"))
    return Delays(*percentiles(dict(totals), counters.BUCKETS, 0.5, 0.95, 0.99))


def rows_of(using: str, names: Any, first: datetime, last: datetime) -> QuerySet[Statistic]:
    """Return the rows from one minute to another, both included; a later one may have begun."""
    minutes = stored(first, using=using), stored(last, using=using)
    rows = Statistic.objects.using(using).order_by("name", "minute")
    return rows.filter(name__in=list(names), minute__range=minutes)


def totals(rows: QuerySet[Statistic], last: datetime) -> QuerySet[Any, Any]:
    """Return name, label, total, and the total of the last full minute, in order of label."""
    full = Sum("value", filter=Q(minute=stored(last - MINUTE, using=rows.db)), default=0.0)
    totals = rows.values_list("name", "label").annotate(Sum("value"), full=full)
    return totals.order_by("label")


def percentiles(
    found: Mapping[str, float], labels: Iterable[str], *parts: float
) -> tuple[float | None, ...]:
    """Return percentiles of counts by bucket (its upper bound), even of another version."""
    counts = dict.fromkeys(map(float, labels), 0.0)
    counts |= {float(label): count for label, count in found.items()}
    return tuple(_percentile(sorted(counts.items()), part) for part in parts)


def _percentile(buckets: list[tuple[float, float]], part: float) -> float | None:
    """Return one percentile, interpolated within its bucket."""
    wanted = part * sum(count for _, count in buckets)
    below = 0.0
    for upper, count in buckets:
        if count and wanted <= count:
            return below if math.isinf(upper) else below + (upper - below) * wanted / count
        wanted -= count
        below = below if math.isinf(upper) else upper
    return None


def last_minutes(using: str, minutes: int) -> tuple[datetime, datetime]:
    last = _minute(_now(using))
    return last - MINUTE * (minutes - 1), last


def _minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


def _now(using: str) -> datetime:
    query = Query(None)  # reads no table
    query.add_annotation(DatabaseNow(), "now")
    [[now]] = query.get_compiler(using).results_iter()
    return to_utc(using)(now)


def to_utc(using: str) -> Callable[[datetime], datetime]:
    """Return a function for times of the database. It does not ask for their zone each time."""
    zone = zone_of(using)
    return lambda at: (at if is_aware(at) else make_aware(at, zone)).astimezone(UTC)
