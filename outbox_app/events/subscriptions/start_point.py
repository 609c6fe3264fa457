"""Places in a log, as people name them, and the moves of cursors to such places.

"beginning" is before the first event; "now" is after everything that is committed when the move is
made. A position n stands for the events after it. A time stands for the events recorded from then
on, with some that were recorded up to a second earlier.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from django.conf import settings
from django.db.models import Max
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from ...database.clock import stored
from ...models import counting
from ...text import one_line
from ..exceptions import ReplayRefused
from ..log.registry import position_before
from ..models import EventLog

StartPoint = Literal["beginning", "now"] | int | datetime


def parse_start_point(text: str) -> StartPoint:
    """Return the place that a text names. Raises ``ReplayRefused``."""
    text = text.strip()
    if text in ("beginning", "now"):
        return "beginning" if text == "beginning" else "now"
    if text.isascii() and text.isdecimal() and len(text) <= 19:
        return int(text)
    with suppress(ValueError):
        if moment := parse_datetime(text):
            return moment
    raise ReplayRefused(
        f"{text[:100]!r} is no place in a log. Give beginning, now, a position (a whole number), "
        "or a time such as 2026-01-31T12:00."
    )


def position_of(log: type[EventLog], place: StartPoint, *, using: str) -> int | None:
    """Return the position after which a place lies; None: after everything that is committed.

    Raises ``ReplayRefused`` if the log has no such position.
    """
    if place == "now":
        return None
    if place == "beginning":
        return 0
    if isinstance(place, datetime):
        try:
            if settings.USE_TZ and timezone.is_naive(place):
                place = timezone.make_aware(place)
            return position_before(log, stored(place, using=using), using=using)
        except OverflowError as error:
            raise ReplayRefused(f"{place} is too early, or too late: {error}.") from error
    last = log._base_manager.using(using).aggregate(last=Max("id"))["last"] or 0
    if type(place) is not int or not 0 <= place <= last:
        raise ReplayRefused(
            f"{log._meta.db_table} has no event at or after position {place!r}; its last position "
            f"is {last}. To begin with the next events, give now."
        )
    return place


@dataclass(frozen=True, slots=True)
class Move:
    """Where the cursors of one log go, and which unhandled events they would pass over."""

    log: type[EventLog]
    #: Highest position that any of its partitions has passed; None: they have never run.
    before: int | None
    #: The position after which they go on; None: after all that is committed at that moment.
    after: int | None
    state: str
    #: Highest position in the log.
    last: int
    #: Position, type and stream of the events passed over, in order; at most ``MANY + 1``.
    passed: list[tuple[int, str, str]]
    #: Partitions without a cursor, or whose cursor is damaged or refused by the log.
    refused: list[int]

    @property
    def table(self) -> str:
        return self.log._meta.db_table

    @property
    def passes(self) -> str:
        """The events passed over, for people; empty: none."""
        if not self.passed:
            return ""
        count = counting.shown_count(len(self.passed))
        some = ", ".join(
            one_line(f"{n} {type} {stream}", 80) for n, type, stream in self.passed[:3]
        )
        more = ", …" if len(self.passed) > 3 else ""
        noun = "event" if count == "1" else "events"
        return f"{count} {noun} that it has not handled ({some}{more})"

    def __str__(self) -> str:
        here = "never run" if self.before is None else f"at {self.before}"
        if self.after is None:
            there = "to now"
        elif self.after == 0:
            there = "to the beginning: every event that is kept is handled again"
        else:
            there = f"to {self.after}: events behind it are handled, again or for the first time"
        passes = self.passes and f"; passes over {self.passes}"
        return f"{self.table}: from where it is ({here}) {there}{passes}"
