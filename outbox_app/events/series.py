"""The counters of events in the last minutes: handled, failed and published ones.

Subscriptions count what they handle. Readers take samples of the newest positions, from which the
number of published events is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Max, Sum

from ..monitoring.series import MINUTE, last_minutes, rows_of, to_utc

#: Handled events and failed attempts of a subscription. The label is its name.
HANDLED, FAILED, SUBSCRIPTION = "handled", "failed", "subscription"
#: The highest position of a log (the label is its table). Readers sample it, not publishers.
NEWEST_POSITION, LOG = "newest_position", "log"
#: The names of all of them.
NAMES = (HANDLED, FAILED, NEWEST_POSITION)


@dataclass(frozen=True, slots=True)
class EventsPerMinute:
    """Events of the last full minute: handled by subscriptions, and failed attempts."""

    handled: float = 0.0
    failed: float = 0.0


def per_minute(*, using: str) -> EventsPerMinute:
    """Return the figures of the last full minute."""
    _, current = last_minutes(using, 1)
    minute = current - MINUTE
    rows = rows_of(using, [HANDLED, FAILED], minute, minute)
    return EventsPerMinute(**dict(rows.order_by("name").values_list("name").annotate(Sum("value"))))


def handled(*, using: str, minutes: int = 60) -> dict[str, list[float]]:
    """Return the events handled in each of the last minutes by subscription, the oldest first."""
    first, last = last_minutes(using, minutes)
    rows = rows_of(using, [HANDLED], first, last).order_by("label", "minute")
    rows = rows.filter(dimension=SUBSCRIPTION)
    found: dict[str, list[float]] = {}
    utc = to_utc(using)
    for label, minute, total in rows.values_list("label", "minute").annotate(Sum("value")):
        # Without time zones, one hour a year occurs twice: it is taken for the first of the two.
        if 0 <= (place := (utc(minute) - first) // MINUTE) < minutes:
            found.setdefault(label, [0.0] * minutes)[place] = total
    return found


def starts(*, using: str, minutes: int = 60) -> list[datetime]:
    first, _ = last_minutes(using, minutes)
    return [first + MINUTE * n for n in range(minutes)]


def published(*, using: str, minutes: int = 60) -> dict[str, list[float | None]]:
    """Return the events published in each of the last minutes by log (its table), the oldest first.

    This is an estimate by positions, so it counts those that were rolled back, too. None if no
    reader has taken a sample before and after.
    """
    first, last = last_minutes(using, minutes)
    rows = rows_of(using, [NEWEST_POSITION], first - 10 * MINUTE, last)
    known: dict[str, list[tuple[datetime, float]]] = {}
    samples = rows.filter(dimension=LOG).order_by("label", "minute")
    utc = to_utc(using)
    for label, minute, newest in samples.values_list("label", "minute").annotate(Max("value")):
        known.setdefault(label, []).append((utc(minute), newest))
    begins = [first + MINUTE * n for n in range(minutes)]
    grown = {label: dict(_growth(each)) for label, each in known.items()}
    return {label: [each.get(minute) for minute in begins] for label, each in grown.items()}


def _growth(known: list[tuple[datetime, float]]) -> Iterator[tuple[datetime, float]]:
    """Yield each minute between samples with its growth. A lower sample counts as no growth."""
    at, highest = known[0]
    for end, value in known[1:]:
        growth = max(0.0, value - highest) / ((end - at) / MINUTE)
        while at < end:
            yield at, growth
            at += MINUTE
        highest = max(highest, value)
