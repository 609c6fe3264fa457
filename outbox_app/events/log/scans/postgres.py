"""PostgreSQL: between two snapshots the rows are fixed for ever, so a scan is exact.

A batch that is read again after any crash is the same batch, in any process and however it is cut
into parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...exceptions import ForeignCursor
from ..filter import EventFilter
from ..scan import LogScan, dealt, ranges
from ..state import BEGINNING, NEVER, PostgresState, Snapshot
from ..windows.postgres import PostgresWindow, array, sees


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
        """A scan with a limit ends where its window ends, at the latest."""
        now = self._own_snapshot(state)
        now = self._witnessed(Snapshot.parse(bound.lo) if bound else now, state)
        reached = self._reach(state, now, limit)
        if reached != state:
            self._outlast_a_crash()
        return reached

    def _witnessed(self, now: Snapshot, state: PostgresState) -> Snapshot:
        """Return the snapshot without transactions after the last one that has rows.

        If the server is set back, or a standby that was behind is promoted, it gives out their ids
        again, and no row that is missing would tell (``Offsets.verify``).
        """
        [(top,)] = self.run(f"SELECT max(txid) FROM {self.source}", [])
        known = Snapshot.parse(state.hi or state.lo).xmax
        xmax = min(now.xmax, max(known, (top or 0) + 1))
        running = sorted(xid for xid in now.running if xid < xmax)
        return Snapshot.parse(f"{min([*running, xmax])}:{xmax}:{','.join(map(str, running))}")

    def _reach(self, state: PostgresState, now: Snapshot, limit: int | None) -> PostgresState:
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
            opened = PostgresState(state.cluster, opened.hi)
            if rows:
                reached = opened
                if limit:
                    return reached

    def parts(self, start: PostgresState, end: PostgresState, count: int) -> list[list[str]]:
        if start.cluster != end.cluster:
            raise ForeignCursor(
                f"{self.table} cannot be read from the cluster {start.cluster} to "
                f"{end.cluster}: ids of two database clusters are unrelated."
            )
        return dealt(*(self._cut(*each, count) for each in self._windows(start, end)))

    def _windows(
        self, start: PostgresState, end: PostgresState
    ) -> Iterator[tuple[PostgresState, int | None]]:
        """Yield the rest of the window of ``start``, the one between, and the window of ``end``.

        Each comes with the position at which it ends; None: at its own end.
        """
        if start.hi and (start.lo, start.hi) == (end.lo, end.hi):
            yield start, end.pos
            return
        between = start
        if start.hi:
            yield start, None
            between = PostgresState(start.cluster, start.hi)
        between = self._open(between, Snapshot.parse(end.lo))
        if between.hi:
            yield between, None
        if end.hi:
            yield replace(end, pos=0), end.pos

    def _outlast_a_crash(self) -> None:
        """Flush to the server's disk the end of each transaction that a state has seen end.

        An asynchronous commit need not be on disk yet. After a crash the server gives out its id
        again, and a state that is kept elsewhere would take new rows for old ones. A synchronous
        commit flushes all before it; this one writes an unread message only.
        """
        message = "pg_logical_emit_message(true, 'outbox_app', '')::text"
        self.run(f"SELECT set_config('synchronous_commit', 'local', true), {message}", [])

    def _cut(self, window: PostgresState, upto: int | None, count: int) -> list[list[str]]:
        """Cut the rest of an open window, up to a position, into parts."""
        lo, hi = Snapshot.parse(window.lo), Snapshot.parse(window.hi)
        begun = sees(hi) if lo.xmax == NEVER else f"txid >= {lo.xmax} AND {sees(hi)}"
        last = window.last if upto is None else min(window.last, upto)
        parts = [
            [f"id > {a} AND id <= {b} AND {begun}"] for a, b in ranges(window.after, last, count)
        ]
        if ended := lo.running - hi.running:
            condition = f"txid = ANY({array(ended)}) AND id > {window.pos}"
            if upto is not None:
                condition += f" AND id <= {upto}"
            parts = dealt([[condition]], parts)
        return parts
