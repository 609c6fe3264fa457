"""The counters of decided prepared events in the last minutes.

A keeper counts each decision by outcome and route, and the seconds since the event was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..monitoring.series import last_minutes, percentiles, rows_of, totals
from ..process import counters

#: Decided prepared events, by outcome and route, and by the time until the decision, in the
#: buckets of ``delay``.
DECIDED, ROUTE, DECIDE_TIME = "prepared_decided", "route", "prepared_decide_time"
#: The names of all of them.
NAMES = (DECIDED, DECIDE_TIME)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a keeper has decided on prepared events."""

    #: Decisions in the last full minute, by outcome ("confirmed", "cancelled") and route ("call",
    #: "answer", "policy", "person").
    per_minute: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Seconds from recording an event to the decision on it, in the last minutes.
    p50: float | None = None
    p95: float | None = None


def decisions(*, using: str, minutes: int = 5) -> Decisions:
    """Return the decisions on prepared events; the current minute is included."""
    first, last = last_minutes(using, minutes)
    rows = rows_of(using, NAMES, first, last)
    per_minute: dict[tuple[str, str], float] = {}
    times: dict[str, float] = {}
    for name, label, total, of_full in totals(rows, last):
        if name == DECIDE_TIME:
            times[label] = total
        elif of_full:
            outcome, _, route = label.partition(" ")
            per_minute[outcome, route] = of_full
    return Decisions(per_minute, *percentiles(times, counters.BUCKETS, 0.5, 0.95))
