"""Bounds how long a transaction waits for locks, so that none hangs on a stopped process.

A longer wait raises ``OperationalError``, and the transaction is rolled back. On SQLite the
connection's own ``timeout`` is the bound.
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

#: SQLSTATEs, or MySQL's numbers, of deadlocks, lock timeouts and old snapshots.
#: MySQL has an own one for NOWAIT, 3572.
CONFLICTS = {"40001", "40P01", "55P03", 1020, 1205, 1213, 3572}
#: Those of lock timeouts and of NOWAIT: a savepoint undoes their statement.
LOCK_TIMEOUTS = {"55P03", 1205, 3572}
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_LOCKS = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|CALL)\b", re.IGNORECASE)
#: Counts the open blocks of a thread: an ``on_commit`` callback may begin one inside another.
_nesting = threading.local()


@contextmanager
def atomic_with_lock_wait(
    seconds: float | None, *, using: str, read_committed: bool = False
) -> Iterator[None]:
    """Run a transaction that waits at most so many seconds for each lock.

    They are rounded up to whole seconds for MySQL and MariaDB. None leaves the connection's own
    bound. With ``read_committed``, and if no transaction is open yet, that is the transaction's
    isolation level, instead of the level of the alias or the role.
    """
    connection: Any = connections[using]
    outermost = connection.get_autocommit()
    sets_level = read_committed and outermost
    is_mysql = connection.vendor == "mysql"
    if is_mysql and sets_level and connection.isolation_level != "read committed":
        with connection.cursor() as cursor:
            cursor.execute(READ_COMMITTED)
    if not is_mysql or seconds is None:
        before = None
        with transaction.atomic(using=using):
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    if sets_level:
                        cursor.execute(READ_COMMITTED)
                    if seconds is not None:
                        if not outermost:  # the caller would keep the new bound
                            cursor.execute("SHOW lock_timeout")
                            [before] = cursor.fetchone()
                        milliseconds = max(1, round(seconds * 1000))
                        cursor.execute(f"SET LOCAL lock_timeout = {milliseconds}")
            yield
            if before is not None and not connection.needs_rollback:
                with connection.cursor() as cursor:
                    cursor.execute(f"SET LOCAL lock_timeout = '{before}'")
        return
    if connection.mysql_is_mariadb:  # each statement sets its bound itself, at no cost
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
        # After a deadlock Django refuses statements, but the caller's session needs its bound.
        broken, connection.needs_rollback = connection.needs_rollback, False
        if connection.connection is not None:  # a new one has its own bound
            with suppress(django.db.Error), connection.cursor() as cursor:  # it may be lost
                cursor.execute(f"SET SESSION innodb_lock_wait_timeout = @outbox_lock_wait_{depth}")
        connection.needs_rollback = broken


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of PostgreSQL; None if the server sent none."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def codes_of(error: BaseException) -> set[str | int]:
    """Return the SQLSTATE, or MySQL's number, of an error. The project's errors hold anything."""
    codes = sqlstate(error), *error.args[:1]
    return {code for code in codes if isinstance(code, str | int)}


def is_conflict(error: BaseException) -> bool:
    """Return whether a transaction failed because of another one, and may be repeated."""
    if not isinstance(error, django.db.Error):
        return False
    return not CONFLICTS.isdisjoint(codes_of(error)) or "database is locked" in str(error)


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether a statement has not got its lock; a savepoint around it may be intact."""
    return is_conflict(error) and (CONFLICTS - LOCK_TIMEOUTS).isdisjoint(codes_of(error))
