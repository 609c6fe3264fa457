"""Sessions that hold an old snapshot: what they keep the server from cleaning up slows the drain.

A deleted row stays in the table and its indexes as long as a snapshot may still see it. One that is
held for hours, by a report or a forgotten shell, makes every batch of the job table read past the
rows of those hours. Nothing is lost by it, and SQLite has no such thing to tell.
"""

from __future__ import annotations

from django.db import DatabaseError, connections, transaction

from .lag import DENIED, LISTED, Holders, holder_of

#: Who pins the horizon: sessions in a transaction, prepared transactions, replication slots.
_POSTGRES = f"""
SELECT pid::text, FALSE, usename, extract(epoch FROM clock_timestamp() - xact_start) AS age,
    state, left(query, 1000)
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
AND datname = current_database()
AND xact_start < clock_timestamp() - make_interval(secs => %s)
UNION ALL
SELECT gid, TRUE, owner, extract(epoch FROM clock_timestamp() - prepared), 'prepared', ''
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %s)
ORDER BY age DESC LIMIT {LISTED}
"""
_HIDDEN = """
SELECT COUNT(*) FROM pg_stat_activity
WHERE datname = current_database() AND query = '<insufficient privilege>'
"""
_MYSQL = f"""
SELECT t.trx_mysql_thread_id, t.trx_mysql_thread_id = 0, p.user,
    UNIX_TIMESTAMP() - UNIX_TIMESTAMP(t.trx_started), p.command, LEFT(p.info, 1000)
FROM information_schema.innodb_trx t
LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE t.trx_mysql_thread_id <> CONNECTION_ID()
AND t.trx_started < NOW() - INTERVAL %s SECOND
ORDER BY t.trx_started LIMIT {LISTED}
"""


def old_snapshots(*, using: str, seconds: float) -> Holders:
    """Return the transactions of an alias's server that have been open for so long, oldest first.

    Args:
        using: Database alias.
        seconds: Age from which one is listed.
    """
    vendor = connections[using].vendor
    if vendor == "postgresql":
        sql, params = _POSTGRES, [seconds, seconds]
    elif vendor == "mysql":
        sql, params = _MYSQL, [seconds]
    else:
        return Holders([])
    try:
        # A savepoint where a transaction is open: it goes on.
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(sql, params)
            found = [holder_of(*row) for row in cursor.fetchall()]
            if vendor == "postgresql":
                cursor.execute(_HIDDEN)
                if cursor.fetchone()[0]:
                    return Holders(found, "Sessions of others: grant pg_read_all_stats.")
            return Holders(found)
    except DatabaseError as error:
        if error.args and error.args[0] in DENIED:
            return Holders([], "Transactions in flight: grant PROCESS.")
        raise
