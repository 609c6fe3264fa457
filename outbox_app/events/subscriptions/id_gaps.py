"""Positions that stay missing (MySQL), as rows that people can look at.

The window keeps missing positions in its state, and does not need these rows. A run that is still
open after twice the settle time gets a ``Gap`` row. When the run has left the state, the log itself
shows how it ended: filled, sealed with a tombstone, or closed, as nothing was ever there. There is
at most one look every few seconds, and none if nothing is missing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import itemgetter

from ..conf import event_settings
from ..log.reader import LogReader
from ..log.state import MysqlState, WindowState
from ..log.window import TOMBSTONE
from ..log.windows.mysql import Runs, meets
from ..models import Gap
from .subscriber import Subscriber

#: Seconds between two looks.
LOOK_SECONDS = 3.0
#: Gap rows of one log that are open at a time, and settled ones that stay; more rows add no
#: information.
MAX_ROWS = 100


class IdGaps:
    def __init__(self, subscriber: Subscriber, part: int, *, clock: Callable[[], float]) -> None:
        self.subscriber = subscriber
        self.part = part
        self.clock = clock
        #: The runs of the last look, each with the time when it was first seen, by log.
        self._seen: dict[str, Runs] = {}
        self._open: dict[str, list[Gap]] = {}
        self._next_look: dict[str, float] = {}

    def load(self, rows: Iterable[Gap]) -> None:
        """Take this partition's open gaps; partition 0 also takes those of removed partitions."""
        self._open = {}
        for row in rows:
            if self.part == (row.partition if row.partition < self.subscriber.partitions else 0):
                self._open.setdefault(row.log, []).append(row)

    def look(self, reader: LogReader, state: WindowState) -> None:
        """Update the rows of a log from the cursor's state, if the next look is due."""
        if not isinstance(state, MysqlState):
            return
        log, now = reader.table, self.clock()
        if not (state.missing or self._open.get(log)) or now < self._next_look.get(log, now):
            return
        self._next_look[log] = now + LOOK_SECONDS
        before, seen = self._seen.get(log, []), []
        for first, last, _ in state.missing:
            n = bisect_left(before, first, key=itemgetter(1))
            is_left_of_it = n < len(before) and before[n][0] <= first and last <= before[n][1]
            seen.append((first, last, before[n][2] if is_left_of_it else now))
        self._seen[log] = seen
        rows = []
        for gap in self._open.get(log, []):
            if meets(seen, gap.first, gap.last):
                rows.append(gap)
            else:
                self._settle(reader, gap)
        patience = 2 * event_settings().SETTLE_SECONDS
        for first, last, at in seen:
            known = any(first <= gap.last and gap.first <= last for gap in rows)
            if now - at >= patience and not known and len(rows) < MAX_ROWS:
                rows.append(self._record(log, first, last))
        self._open[log] = rows

    def _record(self, log: str, first: int, last: int) -> Gap:
        key = {"kind": Gap.Kind.ID, "subscription": self.subscriber.name, "partition": self.part}
        gaps = Gap.objects.using(self.subscriber.using)
        return gaps.record_missing({**key, "log": log, "first": first}, last=last)

    def _settle(self, reader: LogReader, gap: Gap) -> None:
        """Settle a gap by the rows that the log has at its positions."""
        rows = reader.log._base_manager.using(reader.using)
        types = rows.filter(pk__range=(gap.first, gap.last)).values_list("type", flat=True)
        found = set(types.order_by().distinct()[:2])
        state = Gap.State.CLOSED
        if found:
            state = Gap.State.TOMBSTONE if found == {TOMBSTONE} else Gap.State.FILLED
        gaps = Gap.objects.using(self.subscriber.using)
        gaps.filter(pk=gap.pk).settle(state)
        key = {"subscription": gap.subscription, "partition": gap.partition, "log": gap.log}
        settled = gaps.filter(kind=Gap.Kind.ID, **key).exclude(state=Gap.State.OPEN)
        old = settled.order_by("-id").values_list("id", flat=True)[MAX_ROWS : 2 * MAX_ROWS]
        gaps.filter(pk__in=list(old)).delete()
