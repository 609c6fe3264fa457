"""MySQL and MariaDB: positions commit out of order, and a gap is closed only by evidence.

Delivery goes on past a missing position; when it appears it is delivered. What is still missing
after a page is looked for by a *dirty* read, which sees rows that are not committed. The run rule:
missing positions that follow one another are one run, and while any of it is dirty-visible all of
it is open, because an INSERT of many rows reserves its positions before the rows exist. A run of
which nothing was seen for the settle time was never used (measured: 0 lost of 13,937, where locking
probes lost 356 and plain dirty reads 372). What remains is a session that stays between the
reservation of a position and its first row for longer than that; tombstones turn its late row into
a duplicate key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...exceptions import ForeignCursor, TooManyGaps, UnsafeLog
from ..cursor import MysqlState
from ..sql import Filter
from ..window import TOMBSTONE, Page, Window

#: A cursor keeps at most so many runs; then it stands still, and says so.
MAX_RUNS = 10_000
#: A reader that begins now looks for unfinished rows so far below the highest position.
LOOK_BACK = 10_000
#: Runs looked for by one statement.
CHUNK = 500
#: A page passes at most so many positions, whatever is filtered out of it.
MAX_POSITIONS = 20_000
#: Longer runs are not sealed: somebody has set AUTO_INCREMENT.
MAX_SEALED = 10_000

Runs = list[tuple[int, int, Any]]


class MysqlWindow(Window[MysqlState]):
    """Reads by the highest position seen and what was missing below it."""

    state = MysqlState
    needs_dirty = True
    quote = "`"

    def start(self, after: int | None = None) -> MysqlState:
        """See ``Window``."""
        if after is not None:
            return MysqlState(after)
        [(top,)] = self.run(f"SELECT COALESCE(MAX(id), 0) FROM {self.source}", [])
        floor = max(0, top - LOOK_BACK)
        rows = self.run(
            f"SELECT id FROM {self.source} WHERE id > {floor} AND id <= {top} ORDER BY id", []
        )
        present = [id for (id,) in rows]
        state, _ = self._settle(top, [(a, b, None) for a, b in _between(floor, present)])
        return state

    def read(
        self, state: MysqlState, *, columns: Sequence[str], limit: int, only: Filter
    ) -> Page[MysqlState]:
        """See ``Window``."""
        runs: Runs = [tuple(run) for run in state.missing]
        if len(runs) > MAX_RUNS:
            runs = self._make_room(state, runs)
        span = min(limit * max(only.parts, 1), max(limit, MAX_POSITIONS))
        rows = self.run(*self._page(state.high, runs, columns=columns, limit=span, only=only))
        rows.sort()
        new = [row[0] for row in rows if row[0] > state.high]
        if not rows and not runs:
            return Page([], state, more=False)
        high = new[-1] if new else state.high
        late = [row[0] for row in rows if row[0] <= state.high]
        runs = _without(runs, late)
        runs += [(first, last, None) for first, last in _between(state.high, new)]
        after, closed = self._settle(high, runs)
        # The first column is the position, the second says whether the row is wanted.
        wanted = [row[2:] for row in rows if row[1]]
        return Page(
            wanted,
            after,
            more=len(new) >= span,
            position=high if rows else 0,
            closed=closed,
            sealed=self.tombstones,
        )

    def unread(self, state: MysqlState) -> str:
        """See ``Window``."""
        runs = [f"id BETWEEN {first} AND {last}" for first, last, _ in state.missing]
        return f"({' OR '.join([f'id > {state.high}', *runs])})"

    def verify(self, state: MysqlState) -> None:
        """See ``Window``."""
        [(read_only,)] = self.run("SELECT @@GLOBAL.read_only", [])
        if read_only:
            raise UnsafeLog(
                f"{self.table} is read from a server with read_only = ON, a replica. Its rows may "
                "be behind, and dirty reads show nothing. Read from the primary."
            )
        [(used,)] = self.run(
            "SELECT COALESCE(auto_increment, 1) - 1 FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            [self.table],
        )
        [(top,)] = self.run(f"SELECT COALESCE(MAX(id), 0) FROM {self.source}", [])
        if state.high > max(used, top):
            raise ForeignCursor(
                f"The cursor has read {self.table} up to position {state.high}, but the database "
                f"has given out {max(used, top)} only: it was restored. Run manage.py "
                "outbox_rebase."
            )

    def _page(
        self, high: int, runs: Runs, *, columns: Sequence[str], limit: int, only: Filter
    ) -> tuple[str, list[Any]]:
        """Return the SQL of a page: one statement, which sees the log at one moment.

        Rows that are not wanted are returned too, without their data: their positions are not
        missing.
        """
        condition, params = only.sql()
        condition = f"({condition or 'TRUE'}) AND type <> '{TOMBSTONE}'"
        names, given = [], []
        for name in columns:
            if name in ("data", "metadata") and params:
                names.append(f"CASE WHEN {condition} THEN {name} END AS {name}")
                given += params
            else:
                names.append(name)
        select = f"SELECT id AS position, {condition} AS wanted, {', '.join(names)}"
        params = params + given
        sql = (
            f"({select} FROM {self.source} FORCE INDEX (PRIMARY) WHERE id > {high} "
            f"ORDER BY id LIMIT {limit})"
        )
        arms = [sql]
        for chunk in _chunks(runs):
            arms.append(
                f"({select} FROM {self.source} FORCE INDEX (PRIMARY) WHERE {_within(chunk)})"
            )
        return " UNION ALL ".join(arms), params * len(arms)

    def _settle(self, high: int, runs: Runs) -> tuple[MysqlState, list[tuple[int, int]]]:
        """Look for uncommitted rows of the runs; give up those that were never used."""
        if not runs:
            return MysqlState(high), []
        assert self.dirty is not None
        seen: list[int] = []
        for chunk in _chunks(runs):
            # The primary key is forced: through a secondary index a dirty read misses rows.
            rows = self.dirty(
                f"SELECT id FROM {self.source} FORCE INDEX (PRIMARY) WHERE {_within(chunk)}", []
            )
            seen += [id for (id,) in rows]
        [(now,)] = self.dirty("SELECT UNIX_TIMESTAMP(NOW(6))", [])
        now = float(now)
        seen.sort()
        kept: Runs = []
        closed: list[tuple[int, int]] = []
        for first, last, since in runs:
            if _any_between(seen, first, last):
                kept.append((first, last, None))
            elif since is None or since > now:
                kept.append((first, last, now))
            elif now - since < self.settle or not self._seal(first, last):
                kept.append((first, last, since))
            else:
                closed.append((first, last))
        return MysqlState(high, tuple(kept)), closed

    def _seal(self, first: int, last: int) -> bool:
        """Put tombstones where they are asked for. Says whether the run is closed."""
        if not self.tombstones or last - first >= MAX_SEALED:
            return True
        values = ", ".join(
            f"({id}, 0, '', '{TOMBSTONE}', {id}, '{TOMBSTONE}', '{{}}', '{{}}', 0, "
            "REPLACE(UUID(), '-', ''), UTC_TIMESTAMP(6))"
            for id in range(first, last + 1)
        )
        try:
            self.run(
                f"INSERT INTO {self.source} (id, txid, topic, stream, version, type, data, "
                f"metadata, slice, message_id, recorded_at) VALUES {values}",
                [],
            )
        except Exception as error:
            if "1062" in str(error):  # duplicate: its writer was there after all
                return False
            raise
        return True

    def _make_room(self, state: MysqlState, runs: Runs) -> Runs:
        after, _ = self._settle(state.high, runs)
        if len(after.missing) <= MAX_RUNS:
            return list(after.missing)
        raise TooManyGaps(
            f"{len(after.missing)} runs of positions are missing in {self.table} below "
            f"{state.high}, more than a cursor may keep ({MAX_RUNS}). They are in flight, or "
            "rolled back less than the settle time ago: look for a long transaction. Nothing is "
            "skipped; it goes on by itself."
        )


def _between(before: int, present: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs that are missing between positions, which are in order."""
    for position in present:
        if position > before + 1:
            yield before + 1, position - 1
        before = position


def _without(runs: Runs, present: Sequence[int]) -> Runs:
    """Return the runs without positions that are there now. What is left has been seen near."""
    left: Runs = []
    for first, last, since in runs:
        inside = [p for p in present if first <= p <= last]
        if not inside:
            left.append((first, last, since))
            continue
        left += [(a, b, None) for a, b in _between(first - 1, [*inside, last + 1])]
    return left


def _any_between(positions: Sequence[int], first: int, last: int) -> bool:
    at = bisect_left(positions, first)
    return at < len(positions) and positions[at] <= last


def _within(runs: Iterable[tuple[int, int, Any]]) -> str:
    return " OR ".join(
        f"id = {first}" if first == last else f"id BETWEEN {first} AND {last}"
        for first, last, _ in runs
    )


def _chunks(runs: Runs) -> Iterator[Runs]:
    for start in range(0, len(runs), CHUNK):
        yield runs[start : start + CHUNK]
