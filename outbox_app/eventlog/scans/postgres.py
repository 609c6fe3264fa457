"""PostgreSQL: between two snapshots the rows are fixed for ever, so a scan is exact.

A batch that is read again after any crash is the same batch, in any process and however it is cut
into parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...exceptions import ForeignCursor
from ..filter import EventFilter
from ..scan import LogScan, dealt, ranges
from ..state import BEGINNING, NEVER, PostgresState, Snapshot
from ..windows.postgres import PostgresWindow, array, not_running


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows due in one snapshot and not consumed in another."""

    lo: Snapshot
    hi: Snapshot
    #: Positions up to this are left out …
    after: int = 0
    #: … and beyond this; None: none are.
    upto: int | None = None
    #: A state that knows between which positions the rows lie.
    known: PostgresState | None = None


class PostgresScan(PostgresWindow, LogScan[PostgresState]):
    def beginning(self) -> PostgresState:
        _, cluster = self._snapshot()
        return PostgresState(cluster, BEGINNING)

    def latest(self) -> PostgresState:
        now, cluster = self._snapshot()
        return PostgresState(cluster, now.text)

    def end(
        self, state: PostgresState, limit: int | None = None, bound: PostgresState | None = None
    ) -> PostgresState:
        """A limited one ends with its window."""
        now, cluster = self._snapshot()
        self._require_own(state, now, cluster)
        reached = self._reach(state, Snapshot.parse(bound.lo) if bound else now, limit)
        if reached != state:
            self._outlast_a_crash()
        return reached

    def _reach(self, state: PostgresState, now: Snapshot, limit: int | None) -> PostgresState:
        cluster = state.cluster
        reached = opened = state
        while True:
            if not opened.hi:
                opened = self._open(opened, now)
            if not opened.hi:
                return reached
            sql, params = self._page(
                opened, opened.last, columns=("id",), limit=limit or 1, only=EventFilter()
            )
            [(rows, last)] = self.run(f"SELECT count(*), max(id) FROM ({sql}) page", params)
            if limit and rows == limit:
                return replace(opened, pos=last)
            opened = PostgresState(cluster, opened.hi)
            if rows:
                reached = opened
                if limit:
                    return reached

    def parts(self, start: PostgresState, end: PostgresState, count: int) -> list[list[str]]:
        if start.cluster != end.cluster:
            raise ForeignCursor(
                f"Between two database clusters, {start.cluster} and {end.cluster}, there are no "
                f"rows of {self.table}: their transaction ids have nothing to do with one another."
            )
        segments = (self._cut(segment, count) for segment in _segments(start, end))
        return dealt(count, *segments)

    def _outlast_a_crash(self) -> None:
        """Flush to the server's disk all that the snapshots of a state rest on.

        A snapshot counts transactions, too, whose end is not on disk yet: rolled back, or committed
        asynchronously. After a crash of the server their ids are given out again, and a state that
        is kept elsewhere, in an archive or a checkpoint, would take new rows for old ones. A commit
        that is waited for brings all before it to disk; all it writes is a message that
        has no receiver.
        """
        message = "pg_logical_emit_message(true, 'outbox_app', '')::text"
        self.run(f"SELECT set_config('synchronous_commit', 'local', true), {message}", [])

    def _cut(self, segment: Segment, count: int) -> list[list[str]]:
        lo, hi = segment.lo, segment.hi
        begun = f"txid < {hi.xmax} AND {not_running(hi)}"
        if lo.xmax != NEVER:
            begun = f"txid >= {lo.xmax} AND {begun}"
        first, last = self._bounds(segment, begun)
        upto = last if segment.upto is None else min(last, segment.upto)
        parts = [
            [f"id > {a} AND id <= {b} AND {begun}"]
            for a, b in ranges(max(segment.after, first - 1), upto, count)
        ]
        if ended := lo.running - hi.running:
            condition = f"txid = ANY({array(ended)}) AND id > {segment.after}"
            if segment.upto is not None:
                condition += f" AND id <= {segment.upto}"
            parts = dealt(count, [[condition]], parts)
        return parts

    def _bounds(self, segment: Segment, begun: str) -> tuple[int, int]:
        """Return the first and the last position, or 1 and 0."""
        if segment.known is not None:
            return segment.known.first, segment.known.last
        # As in PostgresWindow._open; from the beginning the primary key knows both ends.
        ends = f"SELECT min(id + 0), max(id + 0) FROM {self.source} WHERE {begun}"
        if segment.lo.xmax == NEVER:
            ends = f"SELECT min(id), max(id) FROM {self.source}"
        [(first, last)] = self.run(ends, [])
        return (first, last) if first is not None else (1, 0)


def _segments(start: PostgresState, end: PostgresState) -> Iterator[Segment]:
    """Yield what is left of the window of ``start``, what came then, and the window of ``end``."""
    if start.hi and (start.lo, start.hi) == (end.lo, end.hi):
        lo, hi = Snapshot.parse(start.lo), Snapshot.parse(start.hi)
        yield Segment(lo, hi, after=start.pos, upto=end.pos, known=start)
        return
    at = Snapshot.parse(start.lo)
    if start.hi:
        lo, at = at, Snapshot.parse(start.hi)
        yield Segment(lo, at, after=start.pos, known=start)
    lo = Snapshot.parse(end.lo)
    if lo.text != at.text:
        yield Segment(at, lo)
    if end.hi:
        yield Segment(lo, Snapshot.parse(end.hi), upto=end.pos, known=end)
