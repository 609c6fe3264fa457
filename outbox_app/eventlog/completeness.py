"""Completeness: the versions of each stream must follow one another.

For the first row of each stream in a page the row before it is looked up, one statement a page. It
is accepted when that one was handled, or nothing older is kept; what is there and was not handled
comes first; where a version is missing, this stream is held, and no other. What was handled already
is dropped. Whether a row was handled is computed from the cursor; for a reader by time, which
cannot compute it, from the versions that were recorded. (So what was handled, deleted, missed and
put back is handled again behind a window.) That the *last* event of a stream was passed over cannot
be seen until it has a successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .reader import LogReader
from .record import RecordedEvent
from .state import WindowState
from .windows.time import TimeState

#: Events of one stream that are inserted into a page at once.
MAX_BEFORE = 10_000

_BEFORE, _AFTER = 0, 1


class MissingVersions(NamedTuple):
    """Versions of a stream, from first to last, that are missing, or not passed yet."""

    stream: str
    first: int
    last: int
    #: Position of the event that waits for them.
    position: int


class Completeness:
    """Checks the page after a cursor's state; its reader has to read all types and topics."""

    def __init__(self, reader: LogReader, state: WindowState) -> None:
        self.reader = reader
        self._run, self._source = reader.window.run, reader.window.source
        self._by_time = isinstance(state, TimeState)
        self._unread = reader.window.unread(state.floor if isinstance(state, TimeState) else state)

    def check(
        self, events: Sequence[RecordedEvent], handled: Mapping[str, int]
    ) -> tuple[list[RecordedEvent], list[MissingVersions]]:
        """Return what of a page is to be handled, in order, and which streams have to wait.

        ``events`` are without the streams that are held; ``handled`` are the highest versions
        handled, of the streams of which they were recorded.
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
        """Return the events of one stream that can be handled; append what is missing then."""
        accepted: list[RecordedEvent] = []
        for run in runs:
            done = handled
            first, last = run[0], run[-1]
            if done is None:
                if beside.get((last.id, _AFTER), 0) > 0:
                    continue  # something later was handled: so was this
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
        """Return the version before each run and the one after it; below zero: it is not passed."""
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
        # No join, for which a planner may read the whole log.
        rows = self._run(
            "SELECT page_id, side, (SELECT CASE WHEN "
            f"{self._unread} THEN -version ELSE version END "
            f"FROM {self._source} t WHERE t.id = beside_id) AS beside "
            f"FROM ({' UNION ALL '.join(arms)}) f",
            [],
        )
        return {(id, side): version for id, side, version in rows if version}

    def _done_before(self, event: RecordedEvent) -> int:
        """Return the highest version that was handled below one whose predecessor was not."""
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
        """Return the events of a stream between a version and an event, which are behind."""
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
    """Return the events of a stream from a version on up to a gap, and what is missing there."""
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
    """Return what was accepted in the order of the page, what was missed before its successor."""
    waiting = {stream: iter(queue) for stream, queue in accepted.items()}
    here = {event.id for event in events}
    found = []
    for event in events:
        for each in waiting[event.stream]:
            found.append(each)
            if each.id in here:
                break
    return found
