"""Completeness: the versions of each stream must follow one another.

For the first row of each stream in a page, the check looks up the row before it: one statement a
page. The row is accepted if its predecessor was handled, or if no older row is kept. A predecessor
that exists and was not handled comes first; if a version is missing, its stream is held, and no
other. Rows that were handled already are dropped. Whether a row was handled is computed from the
cursor; a reader by time cannot compute it, and looks at the recorded versions. (So a reader with a
window handles an event again that was handled, deleted, found missing and put back.) If the *last*
event of a stream was passed over, the check cannot see it before the event has a successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .reader import LogReader
from .record import RecordedEvent
from .state import WindowState
from .windows.time import TimeState

#: The most missed events of one stream that are inserted into a page at once.
MAX_BEFORE = 10_000

_BEFORE, _AFTER = 0, 1


class MissingVersions(NamedTuple):
    """The versions ``first`` to ``last`` of a stream: missing, or not passed by the cursor yet."""

    stream: str
    first: int
    last: int
    #: Position of the event that waits for them.
    position: int


class Completeness:
    """Checks the page that follows a cursor's state. The reader must read all types and topics."""

    def __init__(self, reader: LogReader, state: WindowState) -> None:
        self.reader = reader
        self._run, self._source = reader.window.run, reader.window.source
        self._by_time = isinstance(state, TimeState)
        self._unread = reader.window.unread(state.floor if isinstance(state, TimeState) else state)

    def check(
        self, events: Sequence[RecordedEvent], handled: Mapping[str, int]
    ) -> tuple[list[RecordedEvent], list[MissingVersions]]:
        """Return the events to handle, in order, and the versions that other streams wait for.

        ``events`` is a page without the events of held streams. ``handled`` maps a stream to the
        highest version handled, if that was recorded.
        """
        streams: dict[str, list[list[RecordedEvent]]] = {}
        for event in sorted(events, key=lambda event: event.version):
            runs = streams.setdefault(event.stream, [])
            if runs and event.version <= runs[-1][-1].version + 1:
                runs[-1].append(event)
            else:
                runs.append([event])
        unknown = [run for name, runs in streams.items() if name not in handled for run in runs]
        beside = self._beside(unknown)
        missing: list[MissingVersions] = []
        accepted = {
            stream: self._accept(runs, handled.get(stream), beside, missing)
            for stream, runs in streams.items()
        }
        return _in_order(events, accepted), missing

    def _accept(
        self,
        runs: list[list[RecordedEvent]],
        handled: int | None,
        beside: Mapping[tuple[int, int], int],
        missing: list[MissingVersions],
    ) -> list[RecordedEvent]:
        """Return the events of one stream that can be handled; append the gap after them."""
        accepted: list[RecordedEvent] = []
        for run in runs:
            done = handled
            first, last = run[0], run[-1]
            if done is None:
                if beside.get((last.id, _AFTER), 0) > 0:
                    continue  # a later version was handled, so this run was, too
                before = beside.get((first.id, _BEFORE))
                if before is None:
                    done = first.version - 1
                else:
                    done = before if before > 0 else self._done_before(first)
            if accepted:
                done = max(done, accepted[-1].version)
            if self._by_time and first.version > done + 1:
                run = [*self._passed_over(done, first), *run]
            chain, gap = contiguous(done + 1, run)
            accepted += chain
            if gap:
                missing.append(gap)
                break
        return accepted

    def _beside(self, runs: Sequence[Sequence[RecordedEvent]]) -> dict[tuple[int, int], int]:
        """Return the versions before and after each run, negated if the cursor is not past them."""
        if not runs:
            return {}
        arms = []
        for side, at, order in ((_BEFORE, "<", "DESC"), (_AFTER, ">", "ASC")):
            ids = ", ".join(str(run[-side].id) for run in runs)
            arms.append(
                f"SELECT p.id AS page_id, {side} AS side, (SELECT e.id FROM {self._source} e "
                f"WHERE e.stream = p.stream AND e.version {at} p.version "
                f"ORDER BY e.version {order} LIMIT 1) AS beside_id "
                f"FROM {self._source} p WHERE p.id IN ({ids})"
            )
        # A subquery instead of a join: for a join, the planner may read the whole log.
        rows = self._run(
            "SELECT page_id, side, (SELECT CASE WHEN "
            f"{self._unread} THEN -version ELSE version END "
            f"FROM {self._source} t WHERE t.id = beside_id) AS beside "
            f"FROM ({' UNION ALL '.join(arms)}) f",
            [],
        )
        return {(id, side): version for id, side, version in rows if version}

    def _done_before(self, event: RecordedEvent) -> int:
        """Return the highest handled version below an event whose predecessor was not handled."""
        select = f"SELECT version FROM {self._source} WHERE stream = %s"
        passed = self._run(
            f"{select} AND version < {event.version} AND NOT ({self._unread}) "
            "ORDER BY version DESC LIMIT 1",
            [event.stream],
        )
        if passed:
            return int(passed[0][0])
        kept = self._run(f"{select} ORDER BY version LIMIT 1", [event.stream])
        return int(kept[0][0]) - 1 if kept else event.version - 1

    def _passed_over(self, done: int, event: RecordedEvent) -> list[RecordedEvent]:
        """Return the events that a reader by time passed over, from a version up to an event."""
        rows = self._run(
            f"SELECT {', '.join(self.reader.columns)} FROM {self._source} WHERE stream = %s "
            f"AND version > {done} AND version < {event.version} "
            f"ORDER BY version LIMIT {MAX_BEFORE}",
            [event.stream],
        )
        return self.reader.records(rows)


def contiguous(
    version: int, events: Iterable[RecordedEvent]
) -> tuple[list[RecordedEvent], MissingVersions | None]:
    """Return the events of a stream from a version up to the first gap, and that gap, if any."""
    found = []
    for event in events:
        if event.version == version:
            found.append(event)
            version += 1
        elif event.version > version:
            return found, MissingVersions(event.stream, version, event.version - 1, event.id)
    return found, None


def _in_order(
    events: Sequence[RecordedEvent], accepted: Mapping[str, list[RecordedEvent]]
) -> list[RecordedEvent]:
    """Return the accepted events in the page's order; missed ones come before their successor."""
    waiting = {stream: iter(queue) for stream, queue in accepted.items()}
    here = {event.id for event in events}
    found = []
    for event in events:
        for each in waiting[event.stream]:
            found.append(each)
            if each.id in here:
                break
    return found
