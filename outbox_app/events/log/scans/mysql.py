"""MySQL and MariaDB: the positions that a state has seen and an earlier state has not.

The scan finds missing positions without reading the rows: it counts the rows of each block of
positions, and looks only into blocks that are not full. A position that appears later belongs to
the first state that has seen it. No tombstones are written: the reader may lack the right to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from ..scan import LogScan, dealt, ranges
from ..state import MysqlState
from ..window import TOMBSTONE
from ..windows.mysql import MAX_RUNS, MysqlWindow, Runs, joined, meets, split, within, without

#: Positions of a block.
BLOCK = 1_000
#: The fewest positions that a connection of its own counts.
COUNTED = 100_000


class MysqlScan(MysqlWindow, LogScan[MysqlState]):
    #: How many connections may count rows at once …
    readers = 1
    #: … and what runs statements, each on a connection of its own.
    run_all: Callable[[Sequence[str]], list[list[tuple[Any, ...]]]]

    def beginning(self) -> MysqlState:
        return MysqlState()

    def latest(self) -> MysqlState:
        return MysqlState(self.top())

    def end(
        self, state: MysqlState, limit: int | None = None, bound: MysqlState | None = None
    ) -> MysqlState:
        """Rows below the bound count, too, if they were committed after it was made."""
        known: Runs = list(state.missing)
        crowded = len(known) > MAX_RUNS
        high = state.high if crowded else self._reach(state.high, limit)
        if bound is not None:
            high = max(state.high, min(high, bound.high))
        came = self._committed(known)
        runs = without(known, came) + self._holes(state.high, high)
        while True:
            # As in ``read``: the statement above may have missed rows that were committed.
            seen, now = self._look(runs)
            late = self._committed([run for run in runs if meets(seen, run[0], run[1])])
            if not late:
                break
            came += late
            runs = without(runs, late)
        if high == state.high and not came and not crowded:
            return state
        after = self._settle(high, runs, seen, now)
        if crowded and after == state:
            raise self._too_many(state)
        return after

    def parts(self, start: MysqlState, end: MysqlState, count: int) -> list[list[str]]:
        late = without(start.missing, end.missing)
        cuts = ranges(start.high, end.high, count)
        new = [without([(after + 1, upto, None)], end.missing) for after, upto in cuts]
        return dealt(_conditions(new), _conditions([late]))

    def _reach(self, high: int, limit: int | None) -> int:
        """Return the position of the row that is ``limit`` rows after ``high``, or of the last."""
        if limit:
            ids = f"SELECT id FROM {self.source} FORCE INDEX (PRIMARY) WHERE id > {high}"
            if rows := self.run(f"{ids} ORDER BY id LIMIT 1 OFFSET {limit - 1}", []):
                return int(rows[0][0])
        return max(high, self.top())

    def _holes(self, after: int, upto: int) -> Runs:
        """Return the positions in a range that have no committed row.

        Several connections count a large range, each a part of it: one alone takes a third as long
        as the tasks that then read the rows.
        """
        readers = min(self.readers, (upto - after) // COUNTED or 1)
        statements = [
            f"SELECT id DIV {BLOCK}, COUNT(*) FROM {self.source} FORCE INDEX (PRIMARY) "
            f"WHERE id > {first} AND id <= {last} GROUP BY id DIV {BLOCK}"
            for first, last in ranges(after, upto, readers)
        ]
        if len(statements) > 1:
            counts = self.run_all(statements)
        else:
            counts = [self.run(sql, []) for sql in statements]
        # A block that lies in two ranges looks torn, which is slower, and never wrong.
        rows = {int(block): count for block, count in chain.from_iterable(counts)}
        full: Runs = []
        torn: Runs = []
        for block, count in sorted(rows.items()):
            first = max(block * BLOCK, after + 1)
            last = min(block * BLOCK + BLOCK - 1, upto)
            (full if count == last - first + 1 else torn).append((first, last, None))
        there = sorted(full + self._committed(joined(torn, upto)))
        holes = without([(after + 1, upto, None)], there)
        settled = self._settled({(last + 1) // BLOCK for _, last, _ in holes}, upto)
        return [(first, last, 0 if last < settled else None) for first, last, _ in holes]

    def _settled(self, blocks: Iterable[int], upto: int) -> int:
        """Return the last position of the highest of the blocks whose rows have settled, or 0.

        A position was reserved before the rows above it were written. If those rows are older than
        the settle time, compared with the newest row, the position has been missing for that long.
        """
        newest = f"(SELECT recorded_at FROM {self.source} ORDER BY id DESC LIMIT 1)"
        for block in sorted(blocks, reverse=True) if self.settle < float("inf") else ():
            first, last = block * BLOCK, min(block * BLOCK + BLOCK - 1, upto)
            age = f"TIMESTAMPDIFF(MICROSECOND, MAX(recorded_at), {newest}) / 1000000"
            rows = f"{self.source} FORCE INDEX (PRIMARY) WHERE id BETWEEN {first} AND {last}"
            [(top, seconds)] = self.run(f"SELECT MAX(id), {age} FROM {rows}", [])
            if top is not None and (seconds or 0) >= self.settle:
                return int(top)
        return 0


def _conditions(parts: Iterable[Runs]) -> list[list[str]]:
    """Return the SQL conditions of each part that has a run."""
    return [
        [f"({within(chunk)}) AND type <> '{TOMBSTONE}'" for chunk in split(runs)]
        for runs in parts
        if runs
    ]
