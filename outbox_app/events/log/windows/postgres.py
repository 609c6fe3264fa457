"""PostgreSQL: a window is the difference of two snapshots, in the order of positions.

This is the method of PgQ (Skytools; ``pgq.batch_event_sql``). A committed transaction is visible in
every later snapshot and in no earlier one, so each row lies in exactly one window. When a window is
opened, all of its transactions have ended, so it never changes. A snapshot is a consistent cut: a
row is never in a later window than a row whose writer could see it. A long transaction delays only
its own rows. Transaction ids are integers, and are written into the SQL as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...exceptions import ForeignCursor, UnsafeLog
from ..filter import EventFilter
from ..requirements import require_exact
from ..state import BEGINNING, NEVER, PostgresState, Snapshot
from ..window import MAX_POSITIONS, Page, Window

#: A snapshot that sees all rows of an earlier cluster, and no row of this one:
#: ``transaction_ids`` has made the earlier cluster's ids 0 or negative.
REBASED = "1:1:"
#: SQL of the first transaction id that has not begun.
XMAX = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
#: SQL of a text that changes if the server may have forgotten commits, and at each checkpoint. The
#: connection does not show this: a pooler keeps it over a crash and a fail-over.
SERVER = (
    "(SELECT concat_ws(' ', extract(epoch FROM pg_control_last_modified), "
    "extract(epoch FROM pg_postmaster_start_time())) FROM pg_control_system())"
)


class PostgresWindow(Window[PostgresState]):
    state = PostgresState

    def start(self, after: int | None = None) -> PostgresState:
        now, cluster = self._snapshot()
        self._require_own_rows()
        if after is None:
            return PostgresState(cluster, now.text)
        return self._opened(PostgresState(cluster, BEGINNING), now, pos=after)

    def read(
        self, state: PostgresState, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> Page[PostgresState]:
        now = self._own_snapshot(state)
        if state.rebased:
            return self._read_rebased(state, columns=columns, limit=limit, only=only)
        if state.hi:
            page = self._read_window(state, columns=columns, limit=limit, only=only)
            if page.rows or page.state.hi:
                return page
            state = page.state
        state = self._open(state, now)
        if not state.hi:
            return Page([], state, more=False)
        return self._read_window(state, columns=columns, limit=limit, only=only)

    def unread(self, state: PostgresState) -> str:
        lo = Snapshot.parse(state.lo)
        condition = f"(txid >= {lo.xmax} OR txid = ANY({array(lo.running)}))"
        if state.hi:
            condition += f" AND NOT (id <= {state.pos} AND {sees(Snapshot.parse(state.hi))})"
        if state.rebased:
            condition = f"({condition} OR {self._due_before(state)})"
        return f"({condition})"

    def verify(self, state: PostgresState) -> None:
        self._own_snapshot(state)
        self._require_own_rows()
        require_exact("postgresql", self.table, self.run)

    def rebase(self, state: PostgresState, last: int | None = None) -> PostgresState:
        """Rows that the old state had not passed are read first, by its own snapshots."""
        if state.rebased:
            raise ForeignCursor(
                f"The cursor of {self.table} has not read all events that were left at its last "
                "rebase, so it cannot be rebased again. Replay the subscription from a position, "
                "or reset it."
            )
        _, cluster = self._snapshot()
        return PostgresState(cluster, REBASED, rebased=asdict(state))

    def _open(self, state: PostgresState, now: Snapshot) -> PostgresState:
        """Return the state with a window open up to ``now``; at ``now`` if it has no rows."""
        lo = Snapshot.parse(state.lo)
        if now.text == lo.text:
            return state
        if lo.xmax == NEVER:
            return self._opened(state, now)
        # min(id + 0): for min(id), the planner may walk the primary key from the log's beginning.
        [(first, last)] = self.run(
            f"SELECT min(id + 0), max(id + 0) FROM {self.source} "
            f"WHERE txid >= {lo.xmax} AND {sees(now)}",
            [],
        )
        if first is None and not lo.running - now.running:
            return PostgresState(state.cluster, now.text)
        return replace(state, hi=now.text, pos=0, first=first or 1, last=last or 0)

    def _opened(self, state: PostgresState, now: Snapshot, *, pos: int = 0) -> PostgresState:
        """Return the state with the first window open: the whole table after ``pos``."""
        sql = f"SELECT min(id), max(id) FROM {self.source} WHERE id > {pos}"
        [(first, last)] = self.run(sql, [])
        return replace(state, hi=now.text, pos=pos, first=first or pos + 1, last=last or 0)

    def _read_window(
        self, state: PostgresState, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> Page[PostgresState]:
        # A page passes a limited number of positions, even if a filter drops most rows.
        reach = state.after + MAX_POSITIONS
        sql, params = self._page(state, reach, columns=columns, limit=limit, only=only)
        rows = self.run(sql, params)
        reached = rows[-1][columns.index("id")] if rows else 0
        if len(rows) == limit:
            return Page(rows, replace(state, pos=reached), more=True, position=reached)
        if reach < state.last:
            if not rows:  # pass a gap of any size at once
                gap = f"SELECT min(id) - 1 FROM {self.source} WHERE id > {reach}"
                [(reach,)] = self.run(gap, [])
            if reach is not None:
                return Page(rows, replace(state, pos=reach), more=True, position=reach)
        done = PostgresState(state.cluster, state.hi)
        return Page(rows, done, more=bool(rows), position=max(reached, state.last))

    def _page(
        self,
        state: PostgresState,
        reach: int,
        *,
        columns: Sequence[str],
        limit: int,
        only: EventFilter,
    ) -> tuple[str, list[Any]]:
        """Return the SQL of a page: transactions begun since ``lo``, and those it saw running.

        The first part walks the primary key between the window's bounds, the second reads one index
        range per transaction. The planner expects half of the rows to meet a CASE. It would expect
        few to meet the bare conditions, and read and sort the whole window for each page.
        """
        lo, hi = Snapshot.parse(state.lo), Snapshot.parse(state.hi)
        condition, params = only.sql()
        condition = condition and f"AND {condition}"
        names = ", ".join(columns)
        upto = f"AND id <= {reach}" if reach < state.last else ""
        sql = (
            f"SELECT {names} FROM {self.source} "
            f"WHERE id > {state.after} AND id <= {min(reach, state.last)} "
            f"AND CASE WHEN txid >= {lo.xmax} AND {sees(hi)} {condition} THEN TRUE ELSE FALSE END "
            f"ORDER BY id LIMIT {limit}"
        )
        ended = lo.running - hi.running
        if not ended:
            return sql, params
        return (
            f"SELECT {names} FROM (({sql}) UNION ALL "
            f"(SELECT u.* FROM unnest({array(ended)}) AS ended (xid), LATERAL "
            f"(SELECT {names} FROM {self.source} "
            f"WHERE txid = ended.xid AND id > {state.pos} {upto} {condition} "
            f"ORDER BY id LIMIT {limit}) u)) page ORDER BY id LIMIT {limit}",
            params * 2,
        )

    def _read_rebased(
        self, state: PostgresState, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> Page[PostgresState]:
        condition, params = only.sql()
        rows = self.run(
            f"SELECT {', '.join(columns)} FROM {self.source} "
            f"WHERE {self._due_before(state)} {condition and f'AND {condition}'} "
            f"ORDER BY id LIMIT {limit}",
            params,
        )
        reached = rows[-1][columns.index("id")] if rows else 0
        after = replace(state, pos=reached) if len(rows) == limit else replace(state, rebased=None)
        return Page(rows, after, more=True, position=reached)

    def _due_before(self, state: PostgresState) -> str:
        """Return the condition for rows that neither this state nor the earlier one has passed."""
        old = PostgresState(**state.rebased)
        lo = Snapshot.parse(old.lo)
        condition = f"(txid <= {-lo.xmax} OR txid = ANY({array(-xid for xid in lo.running)}))"
        if old.hi:
            hi = Snapshot.parse(old.hi)
            running = array(-xid for xid in hi.running)
            seen = f"txid > {-hi.xmax} AND NOT (txid = ANY({running}))"
            condition += f" AND NOT (id <= {old.pos} AND {seen})"
        return f"(txid <= 0 AND id > {state.pos} AND {condition})"

    def _snapshot(self) -> tuple[Snapshot, str]:
        """Return the present snapshot and the cluster's identifier. Raises ``UnsafeLog``."""
        # Row-level security hides rows, unless a policy of the user's shows all of them.
        [(text, in_transaction, standby, cluster, hides)] = self.run(
            "SELECT pg_current_snapshot()::text, pg_current_xact_id_if_assigned() IS NOT NULL, "
            "pg_is_in_recovery(), (SELECT system_identifier::text FROM pg_control_system()), "
            f"row_security_active('{self.source}'::regclass) AND NOT EXISTS (SELECT FROM pg_policy "
            f"WHERE polrelid = '{self.source}'::regclass AND polcmd IN ('r', '*') AND EXISTS ("
            "SELECT FROM unnest(polroles) id WHERE id = 0 OR pg_has_role(id, 'USAGE')) "
            "HAVING bool_or(pg_get_expr(polqual, polrelid) = 'true') AND bool_and(polpermissive))",
            [],
        )
        if standby:
            raise UnsafeLog(
                f"{self.table} is read from a standby, whose snapshots do not list the running "
                "transactions. Read from the primary."
            )
        if hides:
            raise UnsafeLog(
                f"Row-level security may hide events of {self.table} from this database user, and "
                "they would be passed over. Let the user see all: no RESTRICTIVE policy, and "
                f"CREATE POLICY all_events ON {self.source} FOR SELECT TO … USING (true)."
            )
        if in_transaction:
            raise UnsafeLog(
                f"{self.table} is read inside a transaction that has written, which would see its "
                "own rows as committed. Read in autocommit."
            )
        return Snapshot.parse(text), cluster

    def _own_snapshot(self, state: PostgresState) -> Snapshot:
        """Return the present snapshot; check that the state is an earlier one of this cluster."""
        now, cluster = self._snapshot()
        known = Snapshot.parse(state.hi or state.lo)
        if state.cluster != cluster:
            raise ForeignCursor(
                f"The cursor of {self.table} was made in the database cluster {state.cluster}; "
                f"this is {cluster}: a dump was restored, or replication switched over. The "
                "cursor's transaction ids are invalid here. Run manage.py outbox_rebase."
            )
        if now.xmax < known.xmax:
            raise ForeignCursor(
                f"The cursor of {self.table} has seen transaction {known.xmax}, but the cluster is "
                f"at {now.xmax}: the cluster was set back. Run manage.py outbox_rebase."
            )
        return now

    def _require_own_rows(self) -> None:
        """Check, by one look at an index, that no row has a transaction id not begun yet."""
        [(top, xmax)] = self.run(f"SELECT max(txid), {XMAX} FROM {self.source}", [])
        if top is not None and top >= xmax:
            raise ForeignCursor(
                f"{self.table} holds rows of transaction {top}, but the cluster is at {xmax}: a "
                "dump was restored, replication switched over, or the cluster was set back. Run "
                "manage.py outbox_rebase."
            )


def array(numbers: Iterable[int]) -> str:
    return f"'{{{','.join(map(str, sorted(numbers)))}}}'::bigint[]"


def sees(snapshot: Snapshot) -> str:
    """Return the SQL condition for rows that a snapshot sees."""
    return f"txid < {snapshot.xmax} AND NOT (txid = ANY({array(snapshot.running)}))"
