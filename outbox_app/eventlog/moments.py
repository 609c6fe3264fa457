"""From a time to a position of a log.

``recorded_at`` grows with the positions, but not strictly: a statement is given its time before its
rows get their positions. So the answer lies up to ``MARGIN`` seconds early: whoever reads from it
gets every event recorded at the time or later, and perhaps some that were recorded just before. It
is found by bisection: one look at the primary key each, at most 64 of them.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import Max, Min

from ..models import EventLog

#: Seconds by which times may be out of order.
MARGIN = 1.0


def position_before(log: type[EventLog], moment: datetime, *, using: str) -> int:
    """Return a position behind which every event lies that was recorded at a time or later.

    Args:
        log: The log.
        moment: The time, as Django stores times: with a time zone where ``USE_TZ`` is on.
        using: Database alias.
    """
    rows = log._default_manager.using(using)
    begin = moment - timedelta(seconds=MARGIN)
    ends = rows.aggregate(first=Min("id"), last=Max("id"))
    before, after = (ends["first"] or 1) - 1, (ends["last"] or 0) + 1
    # Events up to `before` were recorded too early, those from `after` on were not.
    while after - before > 1:
        middle = (before + after) // 2
        found = rows.filter(id__gte=middle, id__lt=after).order_by("id")
        row = found.values_list("id", "recorded_at").first()
        if row is None:  # a hole up to `after`
            after = middle
        elif row[1] < begin:
            before = row[0]
        else:
            after = middle
    return before
