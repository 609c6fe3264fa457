"""Sessions that hold an old snapshot, on the servers that have them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from uuid import uuid4

import pytest
from django.db import OperationalError, connections

from outbox_app.monitoring.long_transactions import long_transactions
from tests.faults.tools import eventually, on

from .test_open_writers import pid_of

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def reading(alias, *before):
    """A session that has read something at REPEATABLE READ, and does not end."""
    other = connections.create_connection(alias)
    try:
        with other.cursor() as cursor:
            for statement in before:
                cursor.execute(statement)
            if other.vendor == "mysql":
                cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            else:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT COUNT(*) FROM outbox_stagedjob")
        yield other
    finally:
        other.close()


def ids(alias, seconds):
    if connections[alias].vendor == "mysql":
        # Whoever asks InnoDB more often than every 0.1 s is shown the last answer.
        time.sleep(0.15)
    return [each.id for each in long_transactions(using=alias, seconds=seconds).transactions]


@on("postgres", "mariadb")
def test_a_session_that_only_reads_is_named(alias):
    with reading(alias) as other:
        pid = pid_of(other)
        eventually(lambda: pid in ids(alias, -2), "it is seen")
        assert pid not in ids(alias, 3600), "it is young"
    eventually(lambda: pid not in ids(alias, -2), "it has ended")


@on("mariadb")
@pytest.mark.parametrize("zone", ["+05:00", "-05:00"])
def test_a_session_in_another_zone_than_its_server(alias, zone):
    """The list has the times of the server's zone, whichever the session is in."""
    with reading(alias) as other, connections[alias].cursor() as cursor:
        pid = pid_of(other)
        cursor.execute("SET time_zone = %s", [zone])
        try:
            eventually(lambda: pid in ids(alias, -2), "it is seen")
            assert pid not in ids(alias, 3600), "it is young"
            listed = long_transactions(using=alias, seconds=-2).transactions
            assert [each.seconds < 3600 for each in listed if each.id == pid] == [True]
        finally:
            cursor.execute("SET time_zone = DEFAULT")


@on("postgres")
def test_a_prepared_transaction_is_named(alias):
    gid = f"kept-{uuid4().hex}"
    other = connections.create_connection(alias)
    try:
        with other.cursor() as cursor:
            cursor.execute("SHOW max_prepared_transactions")
            assert int(cursor.fetchone()[0]) > 0
            cursor.execute("BEGIN")
            cursor.execute("DELETE FROM outbox_stagedjob WHERE id = 0")
            cursor.execute("SELECT txid_current()")
            cursor.execute(f"PREPARE TRANSACTION '{gid}'")
        [holder] = [
            h for h in long_transactions(using=alias, seconds=0).transactions if h.id == gid
        ]
        assert holder.prepared
    finally:
        with other.cursor() as cursor:
            cursor.execute(f"ROLLBACK PREPARED '{gid}'")
        other.close()


@on("postgres")
def test_a_vacuum_is_not_named(alias):
    """It keeps no row: who ended it as told would keep all that it was to remove."""
    table = f"vacuumed_{uuid4().hex[:8]}"
    vacuum = threading.Thread(target=vacuumed, args=(alias, table))
    with connections[alias].cursor() as cursor:
        cursor.execute(f"CREATE TABLE {table} AS SELECT generate_series(1, 20000) AS n")
        try:
            vacuum.start()
            eventually(lambda: vacuuming(cursor, table), "it runs")
            seen = ids(alias, -2)
            [pid] = vacuuming(cursor, table)
            assert pid not in seen
        finally:
            for pid in vacuuming(cursor, table):
                cursor.execute("SELECT pg_cancel_backend(%s)", [int(pid)])
            vacuum.join()
            cursor.execute(f"DROP TABLE {table}")


def vacuumed(alias, table):
    other = connections.create_connection(alias)
    with suppress(OperationalError), other.cursor() as cursor:
        cursor.execute("SET vacuum_cost_delay = 100")
        cursor.execute("SET vacuum_cost_limit = 1")
        cursor.execute(f"VACUUM {table}")
    other.close()


def vacuuming(cursor, table):
    sql = "SELECT pid::text FROM pg_stat_progress_vacuum WHERE relid = to_regclass(%s)"
    cursor.execute(sql, [table])
    return [pid for (pid,) in cursor.fetchall()]


@on("postgres")
def test_what_may_not_be_seen_is_said(alias):
    """Without pg_read_all_stats a session of somebody else has no age and no query."""
    role = f"guest_{uuid4().hex[:12]}"
    with connections[alias].cursor() as cursor:
        cursor.execute(f'CREATE ROLE "{role}"')
        try:
            with reading(alias):
                assert long_transactions(using=alias, seconds=0).denied == ""
                cursor.execute(f'SET ROLE "{role}"')
                seen = long_transactions(using=alias, seconds=0)
                assert (seen.transactions, "pg_read_all_stats" in seen.denied) == ([], True)
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f'DROP ROLE "{role}"')


def test_sqlite_has_none_to_tell():
    found = long_transactions(using="default", seconds=0)
    assert (found.transactions, found.denied) == ([], "")
