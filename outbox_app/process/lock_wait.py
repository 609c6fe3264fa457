"""Bounds how long a transaction waits for locks, so that none hangs on a stopped process.

A wait that takes longer is an ``OperationalError``, and its transaction is rolled back. On SQLite
the connection's own ``timeout`` bounds it.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import django.db
from django.db import connections, transaction

#: Deadlocks, lock time-outs and snapshots that are too old, by SQLSTATE or MySQL's number.
CONFLICTS = {"40001", "40P01", "55P03", 1020, 1205, 1213}
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_LOCKS = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|CALL)\b", re.IGNORECASE)
#: How many such transactions are open: an ``on_commit`` callback may begin one inside another.
_nesting = threading.local()


@contextmanager
def atomic_with_lock_wait(
    seconds: float | None, *, using: str, read_committed: bool = False
) -> Iterator[None]:
    """Run a transaction that waits for each lock for so many seconds at most.

    On MySQL and MariaDB they are rounded up to whole ones. With None the connection's own hold.
    With ``read_committed`` that is its level, where no transaction is open, and not the level that
    the alias or the role has.
    """
    connection: Any = connections[using]
    outermost = connection.get_autocommit()
    sets_level = read_committed and outermost
    if connection.vendor != "mysql":
        before = None
        with transaction.atomic(using=using):
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    if sets_level:
                        cursor.execute(READ_COMMITTED)
                    if seconds is not None:
                        if not outermost:  # the savepoint's end would leave the caller this bound
                            cursor.execute("SHOW lock_timeout")
                            [before] = cursor.fetchone()
                        milliseconds = max(1, round(seconds * 1000))
                        cursor.execute(f"SET LOCAL lock_timeout = {milliseconds}")
            yield
            if before is not None and not connection.needs_rollback:
                with connection.cursor() as cursor:
                    cursor.execute(f"SET LOCAL lock_timeout = '{before}'")
        return
    if sets_level and connection.isolation_level != "read committed":
        with connection.cursor() as cursor:
            cursor.execute(READ_COMMITTED)
    if seconds is None:
        with transaction.atomic(using=using):
            yield
        return
    if connection.mysql_is_mariadb:  # each statement bears its bound, at no cost
        bound = f"SET STATEMENT innodb_lock_wait_timeout = {max(1, math.ceil(seconds))} FOR "

        def bounded(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
            bears = isinstance(sql, str) and _LOCKS.match(sql)
            return execute(bound + sql if bears else sql, params, many, context)

        with transaction.atomic(using=using), connection.execute_wrapper(bounded):
            yield
        return
    depth = _nesting.depth = getattr(_nesting, "depth", 0) + 1
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SET @outbox_lock_wait_{depth} = @@SESSION.innodb_lock_wait_timeout, "
                f"SESSION innodb_lock_wait_timeout = {max(1, math.ceil(seconds))}"
            )
        with transaction.atomic(using=using):
            yield
    finally:
        _nesting.depth = depth - 1
        # After a deadlock Django refuses statements, and the session is the caller's.
        broken, connection.needs_rollback = connection.needs_rollback, False
        if connection.connection is not None:  # a new one would have its own bound
            with suppress(django.db.Error), connection.cursor() as cursor:  # it may be gone
                cursor.execute(f"SET SESSION innodb_lock_wait_timeout = @outbox_lock_wait_{depth}")
        connection.needs_rollback = broken


def sqlstate(error: Exception) -> str | None:
    """Return PostgreSQL's code of an error of the database; None where the server gave none."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def is_conflict(error: Exception) -> bool:
    """Say whether a transaction was refused because of another one, and may be done anew."""
    if not isinstance(error, django.db.Error):  # it may hold anything
        return False
    codes = [sqlstate(error), *error.args[:1]]
    return not CONFLICTS.isdisjoint(codes) or "database is locked" in str(error)
