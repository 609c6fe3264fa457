"""Bounds how long a transaction waits for locks, so that none hangs on a stopped process.

A wait that takes longer is an ``OperationalError``, and its transaction is rolled back. On SQLite
the connection's own ``timeout`` bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import django.db
from django.db import connections, transaction


@contextmanager
def atomic_with_lock_wait(seconds: int, *, using: str) -> Iterator[None]:
    """Run a transaction that waits for each lock for so many seconds at most."""
    connection = connections[using]
    if connection.vendor != "mysql":
        with transaction.atomic(using=using):
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(f"SET LOCAL lock_timeout = '{seconds}s'")
            yield
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SET @outbox_lock_wait = @@SESSION.innodb_lock_wait_timeout, "
            f"SESSION innodb_lock_wait_timeout = {seconds}"
        )
    try:
        with transaction.atomic(using=using):
            yield
    finally:
        with suppress(django.db.Error), connection.cursor() as cursor:  # it may be gone
            cursor.execute("SET SESSION innodb_lock_wait_timeout = @outbox_lock_wait")
