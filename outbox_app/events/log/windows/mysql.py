"""MySQL and MariaDB: positions commit out of order, and a gap is closed only by evidence.

Delivery continues past a missing position, and delivers its row when it appears. After each page, a
*dirty* read, which sees uncommitted rows, looks for the positions that are still missing. The run
rule: missing positions that follow one another are one run, and the run is open while a dirty read
sees any of it. A run of which nothing was seen for the settle time counts as never used. Why, with
figures: docs/explanation/log-on-mysql.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from ...exceptions import TooManyGaps, UnsafeLog
from ..filter import EventFilter
from ..requirements import READ_ONLY, is_replica, refusal, require_exact, require_given_out
from ..state import MysqlState
from ..window import TOMBSTONE, Page, Window

#: A cursor with more runs than this reads no new positions, and reports it (``TooManyGaps``).
MAX_RUNS = 10_000
#: How far below its first position a new reader looks for rows in flight …
LOOK_BACK = 100_000
#: … and for positions that are reserved for rows that do not exist yet.
LOOK_NEAR = 10_000
#: The most runs that one statement looks for.
CHUNK = 500
#: With a filter, a page reads at most so many rows, wanted or not, or its limit if that is higher …
MAX_ROWS = 20_000
#: … and may read so many for each part, even if its limit is lower.
MIN_ROWS = 100
#: In a longer run, a dirty read looks for the first row; in a shorter one, for all rows.
WIDE = 50
#: Longer runs are not sealed: they come from an AUTO_INCREMENT that was set.
MAX_SEALED = 10_000

#: Runs of positions, as in ``MysqlState.missing``.
Runs = list[tuple[int, int, Any]]


class MysqlWindow(Window[MysqlState]):
    state = MysqlState
    needs_dirty = True
    quote = "`"

    def start(self, after: int | None = None) -> MysqlState:
        return self.move(after, [])

    def move(self, after: int | None, states: Sequence[MysqlState]) -> MysqlState:
        """As ``start()``, but keeps the runs that these states wait for, however low they lie."""
        top = self.top()
        high = top if after is None else after
        end = min(top, high)
        floor = max(0, end - LOOK_BACK)
        waited = joined((run for state in states for run in state.missing), end)
        runs = joined([*waited, (floor + 1, end, None)], end)
        runs = without(runs, self._committed(runs))
        seen, now = self._look(runs)
        state = self._settle(high, runs, seen, now)
        near = end - LOOK_NEAR
        kept = [
            (first, last, since)
            for first, last, since in state.missing
            if since is None or last > near or meets(waited, first, last)
        ]
        return MysqlState(high, kept)

    def read(
        self, state: MysqlState, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> Page[MysqlState]:
        known: Runs = list(state.missing)
        crowded = len(known) > MAX_RUNS
        most = limit
        if only.sql()[0]:  # the filter drops some rows
            most = min(max(limit, MIN_ROWS) * max(only.parts, 1), max(limit, MAX_ROWS))
        beyond = None if crowded else state.high
        rows = self._rows(beyond, known, columns=columns, limit=most, only=only)
        while True:
            rows, full = _page_of(rows, limit, most)
            high = max(state.high, rows[-1][0] if rows else 0)
            there = [(row[0], row[0], None) for row in rows]
            runs = without([*known, (state.high + 1, high, None)], there)
            seen, now = self._look(runs)
            if not rows:
                break
            # MariaDB's read view is no atomic cut: it may show version 5 of a stream, and not
            # version 4, which was committed before. If it missed such a row, this look finds it.
            reach = rows[-1][0] if full else high
            near = [(first, min(last, reach), None) for first, last, _ in runs if first <= reach]
            written = [run for run in near if meets(seen, run[0], run[1])]
            late = self._rows(None, written, columns=columns, limit=most, only=only)
            if not late:
                break
            rows = sorted(rows + late, key=itemgetter(0))
        after = self._settle(high, runs, seen, now)
        if crowded and not rows and after == state:
            raise self._too_many(state)
        return Page(
            # The first column is the position, the second says whether the row is wanted.
            [row[2:] for row in rows if row[1]],
            after,
            more=full or crowded,
            position=high if rows else 0,
        )

    def unread(self, state: MysqlState) -> str:
        runs = [f"id BETWEEN {first} AND {last}" for first, last, _ in state.missing]
        return f"({' OR '.join([f'id > {state.high}', *runs])})"

    def verify(self, state: MysqlState) -> None:
        require_exact("mysql", self.table, self.run)
        if self.tombstones:
            key = self.run(
                "SELECT column_name FROM information_schema.key_column_usage WHERE table_schema = "
                "DATABASE() AND table_name = %s AND constraint_name = 'PRIMARY'",
                [self.table],
            )
            if key != [("id",)]:
                raise UnsafeLog(
                    f"{self.table} is split by another column than id, so a tombstone cannot "
                    "refuse a late row. Set OUTBOX['TOMBSTONES'] = False."
                )
        require_given_out(self.table, state.high, self._used())

    def reached(self, state: MysqlState) -> int | None:
        return state.high

    def rebase(self, state: MysqlState, last: int | None = None) -> MysqlState:
        high = min(state.high, self._used() if last is None else last)
        runs = [(a, min(b, high), since) for a, b, since in state.missing if a <= high]
        return MysqlState(high, runs)

    def _used(self) -> int:
        """Return the highest position that was given out."""
        # Otherwise MySQL remembers the value for a day. MariaDB skips the text in the comment.
        self.run("SET @outbox = 0 /*!80003 , SESSION information_schema_stats_expiry = 0 */", [])
        # The statement opens the table for MAX. Of a table that is closed, since a restart or as it
        # was evicted, MySQL shows the last value that was given out in place of the next one.
        [(next, top)] = self.run(
            f"SELECT auto_increment, (SELECT MAX(id) FROM {self.source}) "
            "FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
            [self.table],
        )
        return max(int(next or 1) - 1, int(top or 0))

    def _committed(self, runs: Runs) -> Runs:
        """Return the positions in the runs that have a committed row, in order, each as a run."""
        select = f"SELECT id FROM {self.source} FORCE INDEX (PRIMARY) WHERE"
        rows = [row for chunk in split(runs) for row in self.run(f"{select} {within(chunk)}", [])]
        return sorted((int(id), int(id), None) for (id,) in rows)

    def _rows(
        self, high: int | None, runs: Runs, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> list[tuple[Any, ...]]:
        """Return the first ``limit`` rows of the runs, and beyond ``high``, by one statement.

        Unwanted rows are returned, too, as their positions are not missing, but with empty columns:
        with many parts, that takes a third of the work.
        """
        wanted, params = only.sql()
        condition = f"{wanted and f'({wanted}) AND '}type <> '{TOMBSTONE}'"
        names, column_params = [], []
        for name in columns:
            if name != "id" and wanted:
                names.append(f"CASE WHEN {condition} THEN {name} END AS {name}")
                column_params += params
            else:
                names.append(name)
        ranges = [f"id > {high}"] if high is not None else []
        ranges += [within(chunk) for chunk in split(runs)]
        if not ranges:
            return []
        arms = [
            f"(SELECT id AS position, {condition} AS wanted, {', '.join(names)} "
            f"FROM {self.source} FORCE INDEX (PRIMARY) WHERE {each} ORDER BY id LIMIT {limit})"
            for each in ranges
        ]
        rows = self.run(" UNION ALL ".join(arms), (params + column_params) * len(arms))
        return sorted(rows, key=itemgetter(0))[:limit]

    def _look(self, runs: Runs) -> tuple[Runs, float]:
        """Return positions of rows, committed or not (of a wide run only one), and the time."""
        if not runs:
            return [], 0.0
        assert self.dirty is not None
        seen: Runs = []
        for chunk in split(runs):
            narrow = [run for run in chunk if run[1] - run[0] < WIDE]
            wide = [run for run in chunk if run[1] - run[0] >= WIDE]
            # The primary key is forced: through a secondary index a dirty read misses rows.
            select = f"SELECT id, 0 FROM {self.source} FORCE INDEX (PRIMARY) WHERE"
            arms = [f"({select} {within(narrow)})"] if narrow else []
            arms += [f"({select} {within([run])} ORDER BY id LIMIT 1)" for run in wide]
            # The time is in UTC: in the session's zone, clocks may be set back and forth.
            now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
            arms.append(f"(SELECT IF({READ_ONLY}, -1, 0), {now})")
            found = self.dirty(" UNION ALL ".join(arms), [])
            # A primary may become a replica under a reader, and what it applies is seen late.
            if any(id < 0 for id, _ in found):
                raise refusal(is_replica(self.table))
            seen += [(id, id, None) for id, _ in found if id > 0]
        return sorted(seen), max(time for _, time in found) / 1_000_000

    def _settle(self, high: int, runs: Runs, seen: Runs, now: float) -> MysqlState:
        """Return the state, without the runs that count as never used."""
        kept: Runs = []
        for first, last, since in runs:
            if meets(seen, first, last):
                kept.append((first, last, None))
            elif since is None or since > now:
                kept.append((first, last, now))
            elif now - since < self.settle or not self._seal(first, last):
                kept.append((first, last, since))
        return MysqlState(high, kept)

    def _seal(self, first: int, last: int) -> bool:
        """Write tombstones if they are asked for. Returns whether the run is closed."""
        if not self.tombstones or last - first >= MAX_SEALED:
            return True
        own = [self.own_values() for _ in range(first, last + 1)]
        names = "".join(f", `{name}`" for name in own[0])
        # Tombstones are as old as the next event: new ones in the place of pruned events would hold
        # up the prune. The time is read apart: inside the INSERT it would wait for rows in flight.
        time = f"SELECT CAST(recorded_at AS CHAR) FROM {self.source}"
        after = self.run(f"{time} WHERE id > {last} ORDER BY id LIMIT 1", [])
        at = f"'{after[0][0]}'" if after else "DEFAULT"
        values = ", ".join(
            f"({id}, 0, '', '{TOMBSTONE}', {id}, '{TOMBSTONE}', '{{}}', '{{}}', 0, "
            f"REPLACE(UUID(), '-', ''), {at}{', %s' * len(own[0])})"
            for id in range(first, last + 1)
        )
        try:
            self.run(
                f"INSERT INTO {self.source} (id, txid, topic, stream, version, type, data, "
                f"metadata, slice, message_id, recorded_at{names}) VALUES {values}",
                [value for row in own for value in row.values()],
            )
        except Exception as error:
            if error.args[:1] == (1062,):  # duplicate: the position had a writer after all
                return False
            raise
        return True

    def _too_many(self, state: MysqlState) -> TooManyGaps:
        return TooManyGaps(
            f"{len(state.missing)} runs of positions are missing in {self.table} below "
            f"{state.high}, more than a cursor may keep ({MAX_RUNS}). Their transactions are in "
            "flight, or rolled back less than the settle time ago: look for a long transaction. "
            "Nothing is skipped; delivery continues by itself."
        )


def _page_of(rows: list[Any], limit: int, most: int) -> tuple[list[Any], bool]:
    """Return the rows up to the ``limit``-th wanted one, and whether more may follow."""
    wanted = 0
    for count, row in enumerate(rows[:most], 1):
        wanted += bool(row[1])
        if wanted == limit:
            return rows[:count], True
    return rows[:most], len(rows) >= most


def without(runs: Runs, holes: Runs) -> Runs:
    """Return the runs without the holes. Both are in order and do not overlap."""
    found: Runs = []
    for first, last, since in runs:
        begin = bisect_left(holes, first, key=itemgetter(1))
        for a, b, _ in holes[begin : bisect_right(holes, last, key=itemgetter(0))]:
            if first < a:
                found.append((first, a - 1, None))
            first, since = b + 1, None  # a row came: the rest of its run counts as seen
        if first <= last:
            found.append((first, last, since))
    return found


def joined(runs: Iterable[tuple[int, int, Any]], end: int) -> Runs:
    """Return the runs up to a position, in order; those that overlap or adjoin become one."""
    found: Runs = []
    for first, last in sorted((first, min(last, end)) for first, last, _ in runs if first <= end):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last), None)
        else:
            found.append((first, last, None))
    return found


def meets(runs: Runs, first: int, last: int) -> bool:
    at = bisect_left(runs, first, key=itemgetter(1))
    return at < len(runs) and runs[at][0] <= last


def within(runs: Iterable[tuple[int, int, Any]]) -> str:
    return " OR ".join(
        f"id = {first}" if first == last else f"id BETWEEN {first} AND {last}"
        for first, last, _ in runs
    )


def split(runs: Runs) -> Iterator[Runs]:
    for at in range(0, len(runs), CHUNK):
        yield runs[at : at + CHUNK]
