"""What ends a test that writes: its rows are deleted, and a failure costs that test alone.

Django's own teardown empties every table and sends ``post_migrate``, which writes each content type
and permission anew: most of the statements of a small test. Here these two tables keep their rows,
which no test changes, and only tables that have rows are emptied.

If a teardown breaks off, because its time is up or a lock is held, pytest-django leaves
transactions open and databases forbidden, and every later test fails. Here both end with the test.
"""

from __future__ import annotations

import contextlib
from typing import Any

import django.db
from django.core.management.color import no_style
from django.db import connections
from django.test import TransactionTestCase

#: Written once, by ``migrate``.
KEPT = {"django_migrations", "django_content_type", "auth_permission"}
_WITH_PAGES = (
    "SELECT relname FROM pg_class WHERE pg_table_is_visible(oid) "
    "AND relkind IN ('r', 'p') AND relname = ANY(%s) AND pg_relation_size(oid) > 0"
)
_OTHER_SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mysql": "SELECT id FROM information_schema.processlist "
    "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}
_END_SESSION = {"postgresql": "SELECT pg_terminate_backend({id})", "mysql": "KILL {id}"}


def replace_teardown() -> None:
    """Let tests that commit end with ``empty``, and failures with ``reset``."""
    post_teardown = TransactionTestCase._post_teardown

    def _post_teardown(case: Any) -> None:
        try:
            post_teardown(case)
        except BaseException:
            type(case).doClassCleanups()  # allows the other databases again
            reset()
            raise

    TransactionTestCase._fixture_teardown = _fixture_teardown  # type: ignore[method-assign]
    TransactionTestCase._post_teardown = _post_teardown  # type: ignore[method-assign]


def _fixture_teardown(case: Any) -> None:
    for using in case._databases_names(include_mirrors=False):
        empty(using)


def empty(using: str) -> None:
    """Delete all rows but those that ``migrate`` wrote."""
    connection = connections[using]
    tables = sorted({*connection.introspection.django_table_names()} - KEPT)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Dead rows count: the planner goes by a table's size.
            cursor.execute(_WITH_PAGES, [tables])
        else:
            there = {*connection.introspection.table_names(cursor)}
            quote = connection.ops.quote_name
            parts = (
                f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {quote(name)})"
                for name in tables
                if name in there
            )
            cursor.execute(" UNION ALL ".join(parts))
        written = [name for (name,) in cursor.fetchall()]
    if written:
        # CASCADE: PostgreSQL truncates no table that another one refers to, with rows or without.
        statements = connection.ops.sql_flush(no_style(), written, allow_cascade=True)
        connection.ops.execute_sql_flush(statements)


def reset() -> None:
    """Close every connection, in whatever state it is, and empty every database."""
    for connection in connections.all(initialized_only=True):
        connection.in_atomic_block = connection.needs_rollback = False
        connection.closed_in_transaction = False
        connection.savepoint_ids, connection.atomic_blocks = [], []
        connection.run_on_commit = []
        with contextlib.suppress(django.db.Error):
            connection.close()
        connection.connection = None
    for connection in connections.all():
        end_other_sessions(connection)
        with contextlib.suppress(django.db.Error):  # a server that is gone fails its own tests
            empty(connection.alias)


def cut_off(alias: str) -> None:
    """End all sessions of a database, as a server or a firewall does with those long idle."""
    with contextlib.closing(connections.create_connection(alias)) as other:
        end_other_sessions(other)


def end_other_sessions(connection: Any) -> None:
    if connection.vendor not in _OTHER_SESSIONS:
        return
    with contextlib.suppress(django.db.Error), connection.cursor() as cursor:
        cursor.execute(_OTHER_SESSIONS[connection.vendor])
        for (number,) in cursor.fetchall():
            with contextlib.suppress(django.db.Error):  # it has ended by itself
                cursor.execute(_END_SESSION[connection.vendor].format(id=number))
