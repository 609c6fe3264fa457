"""How far a cursor is behind, and which transactions are in flight on a log.

What is behind is counted up to a bound: no more rows than that are looked at, each through an
index, whatever the backlog or the filter. A transaction in flight delays its own events only, but
for these it is what everybody waits for. It is found through the lock that whoever has written to a
table holds on it (PostgreSQL), or among all that have written anything (MySQL, which does not say
where). What this database user may not see is said to be not permitted; nothing fails for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Model

from .filter import EventFilter
from .reader import LogReader
from .state import PostgresState, Snapshot, WindowState
from .window import TOMBSTONE

#: Cursors of one statement. SQLite takes 500 at most.
CHUNK = 100
#: Transactions in flight that are listed.
LISTED = 20
#: What MySQL answers to who may not look.
DENIED = (1044, 1142, 1227)


@dataclass(frozen=True, slots=True)
class Behind:
    """What a cursor has not passed."""

    #: Events that it wants, among those that were looked at.
    rows: int
    #: Whether there are none beyond those.
    complete: bool
    #: Position of the first of them, 0 where there is none.
    first: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A transaction in flight that has written, in a session or prepared."""

    #: Process id of the session, or the name of the prepared transaction.
    id: str
    prepared: bool
    user: str
    #: Since its first statement, or since it was prepared; None: not permitted.
    seconds: float | None
    state: str
    query: str

    def __str__(self) -> str:
        what = "prepared transaction" if self.prepared else "session"
        age = "for a time not permitted to see" if self.seconds is None else f"{self.seconds:.0f} s"
        return f"{what} {self.id}, user {self.user or '?'}, {age}, {self.state}: {self.query}"


@dataclass(frozen=True, slots=True)
class Holders:
    """Transactions in flight, the oldest first."""

    holders: list[Holder]
    #: What could not be seen, and why; empty: nothing.
    denied: str = ""


def behind(
    reader: LogReader, cursors: Sequence[tuple[WindowState, EventFilter]], *, bound: int
) -> list[Behind]:
    """Return for each cursor of a log what it has not passed.

    Args:
        reader: Of the log.
        cursors: State and filter of each.
        bound: Rows to look at for each.
    """
    found: list[Behind] = []
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
        with connections[reader.using].cursor() as cursor:
            cursor.execute(" UNION ALL ".join(parts), params)
            for number, looked_at, rows, first in sorted(cursor.fetchall()):
                state = cursors[start + number][0]
                complete = looked_at <= bound and not _is_cut(state, bound)
                found.append(Behind(min(rows, bound), complete, first or 0))
    return found


def holders(log: type[Model], *, using: str) -> Holders:
    """Return which transactions are in flight that have written to a log, or to another table.

    On MySQL: that have written anything to its database. SQLite does not say.
    """
    vendor = connections[using].vendor
    if vendor == "postgresql":
        return _postgres_holders(log._meta.db_table, using)
    return _mysql_holders(using) if vendor == "mysql" else Holders([])


def _ahead(reader: LogReader, state: WindowState, limit: int) -> str:
    """Return SQL for about ``limit`` rows that were not passed, the oldest among them."""
    select = f"SELECT id, topic, type, slice FROM {reader.window.source} WHERE"
    if not isinstance(state, PostgresState) or state.rebased:
        return f"{select} {reader.window.unread(state)} ORDER BY id LIMIT {limit}"
    # As one condition the planner would take the whole table into its hands: an index range each.
    arms = []
    later = Snapshot.parse(state.lo)
    if state.hi:
        lo, later = later, Snapshot.parse(state.hi)
        after = max(state.pos, state.first - 1)
        # The planner does not know how many rows of the window are its own: bounded by positions.
        arms.append(
            f"{select} id > {after} AND id <= {state.last} AND id <= 2 * {limit} + "
            f"(SELECT COALESCE(MIN(id), 0) FROM {reader.window.source} WHERE id > {after}) "
            f"AND txid + 0 >= {lo.xmax} AND txid + 0 < {later.xmax} "
            f"AND NOT (txid + 0 = ANY({_array(later.running)})) ORDER BY id LIMIT {limit}"
        )
        ended = lo.running - later.running
        arms.append(
            f"{select} txid = ANY({_array(ended)}) AND id > {state.pos} ORDER BY id LIMIT {limit}"
        )
    arms.append(f"{select} txid = ANY({_array(later.running)}) ORDER BY id LIMIT {limit}")
    arms.append(f"{select} txid >= {later.xmax} ORDER BY txid, id LIMIT {limit}")
    return " UNION ALL ".join(f"({arm})" for arm in arms)


