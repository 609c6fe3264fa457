"""SQLite: commit order is position order, so a scan is a range of positions.

The rows of a range never change: rows that are committed later have higher positions.
"""

from __future__ import annotations

from ..scan import LogScan, ranges
from ..state import SqliteState
from ..windows.sqlite import SqliteWindow


class SqliteScan(SqliteWindow, LogScan[SqliteState]):
    def beginning(self) -> SqliteState:
        return SqliteState()

    def latest(self) -> SqliteState:
        return SqliteState(self.top())

    def end(
        self, state: SqliteState, limit: int | None = None, bound: SqliteState | None = None
    ) -> SqliteState:
        self.verify(state)
        upto = f"AND id <= {bound.pos}" if bound is not None else ""
        some = f"ORDER BY id LIMIT {limit}" if limit else ""
        ids = f"SELECT id FROM {self.source} WHERE id > {state.pos} {upto} {some}"
        [(last,)] = self.run(f"SELECT max(id) FROM ({ids})", [])
        return state if last is None else SqliteState(last)

    def parts(self, start: SqliteState, end: SqliteState, count: int) -> list[list[str]]:
        return [[f"id > {a} AND id <= {b}"] for a, b in ranges(start.pos, end.pos, count)]
