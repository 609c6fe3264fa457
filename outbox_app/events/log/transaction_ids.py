"""Transaction ids of a restored log: those of another PostgreSQL cluster, or of this one's past.

Such an id means nothing in this cluster, which may give it out again. So it is negated: rows of an
earlier cluster have ids below 1, where no snapshot of this cluster looks, and older cursors still
find out by the negated ids which rows they have passed (``PostgresWindow.rebase``). An id that was
negated before becomes 0, which every snapshot sees: only a cursor from the beginning has not passed
its rows. Other databases have no such ids; there these functions do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from django.db import connections

from ..exceptions import ForeignCursor, ReadRefused
from .reader import LogReader
from .state import PostgresState, Snapshot, WindowState
from .windows.postgres import XMAX

#: Rows renumbered by one statement.
BATCH = 50_000


def is_foreign(reader: LogReader, states: list[WindowState], last: int | None = None) -> bool:
    """Return whether a log, or one of its cursors, is from another cluster or another past.

    If cursors are positions, a cursor beyond ``last`` is, too: its position was given out again.
    Raises ``ReadRefused`` if this server cannot tell, as a standby cannot.
    """
    try:
        if not states and reader.vendor == "postgresql":
            reader.window.start()  # refuses rows of transactions that have not begun
        for state in states:
            reader.window.verify(state)
    except ForeignCursor:
        return True
    if last is None or reader.window.state is PostgresState:
        return False
    return any(reader.window.rebase(state, last) != state for state in states)


def require_unwritten(reader: LogReader, last: int) -> None:
    """Check that no row up to a position was written in this cluster.

    Rows that a restore inserted have the restore's transaction in their system column ``xmin``. A
    row of this cluster has its own ``txid`` there; or, if it was written under a savepoint, a
    higher id, and a ``txid`` that is later than the primary key, which a restore creates after the
    rows. Raises ``ReadRefused``.
    """
    if reader.vendor != "postgresql":
        return
    now = f"(SELECT {XMAX})"
    full = f"({now} - (({now} - xmin::text::bigint) & 4294967295))"
    key = f"indrelid = '{reader.window.source}'::regclass AND indisprimary"
    [(own,)] = reader.run(
        "SELECT min(first) FROM (SELECT min(id) AS first "
        f"FROM {reader.window.source} WHERE id <= {last} AND txid > 0 "
        "GROUP BY xmin HAVING bool_and(xmin::text::bigint = txid & 4294967295) "
        "OR min(txid) = max(txid) AND min(txid) BETWEEN "
        f"(SELECT {full} FROM pg_index WHERE {key}) AND {full}) here",
        [],
    )
    if own is not None:
        raise ReadRefused(
            f"Position {own} of {reader.table} seems to have been written in this cluster, after "
            "the restore. If so, name the last position from before the restore: --last-id "
            f"{own - 1}; if no event was published here since: --last-id {last}. After pg_upgrade, "
            "which keeps transaction ids, use --upgraded."
        )


def require_all(reader: LogReader, last: int) -> None:
    """Check, as far as ``txid`` tells, that no row after a position is from before the restore."""
    if reader.vendor != "postgresql":
        return
    newest = f"SELECT max(txid), {XMAX} FROM {reader.window.source} WHERE id > {last}"
    [(alien, xmax)] = reader.run(newest, [])
    if alien is not None and alien >= xmax:
        raise ReadRefused(
            f"{reader.table} has rows after position {last} of transaction {alien}, which this "
            f"cluster, at {xmax}, has not begun: the rows are from before the restore. Give a "
            "higher --last-id."
        )


def renumber(reader: LogReader, last: int) -> Iterator[int]:
    """Negate the transaction ids of the rows up to a position, in key order, in one transaction.

    Yields each position that it reaches. Nothing marks the rows that are done: commit all or none.
    """
    assert connections[reader.using].in_atomic_block
    if reader.vendor != "postgresql":
        return
    table, reached = reader.window.source, 0
    while True:
        ids = f"SELECT id FROM {table} WHERE id > {reached} AND id <= {last}"
        sql = f"SELECT max(id) FROM ({ids} ORDER BY id LIMIT {BATCH}) batch"
        [(end,)] = reader.run(sql, [])
        if end is None:
            return
        reader.run(
            f"UPDATE {table} SET txid = CASE WHEN txid > 0 THEN -txid ELSE 0 END "
            f"WHERE id > {reached} AND id <= {end}",
            [],
        )
        reached = end
        yield reached


def adopt(reader: LogReader, state: WindowState) -> WindowState:
    """Return the state for a cluster that continues the old one's ids. Raises ``ReadRefused``."""
    if not isinstance(state, PostgresState):
        return state
    here = reader.window.start()  # refuses rows of transactions that this cluster has not begun
    assert isinstance(here, PostgresState)
    known = Snapshot.parse(state.hi or state.lo).xmax
    if known > Snapshot.parse(here.lo).xmax:
        raise ReadRefused(
            f"A cursor of {reader.table} has seen transaction {known}, which this cluster has not "
            "begun: it does not continue the ids of the old cluster. Leave --upgraded out."
        )
    return replace(state, cluster=here.cluster)