def _is_cut(state: WindowState, bound: int) -> bool:
    """Say whether the open window may reach further than ``_ahead`` looks."""
    if not isinstance(state, PostgresState) or not state.hi:
        return False
    return state.last - max(state.pos, state.first - 1) > 2 * bound


def _array(numbers: frozenset[int]) -> str:
    return f"'{{{','.join(map(str, sorted(numbers)))}}}'::bigint[]"


#: Whoever has written to a table holds this lock on it to the end; everybody may see locks.
_POSTGRES = f"""
WITH writers AS (
    SELECT pid, virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND relation = to_regclass(quote_ident(%s::text)) AND pid IS DISTINCT FROM pg_backend_pid()
)
SELECT w.pid::text, FALSE, a.usename, extract(epoch FROM clock_timestamp() - a.xact_start),
    a.state, left(a.query, 1000)
FROM writers w LEFT JOIN pg_stat_activity a ON a.pid = w.pid WHERE w.pid IS NOT NULL
UNION ALL
SELECT p.gid, TRUE, p.owner, extract(epoch FROM clock_timestamp() - p.prepared), 'prepared', ''
FROM writers w
JOIN pg_locks t ON t.virtualtransaction = w.virtualtransaction AND t.pid IS NULL
    AND t.locktype = 'transactionid' AND t.mode = 'ExclusiveLock'
JOIN pg_prepared_xacts p ON p.transaction = t.transactionid
WHERE w.pid IS NULL
ORDER BY 4 DESC NULLS LAST LIMIT {LISTED}
"""


def _postgres_holders(table: str, using: str) -> Holders:
    with connections[using].cursor() as cursor:
        cursor.execute(_POSTGRES, [table])
        found = [holder_of(*row) for row in cursor.fetchall()]
    hidden = any(holder.seconds is None for holder in found)
    return Holders(found, "Sessions of others: grant pg_read_all_stats." if hidden else "")


# The list is a copy of InnoDB's, which is made anew only where nobody has asked for 0.1 s.
_MYSQL = f"""
SELECT t.trx_mysql_thread_id, t.trx_mysql_thread_id = 0, p.user,
    UNIX_TIMESTAMP() - UNIX_TIMESTAMP(t.trx_started), p.command, LEFT(p.info, 1000)
FROM information_schema.innodb_trx t
LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE t.trx_rows_modified > 0 AND t.trx_mysql_thread_id <> CONNECTION_ID()
AND (p.db IS NULL OR p.db = DATABASE())
ORDER BY t.trx_started LIMIT {LISTED}
"""


def _mysql_holders(using: str) -> Holders:
    try:
        # A savepoint where a transaction is open: it goes on.
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(_MYSQL)
            return Holders([holder_of(*row) for row in cursor.fetchall()])
    except DatabaseError as error:
        if error.args and error.args[0] in DENIED:
            return Holders([], "Transactions in flight: grant PROCESS.")
        raise


def holder_of(id: Any, prepared: Any, user: Any, seconds: Any, state: Any, query: Any) -> Holder:
    """Return a row of what a server says of its transactions; any of it may be NULL."""
    return Holder(
        id=str(id),
        prepared=bool(prepared),
        user=user or "",
        seconds=None if seconds is None else max(0.0, float(seconds)),
        state=state or "",
        query=query or "",
    )
