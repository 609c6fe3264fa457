"""PostgreSQL: a window is the difference of two snapshots, in the order of positions.

The method of PgQ (Skytools; ``pgq.batch_event_sql``). What was committed is visible in every later
snapshot, and not in an earlier one: each row lies in exactly one window. When a window is opened
each of its transactions has ended, so it never changes; paging, crashes and retries read the same
rows. A snapshot is a consistent cut: what a row's writer could see is in no later window. A long
transaction delays its own rows only. Transaction ids are integers and are written into the SQL as
such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...exceptions import ForeignCursor, UnsafeLog
from ..cursor import BEGINNING, NEVER, PostgresState, Snapshot
from ..sql import Filter
from ..window import Page, Window

#: Seals what was read under an earlier cluster's transaction ids, twice.
ANCIENT = -(2**61)


class PostgresWindow(Window[PostgresState]):
    """Reads between two snapshots."""

    state = PostgresState

    def start(self, after: int | None = None) -> PostgresState:
        """See ``Window``."""
        now, cluster = self._snapshot()
        if after is None:
            return PostgresState(cluster, now.text)
        return PostgresState(cluster, BEGINNING, pos=after)

    def read(
        self, state: PostgresState, *, columns: Sequence[str], limit: int, only: Filter
    ) -> Page[PostgresState]:
        """See ``Window``."""
        if state.rebased:
            return self._read_rebased(state, columns=columns, limit=limit, only=only)
        if not state.hi:
            state = self._open(state)
            if not state.hi:
                return Page([], state, more=False)
        rows = self.run(*self._page(state, columns=columns, limit=limit, only=only))
        full = len(rows) == limit
        reached = rows[-1][columns.index("id")] if rows else 0
        if full:
            return Page(rows, replace(state, pos=reached), more=True, position=reached)
        done = PostgresState(state.cluster, state.hi)
        return Page(rows, done, more=bool(rows), position=max(reached, state.last))

    def unread(self, state: PostgresState) -> str:
        """See ``Window``."""
        lo = Snapshot.parse(state.lo)
        condition = f"(txid >= {lo.xmax} OR txid = ANY({_array(lo.running)}))"
        if state.hi:
            condition += f" AND NOT (id <= {state.pos} AND {_sees(Snapshot.parse(state.hi))})"
        elif state.pos:
            condition += f" AND id > {state.pos}"
        if state.rebased:
            condition = f"({condition} OR {self._due_before(state.rebased)})"
        return f"({condition})"

    def verify(self, state: PostgresState) -> None:
        """See ``Window``."""
        now, cluster = self._snapshot()
        self._require_own(state, now, cluster)

    def rebase(self, state: PostgresState) -> PostgresState:
        """Return the state that goes on in another cluster, once ``txid`` was negated there.

        What the old state had not passed is read first, by its own snapshots.
        """
        now, cluster = self._snapshot()
        old = {**asdict(state), "rebased": None}
        return PostgresState(cluster, now.text, rebased=old)

    def _open(self, state: PostgresState) -> PostgresState:
        """Take the later snapshot; return the state with a window open, or moved past nothing."""
        now, cluster = self._snapshot()
        self._require_own(state, now, cluster)
        lo = Snapshot.parse(state.lo)
        if now.text == lo.text:
            return state
        if lo.xmax == NEVER:
            # The whole table, from the front: an index range whatever is in it.
            first, last = state.pos + 1, self.run(f"SELECT max(id) FROM {self.source}", [])[0][0]
            return replace(state, hi=now.text, first=first, last=last or 0)
        # min(id + 0): as min(id) the planner may walk the primary key from the log's beginning.
        [(first, last)] = self.run(
            f"SELECT min(id + 0), max(id + 0) FROM {self.source} "
            f"WHERE txid >= {lo.xmax} AND txid < {now.xmax} AND {_not_running(now)}",
            [],
        )
        if first is None and not lo.running - now.running:
            return PostgresState(cluster, now.text)
        return replace(state, hi=now.text, pos=0, first=first or 1, last=last or 0)

    def _page(
        self, state: PostgresState, *, columns: Sequence[str], limit: int, only: Filter
    ) -> tuple[str, list[Any]]:
        """Return the SQL of a page: transactions begun since ``lo``, and those it saw running.

        The first walks the primary key between the window's bounds (``txid + 0`` keeps the planner
        from sorting the whole window for each page), the second one index range a transaction.
        """
        lo, hi = Snapshot.parse(state.lo), Snapshot.parse(state.hi)
        condition, params = only.sql()
        condition = condition and f"AND {condition}"
        names = ", ".join(columns)
        after = max(state.pos, state.first - 1)
        sql = (
            f"SELECT {names} FROM {self.source} WHERE id > {after} AND id <= {state.last} "
            f"AND txid + 0 >= {lo.xmax} AND txid + 0 < {hi.xmax} AND {_not_running(hi, 'txid + 0')}"
            f" {condition} ORDER BY id LIMIT {limit}"
        )
        ended = lo.running - hi.running
        if not ended:
            return sql, params
        return (
            f"SELECT {names} FROM (({sql}) UNION ALL "
            f"(SELECT u.* FROM unnest({_array(ended)}) AS ended (xid), LATERAL "
            f"(SELECT {names} FROM {self.source} WHERE txid = ended.xid AND id > {state.pos} "
            f"{condition} ORDER BY id LIMIT {limit}) u)) page ORDER BY id LIMIT {limit}",
            params * 2,
        )

    def _read_rebased(
        self, state: PostgresState, *, columns: Sequence[str], limit: int, only: Filter
    ) -> Page[PostgresState]:
        condition, params = only.sql()
        rows = self.run(
            f"SELECT {', '.join(columns)} FROM {self.source} "
            f"WHERE {self._due_before(state.rebased)} AND id > {state.pos} "
            f"{condition and f'AND {condition}'} ORDER BY id LIMIT {limit}",
            params,
        )
        reached = rows[-1][columns.index("id")] if rows else 0
        if len(rows) == limit:
            return Page(rows, replace(state, pos=reached), more=True, position=reached)
        done = replace(state, pos=0, rebased=None)
        return Page(rows, done, more=True, position=reached)

    def _due_before(self, rebased: Any) -> str:
        """Return the condition: not passed by a state of the earlier cluster."""
        condition = self.unread(PostgresState(**rebased)).replace("txid", "(-txid)")
        return f"(txid < 0 AND txid > {ANCIENT} AND {condition})"

    def _snapshot(self) -> tuple[Snapshot, str]:
        """Return what is committed now, and the identifier of the cluster.

        Raises:
            UnsafeLog: Nobody could tell from here.
        """
        [(text, in_transaction, standby, cluster)] = self.run(
            "SELECT pg_current_snapshot()::text, pg_current_xact_id_if_assigned() IS NOT NULL, "
            "pg_is_in_recovery(), (SELECT system_identifier::text FROM pg_control_system())",
            [],
        )
        if standby:
            raise UnsafeLog(
                f"{self.table} is read from a standby, whose snapshots do not list the running "
                "transactions. Read from the primary."
            )
        if in_transaction:
            raise UnsafeLog(
                f"{self.table} is read inside a transaction that has written, which would see its "
                "own rows as committed. Read in autocommit."
            )
        return Snapshot.parse(text), cluster

    def _require_own(self, state: PostgresState, now: Snapshot, cluster: str) -> None:
        known = Snapshot.parse(state.hi or state.lo)
        if state.cluster != cluster:
            raise ForeignCursor(
                f"The cursor of {self.table} was made in the database cluster {state.cluster}; "
                f"this is {cluster}: a dump was restored, or replication switched over. Its "
                "transaction ids mean nothing here. Run manage.py outbox_rebase."
            )
        if now.xmax < known.xmax:
            raise ForeignCursor(
                f"The cursor of {self.table} has seen transaction {known.xmax}; the cluster is at "
                f"{now.xmax}: it was set back. Run manage.py outbox_rebase."
            )


def _array(numbers: Iterable[int]) -> str:
    return f"'{{{','.join(map(str, sorted(numbers)))}}}'::bigint[]"


def _not_running(snapshot: Snapshot, column: str = "txid") -> str:
    return f"NOT ({column} = ANY({_array(snapshot.running)}))" if snapshot.running else "TRUE"


def _sees(snapshot: Snapshot) -> str:
    return f"txid < {snapshot.xmax} AND {_not_running(snapshot)}"
