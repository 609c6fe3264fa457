"""The events that a cursor has not passed, counted up to a bound.

Only about as many rows as the bound are read, each through an index, however long the backlog is
and however few rows the filter selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .filter import EventFilter
from .reader import LogReader
from .state import PostgresState, Snapshot, WindowState
from .window import TOMBSTONE
from .windows.postgres import array

#: The most cursors that one statement counts. SQLite takes 500.
CHUNK = 100


@dataclass(frozen=True, slots=True)
class Unread:
    #: Events that the cursor's filter selects, among the rows that were read.
    rows: int
    #: Whether these are all; otherwise counting stopped at the bound.
    complete: bool
    #: Position of the first of these events, 0 if there is none.
    first: int


def count_unread(
    reader: LogReader, cursors: Sequence[tuple[WindowState, EventFilter]], *, bound: int
) -> list[Unread]:
    """Count, for each cursor (state and filter), the events that it has not passed."""
    found: list[Unread] = []
    for start in range(0, len(cursors), CHUNK):
        parts, params = [], []
        for number, (state, only) in enumerate(cursors[start : start + CHUNK]):
            condition, values = only.sql()
            wanted = f"{condition and f'({condition}) AND '}type <> '{TOMBSTONE}'"
            parts.append(
                f"SELECT {number} AS cursor_number, COUNT(*), COUNT(CASE WHEN {wanted} THEN 1 END),"
                f" MIN(CASE WHEN {wanted} THEN id END) FROM ({_ahead(reader, state, bound + 1)}) u"
            )
            params += values * 2
        counted = sorted(reader.run(" UNION ALL ".join(parts), params))
        for number, looked_at, rows, first in counted:
            state, _ = cursors[start + number]
            complete = looked_at <= bound
            if isinstance(state, PostgresState) and state.hi:  # ``_ahead`` looks no further
                complete &= state.last - state.after <= 2 * bound
            found.append(Unread(min(rows, bound), complete, first or 0))
    return found


def _ahead(reader: LogReader, state: WindowState, limit: int) -> str:
    """Return SQL for about ``limit`` rows that the state has not passed, including the oldest."""
    select = f"SELECT id, topic, type, slice FROM {reader.window.source} WHERE"
    if not isinstance(state, PostgresState) or state.rebased:
        return f"{select} {reader.window.unread(state)} ORDER BY id LIMIT {limit}"
    # One SELECT per index range: for a single condition, the planner would scan the whole table.
    arms = []
    later = Snapshot.parse(state.lo)
    if state.hi:
        lo, later = later, Snapshot.parse(state.hi)
        # The planner cannot tell how few rows of a range belong to the window: bound the positions.
        arms.append(
            f"{select} id > {state.after} AND id <= {state.last} AND id <= 2 * {limit} + "
            f"(SELECT COALESCE(MIN(id), 0) FROM {reader.window.source} WHERE id > {state.after}) "
            f"AND txid + 0 >= {lo.xmax} AND txid + 0 < {later.xmax} "
            f"AND NOT (txid + 0 = ANY({array(later.running)})) ORDER BY id LIMIT {limit}"
        )
        ended = lo.running - later.running
        arms.append(
            f"{select} txid = ANY({array(ended)}) AND id > {state.pos} ORDER BY id LIMIT {limit}"
        )
    arms.append(f"{select} txid = ANY({array(later.running)}) ORDER BY id LIMIT {limit}")
    arms.append(f"{select} txid >= {later.xmax} ORDER BY txid, id LIMIT {limit}")
    return " UNION ALL ".join(f"({arm})" for arm in arms)
