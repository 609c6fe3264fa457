"""The counters of the last minutes as series, for the overview, the charts and the metrics.

Every function makes a fixed number of statements, each of which reads a range of the index (name,
minute); the database adds up the processes. ``process.counters`` explains who writes the counters:
those of the last ten seconds are not in the table yet. Minutes are those of the database's clock.
``staged`` is an estimate: it goes by the ids that were given out, so it also counts jobs whose
transaction was rolled back, and counts some jobs in the minute next to theirs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Max, Q, QuerySet, Sum
from django.db.models.sql import Query
from django.utils.timezone import is_aware, make_aware

from ..entities.counting import SIZE_LABELS
from ..models import DatabaseNow, StagedJob, Statistic
from ..models.clock import stored, zone_of
from ..process import counters

MINUTE = timedelta(minutes=1)
#: Counters whose values are added up over processes.
COUNTED = (
    *(counters.PUBLISHED, counters.DEAD, counters.IMMEDIATE),
    *(counters.HANDLED, counters.FAILED),
)
#: Samples from which the number of staged jobs is estimated.
IDS = (counters.NEWEST_ID, counters.READ_ID)
#: The most entities, and the most codes of rejections, that are listed.
HOTTEST, LISTED = 10, 50
#: How long before the first minute of a series to look for the last sample of ids.
LOOK_BACK = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Series:
    """Figures by step, the oldest first; the last step is the current one and not yet over."""

    #: Beginning of each step, in UTC.
    starts: list[datetime]
    #: Per minute: jobs published, dead jobs, and jobs published right after their commit; events
    #: handled, and failed attempts.
    published: list[float]
    dead: list[float]
    immediate: list[float]
    handled: list[float]
    failed: list[float]
    #: Per minute, an estimate; None before the first sample.
    staged: list[float | None]
    #: Ready jobs: the highest sample of several processes and minutes; None without a sample.
    ready: list[float | None]


class Delays(NamedTuple):
    """Seconds from staging a job until the broker had accepted it. None: no jobs."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Commands:
    """What became of the commands to entities."""

    #: In the last full minute: commands recorded, attempts beyond the first, rejections by code.
    recorded: float = 0.0
    conflicts: float = 0.0
    rejected: dict[str, float] = field(default_factory=dict)
    #: In the last minutes: p50 and p95 of commands per batch, and of seconds per transaction.
    batch_size: tuple[float | None, ...] = (None, None)
    commit_seconds: tuple[float | None, ...] = (None, None)
    #: The entities with the most commands in the last minutes, by type and id.
    hottest: dict[str, float] = field(default_factory=dict)
    #: Commands that wait, by the last sample of each process that wrote one lately.
    waiting: float = 0.0
    #: Commands of routed types in the last full minute: passed on by another server; executed by a
    #: server that does not lead their entity.
    passed_on: float = 0.0
    elsewhere: float = 0.0


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a keeper has decided on prepared events."""

    #: Decisions in the last full minute, by outcome ("confirmed", "cancelled") and route ("call",
    #: "answer", "policy", "person").
    per_minute: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Seconds from recording an event to the decision on it, in the last minutes.
    p50: float | None = None
    p95: float | None = None


def series(*, using: str, minutes: int = 60, step: int = 1) -> Series:
    """Return the counters of the last minutes, the current one included.

    Steps begin at multiples of their length since 2000, so they do not shift as time goes on.
    """
    now = _now(using)
    width = step * MINUTE
    current = now - (now - datetime(2000, 1, 1, tzinfo=UTC)) % width
    starts = [current - width * n for n in reversed(range(max(1, math.ceil(minutes / step))))]
    found: dict[str, dict[datetime, float]] = {n: {} for n in (*COUNTED, counters.READY, *IDS)}
    last = _minute(now)
    rows = _rows(using, found, starts[0], last).values_list("name", "minute")
    utc = _to_utc(using)
    for name, minute, total, highest in rows.annotate(Sum("value"), Max("value")):
        found[name][utc(minute)] = total if name in COUNTED else highest
    staged = _staged(found, starts[0], last, using=using)

    def inside(values: dict[datetime, float], start: datetime) -> list[float]:
        each = (start + MINUTE * n for n in range(step))
        return [values[minute] for minute in each if minute in values]

    def counted(name: str) -> list[float]:
        # In the current step, only the minutes that have begun count.
        begun = [min(step, (last - start) // MINUTE + 1) for start in starts]
        return [sum(inside(found[name], start)) / n for start, n in zip(starts, begun, strict=True)]

    estimates = [inside(staged, start) for start in starts]
    figures: dict[str, Any] = {name: counted(name) for name in COUNTED}
    figures["ready"] = [max(inside(found[counters.READY], at), default=None) for at in starts]
    figures["staged"] = [sum(each) / len(each) if each else None for each in estimates]
    return Series(starts, **figures)


def rates(*, using: str) -> dict[str, float]:
    """Return the jobs published per minute by each drainer, by the id of its row.

    The period is the last complete minute and the current minute so far.
    """
    now = _now(using)
    current = _minute(now)
    rows = _rows(using, [counters.PUBLISHED], current - MINUTE, current)
    found = rows.order_by("source").values_list("source").annotate(Sum("value"))
    return {source: total / (1 + (now - current) / MINUTE) for source, total in found}


def published_by(*, using: str, minutes: int = 5) -> dict[str, dict[str, float]]:
    """Return the jobs published per minute in the last full minutes, by "task" and by "queue"."""
    first, current = _range(using, minutes + 1)
    rows = _rows(using, [counters.PUBLISHED_BY], first, current - MINUTE).order_by("label")
    found: dict[str, dict[str, float]] = {counters.TASK: {}, counters.QUEUE: {}}
    for dimension, label, total in rows.values_list("dimension", "label").annotate(Sum("value")):
        found.setdefault(dimension, {})[label] = total / minutes
    return found


def delays(*, using: str, minutes: int = 5) -> Delays:
    """Return how long the jobs of the last minutes took, the current minute included."""
    rows = _rows(using, [counters.DELAY], *_range(using, minutes)).order_by("label")
    totals = rows.filter(dimension=counters.LE).values_list("label").annotate(Sum("value"))
    return Delays(*_percentiles(dict(totals), counters.BUCKETS, 0.5, 0.95, 0.99))


def commands(aliases: Collection[str], *, minutes: int = 5) -> Commands:
    """Return figures about commands to entities on some aliases, the current minute included."""
    found: Any = defaultdict(Counter)
    lately: Any = defaultdict(Counter)
    waiting: Any = Counter()
    for using in aliases:
        first, last = _range(using, minutes)
        rows = _rows(using, counters.OF_ENTITIES, first, last)
        for name, label, total, of_full in _totals(rows, last):
            found[name][label] += total
            lately[name][label] += of_full
        samples = rows.filter(name=counters.WAITING, minute__gte=stored(last - MINUTE, using=using))
        waiting.update(dict(samples.order_by("minute").values_list("source", "value")))

    sizes = _percentiles(found[counters.BATCH_SIZE], SIZE_LABELS, 0.5, 0.95)
    return Commands(
        recorded=lately[counters.COMMANDS].total(),
        conflicts=lately[counters.CONFLICTS].total(),
        rejected={code: n for code, n in lately[counters.REJECTED].most_common(LISTED) if n},
        batch_size=tuple(size and math.ceil(size) for size in sizes),
        commit_seconds=_percentiles(found[counters.COMMIT_TIME], counters.BUCKETS, 0.5, 0.95),
        hottest=dict(found[counters.HOTTEST].most_common(HOTTEST)),
        waiting=waiting.total(),
        passed_on=lately[counters.ROUTED][counters.PASSED],
        elsewhere=lately[counters.ROUTED][counters.ELSEWHERE],
    )


def decisions(*, using: str, minutes: int = 5) -> Decisions:
    """Return the decisions on prepared events; the current minute is included."""
    first, last = _range(using, minutes)
    rows = _rows(using, [counters.DECIDED, counters.DECIDE_TIME], first, last)
    per_minute: dict[tuple[str, str], float] = {}
    times: dict[str, float] = {}
    for name, label, total, of_full in _totals(rows, last):
        if name == counters.DECIDE_TIME:
            times[label] = total
        elif of_full:
            outcome, _, route = label.partition(" ")
            per_minute[outcome, route] = of_full
    return Decisions(per_minute, *_percentiles(times, counters.BUCKETS, 0.5, 0.95))


def handled(*, using: str, minutes: int = 60) -> dict[str, list[float]]:
    """Return the events handled in each of the last minutes by subscription, the oldest first."""
    first, last = _range(using, minutes)
    rows = _rows(using, [counters.HANDLED], first, last).order_by("label", "minute")
    rows = rows.filter(dimension=counters.SUBSCRIPTION)
    found: dict[str, list[float]] = {}
    utc = _to_utc(using)
    for label, minute, total in rows.values_list("label", "minute").annotate(Sum("value")):
        # Without time zones, one hour a year occurs twice: it is taken for the first of the two.
        if 0 <= (place := (utc(minute) - first) // MINUTE) < minutes:
            found.setdefault(label, [0.0] * minutes)[place] = total
    return found


def starts(*, using: str, minutes: int = 60) -> list[datetime]:
    first, _ = _range(using, minutes)
    return [first + MINUTE * n for n in range(minutes)]


def published(*, using: str, minutes: int = 60) -> dict[str, list[float | None]]:
    """Return the events published in each of the last minutes by log (its table), the oldest first.

    This is an estimate by positions, so it counts those that were rolled back, too. None if no
    reader has taken a sample before and after.
    """
    first, last = _range(using, minutes)
    rows = _rows(using, [counters.NEWEST_POSITION], first - 10 * MINUTE, last)
    known: dict[str, list[tuple[datetime, float]]] = {}
    samples = rows.filter(dimension=counters.LOG).order_by("label", "minute")
    utc = _to_utc(using)
    for label, minute, newest in samples.values_list("label", "minute").annotate(Max("value")):
        known.setdefault(label, []).append((utc(minute), newest))
    begins = [first + MINUTE * n for n in range(minutes)]
    grown = {label: dict(_growth(each)) for label, each in known.items()}
    return {label: [each.get(minute) for minute in begins] for label, each in grown.items()}


def _rows(using: str, names: Any, first: datetime, last: datetime) -> QuerySet[Statistic]:
    """Return the rows from one minute to another, both included; a later one may have begun."""
    minutes = stored(first, using=using), stored(last, using=using)
    rows = Statistic.objects.using(using).order_by("name", "minute")
    return rows.filter(name__in=list(names), minute__range=minutes)


def _totals(rows: QuerySet[Statistic], last: datetime) -> QuerySet[Any, Any]:
    """Return name, label, total, and the total of the last full minute, in order of label."""
    full = Sum("value", filter=Q(minute=stored(last - MINUTE, using=rows.db)), default=0.0)
    totals = rows.values_list("name", "label").annotate(Sum("value"), full=full)
    return totals.order_by("label")


def _staged(
    found: dict[str, dict[datetime, float]], first: datetime, last: datetime, *, using: str
) -> dict[datetime, float]:
    """Return the estimate by minute. A sample counts as taken when its minute begins."""
    earlier = _rows(using, [counters.NEWEST_ID], first - LOOK_BACK, first - MINUTE)
    last_before = earlier.aggregate(at=Max("minute"), id=Max("value"))
    known = sorted(found[counters.NEWEST_ID].items())
    if last_before["at"] is not None:
        known.insert(0, (_to_utc(using)(last_before["at"]), last_before["id"]))
    if not known:
        return {}
    highest = max([value for _, value in known] + list(found[counters.READ_ID].values()))
    newer = StagedJob.objects.using(using).filter(id__gt=highest).aggregate(id=Max("id"))["id"]
    known.append((last + MINUTE, max(highest, newer or 0.0)))
    return {minute: growth for minute, growth in _growth(known) if first <= minute <= last}


def _growth(known: list[tuple[datetime, float]]) -> Iterator[tuple[datetime, float]]:
    """Yield each minute between samples with its growth. A lower sample counts as no growth."""
    at, highest = known[0]
    for end, value in known[1:]:
        growth = max(0.0, value - highest) / ((end - at) / MINUTE)
        while at < end:
            yield at, growth
            at += MINUTE
        highest = max(highest, value)


def _percentiles(
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


def _range(using: str, minutes: int) -> tuple[datetime, datetime]:
    last = _minute(_now(using))
    return last - MINUTE * (minutes - 1), last


def _minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


def _now(using: str) -> datetime:
    query = Query(None)  # reads no table
    query.add_annotation(DatabaseNow(), "now")
    [[now]] = query.get_compiler(using).results_iter()
    return _to_utc(using)(now)


def _to_utc(using: str) -> Callable[[datetime], datetime]:
    """Return a function for times of the database. It does not ask for their zone each time."""
    zone = zone_of(using)
    return lambda at: (at if is_aware(at) else make_aware(at, zone)).astimezone(UTC)
