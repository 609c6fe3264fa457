"""Open transactions of a server: those that have written, and those with an old snapshot.

A transaction that has written to a log delays only its own events. One with an old snapshot slows
the drain, whose batches read past the deleted rows that it may still see. Neither of the two loses
anything. If this database user may not see everything, ``denied`` says so, and nothing fails.
SQLite has no list of transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Model

#: The most transactions that are listed.
LISTED = 20
#: The text of ``denied`` on PostgreSQL.
HIDDEN = "Sessions of others: grant pg_read_all_stats."
#: MySQL's errors for a user without the privilege.
DENIED = (1044, 1142, 1227)


@dataclass(frozen=True, slots=True)
class LongTransaction:
    """An open transaction, in a session or prepared."""

    #: Process id of the session, or the name of the prepared transaction.
    id: str
    prepared: bool
    user: str
    #: Age since its first statement, or since it was prepared; None: this user may not see it.
    seconds: float | None
    state: str
    query: str

    @classmethod
    def of(cls, row: Sequence[Any]) -> LongTransaction:
        """Return the transaction of one row of a server's list. Any column may be NULL."""
        id, prepared, user, seconds, state, query = row
        age = None if seconds is None else max(0.0, float(seconds))
        return cls(str(id), bool(prepared), user or "", age, state or "", query or "")

    def __str__(self) -> str:
        what = "prepared transaction" if self.prepared else "session"
        age = "age not permitted to see" if self.seconds is None else f"{self.seconds:.0f} s"
        return f"{what} {self.id}, user {self.user or '?'}, {age}, {self.state}: {self.query}"


@dataclass(frozen=True, slots=True)
class LongTransactions:
    """Open transactions, the oldest first."""

    transactions: list[LongTransaction]
    #: What this user may not see, and the grant that is missing; empty: nothing is hidden.
    denied: str = ""


# A transaction that has written to a table holds this lock until its end. Every user may see it.
_POSTGRES_WRITERS = f"""
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

# VACUUM is a long transaction, too, but its snapshot keeps no rows.
_POSTGRES_SNAPSHOTS = f"""
SELECT pid::text, FALSE, usename, extract(epoch FROM clock_timestamp() - xact_start) AS age,
    state, left(query, 1000)
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
AND datname = current_database() AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum)
AND xact_start < clock_timestamp() - make_interval(secs => %s)
UNION ALL
SELECT gid, TRUE, owner, extract(epoch FROM clock_timestamp() - prepared), 'prepared', ''
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %s)
ORDER BY age DESC LIMIT {LISTED}
"""
_POSTGRES_HIDDEN = """
SELECT COUNT(*) FROM pg_stat_activity
WHERE datname = current_database() AND query = '<insufficient privilege>'
"""

# innodb_trx has its times in the zone of the server, not in that of the session.
_STARTED = "CONVERT_TZ(t.trx_started, 'SYSTEM', @@time_zone)"
# innodb_trx is a copy of InnoDB's list, and is refreshed only if it was not read for 0.1 s.
_MYSQL = f"""
SELECT t.trx_mysql_thread_id, t.trx_mysql_thread_id = 0, p.user,
    UNIX_TIMESTAMP() - UNIX_TIMESTAMP({_STARTED}), p.command, LEFT(p.info, 1000)
FROM information_schema.innodb_trx t
LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE t.trx_mysql_thread_id <> CONNECTION_ID() AND {{condition}}
ORDER BY t.trx_started LIMIT {LISTED}
"""


def open_writers(*models: type[Model], using: str) -> dict[str, LongTransactions]:
    """Return the open transactions that have written to the tables of models, by table.

    MySQL does not say to which table: there, all that have written anything to the database.
    """
    tables = [model._meta.db_table for model in models]
    if connections[using].vendor != "postgresql":
        wrote = "t.trx_rows_modified > 0 AND (p.db IS NULL OR p.db = DATABASE())"
        return dict.fromkeys(tables, _mysql(wrote, [], using))
    writers: dict[str, LongTransactions] = {}
    for table in tables:
        found = _listed(_POSTGRES_WRITERS, [table], using)
        hidden = any(each.seconds is None for each in found)
        writers[table] = LongTransactions(found, HIDDEN if hidden else "")
    return writers


def long_transactions(*, using: str, seconds: float) -> LongTransactions:
    """Return the transactions of the server that have been open for at least so many seconds."""
    if connections[using].vendor == "postgresql":
        found = _listed(_POSTGRES_SNAPSHOTS, [seconds, seconds], using)
        with connections[using].cursor() as cursor:
            cursor.execute(_POSTGRES_HIDDEN)
            [hidden] = cursor.fetchone()
        return LongTransactions(found, HIDDEN if hidden else "")
    return _mysql(f"{_STARTED} < NOW() - INTERVAL %s SECOND", [seconds], using)


def _mysql(condition: str, params: list[Any], using: str) -> LongTransactions:
    if connections[using].vendor != "mysql":
        return LongTransactions([])
    sql = _MYSQL.format(condition=condition)
    try:
        with transaction.atomic(using=using):  # a savepoint if a transaction is open
            return LongTransactions(_listed(sql, params, using))
    except DatabaseError as error:
        if error.args and error.args[0] in DENIED:
            return LongTransactions([], "Transactions in flight: grant PROCESS.")
        raise


def _listed(sql: str, params: list[Any], using: str) -> list[LongTransaction]:
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return [LongTransaction.of(row) for row in cursor.fetchall()]
