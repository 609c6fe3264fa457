"""SQLite: commit order is position order.

A second writer is refused before it gets a position, so the visible rows are complete up to the
highest position. This needs AUTOINCREMENT, Django's default: a plain rowid is used again after a
delete.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..filter import EventFilter
from ..requirements import require_exact, require_given_out
from ..state import SqliteState
from ..window import MAX_POSITIONS, Page, Window


class SqliteWindow(Window[SqliteState]):
    state = SqliteState

    def start(self, after: int | None = None) -> SqliteState:
        return SqliteState(self.top() if after is None else after)

    def read(
        self, state: SqliteState, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> Page[SqliteState]:
        top = self.top()
        if top <= state.pos:
            return Page([], state, more=False)
        end = min(top, state.pos + MAX_POSITIONS)
        condition, params = only.sql()
        rows = self.run(
            f"SELECT {', '.join(columns)} FROM {self.source} "
            f"WHERE id > {state.pos} AND id <= {end} {condition and f'AND {condition}'} "
            f"ORDER BY id LIMIT {limit}",
            params,
        )
        full = len(rows) == limit
        pos = rows[-1][columns.index("id")] if full else end
        if not rows:  # pass a gap of any size at once
            [(first,)] = self.run(f"SELECT MIN(id) FROM {self.source} WHERE id > {end}", [])
            pos = first - 1 if first else end
        return Page(rows, SqliteState(pos), more=full or end < top, position=pos)

    def unread(self, state: SqliteState) -> str:
        return f"id > {state.pos}"

    def verify(self, state: SqliteState) -> None:
        require_exact("sqlite", self.table, self.run)
        require_given_out(self.table, state.pos, self._used())

    def reached(self, state: SqliteState) -> int | None:
        return state.pos

    def rebase(self, state: SqliteState, last: int | None = None) -> SqliteState:
        return SqliteState(min(state.pos, self._used() if last is None else last))

    def _used(self) -> int:
        """Return the highest position that was given out."""
        sequence = self.run("SELECT seq FROM sqlite_sequence WHERE name = %s", [self.table])
        return sequence[0][0] if sequence else 0
