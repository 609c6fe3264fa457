"""What counts as the caller's transaction: an ``atomic()`` block of the running code.

``TestCase`` and pytest-django's ``db`` wrap a test in ``atomic()`` blocks of their own. These do
not count, as production has none; Django marks them (``durable=True`` relies on it). With
autocommit off, a transaction is open outside ``atomic()``, too. The predicates open no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.db.models.signals import post_migrate, pre_migrate
from django.dispatch import Signal, receiver
from django.http import HttpResponse

from ..conf import outbox_settings
from ..exceptions import NotAtomic, NotMigrated
from .tables import Tables

View = Callable[..., HttpResponse]


def is_atomic(using: str) -> bool:
    """Return whether an ``atomic()`` is open on an alias; one of a test case does not count."""
    blocks = connections[using].atomic_blocks
    return not all(block._from_testcase for block in blocks)  # type: ignore[attr-defined]


def lacks_autocommit(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a connection, once open, is in a transaction without an ``atomic()``."""
    if connection.in_atomic_block:
        return False
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def is_in_test(using: str) -> bool:
    """Return whether a test case has opened the outermost transaction on an alias."""
    blocks = connections[using].atomic_blocks
    return bool(blocks) and blocks[0]._from_testcase  # type: ignore[attr-defined]


def without_transaction(view: View) -> View:
    """Exempt a view from ``ATOMIC_REQUESTS``, so that it runs even if a database is unreachable."""
    for alias in connections:
        view = transaction.non_atomic_requests(alias)(view)
    return view


@contextmanager
def own_connection(using: str, *, seconds: float) -> Iterator[None]:
    """Use another connection for an alias, in this thread, as long as the block runs.

    Its writes are committed even if the transaction that is open outside rolls back. On SQLite a
    write waits for ``seconds`` at most: another writer, maybe the caller itself, blocks it.
    """
    outer, own = connections[using], connections.create_connection(using)
    leave_pool(own)
    connections[using] = own
    try:
        if not own.settings_dict["AUTOCOMMIT"]:
            own.set_autocommit(True)
        if own.vendor == "sqlite":
            with own.cursor() as cursor:
                cursor.execute(f"PRAGMA busy_timeout = {seconds * 1000:.0f}")
        yield
    finally:
        connections[using] = outer
        own.close()


def leave_pool(connection: BaseDatabaseWrapper) -> None:
    """Make the connection open outside Django's pool, with options of its own.

    The threads that wait for this one may hold all connections of the pool.
    """
    options = {k: v for k, v in connection.settings_dict["OPTIONS"].items() if k != "pool"}
    connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}


def open_transactions() -> list[str]:
    """Return the aliases on which the code of this thread has a transaction open."""
    return [
        c.alias
        for c in connections.all(initialized_only=True)
        if is_atomic(c.alias) or (c.connection is not None and lacks_autocommit(c))
    ]


@dataclass(frozen=True, slots=True)
class SavepointsBefore:
    """The set of savepoints, for ``run_on_commit``, whose rollback undoes what is written now.

    Django's own set has the savepoints of ``atomic()``, but not those of
    ``transaction.savepoint()``; Django asks it for each savepoint that is rolled back. A connection
    numbers both kinds in one sequence: a write is undone with any savepoint made before it.
    """

    newest: int

    def __contains__(self, sid: str) -> bool:
        number = sid.rpartition("_x")[2]
        return not number.isdecimal() or int(number) <= self.newest


def after_commit(call: Callable[[], object], *, using: str, robust: bool = False) -> None:
    """Call ``transaction.on_commit``; a rollback to any savepoint around the call drops it, too."""
    transaction.on_commit(call, using=using, robust=robust)
    connection: Any = connections[using]
    if connection.in_atomic_block:
        before = SavepointsBefore(connection.savepoint_state)
        connection.run_on_commit[-1] = (before, *connection.run_on_commit[-1][1:])


def send_inside(signal: Signal, sender: type, alias: str, /, **facts: Any) -> None:
    """Call ``send_robust``; raise a receiver's error if it has undone the open transaction.

    Otherwise the end of that transaction would be a rollback that raises nothing. A time limit of
    this thread's task is raised, too.
    """
    connection: Any = connections[alias]
    for _, error in signal.send_robust(sender, **facts):
        info = getattr(connection.connection, "info", None)
        # PostgreSQL's PQTRANS_INERROR.
        undone = connection.needs_rollback or getattr(info, "transaction_status", 0) == 3
        if connection.vendor == "mysql" and connection.in_atomic_block and not undone:
            code = error.args[:1] if isinstance(error, DatabaseError) else ()
            # A deadlock; and on MariaDB a row that has changed since it was read.
            undone = code in [(1213,), (1020,)]
            if code == (1205,):  # a lock timeout: the server's setting decides
                with connection.cursor() as cursor:
                    cursor.execute("SELECT @@innodb_rollback_on_timeout")
                    undone = bool(cursor.fetchone()[0])
        if isinstance(error, Exception if undone else SoftTimeLimitExceeded):
            raise error


#: Aliases on which ``migrate`` is running. Only there a table may be missing, and is looked for.
_migrating: set[str] = set()


@receiver(pre_migrate, dispatch_uid="outbox_app.database.transactions")
def _begin(using: str, **kwargs: Any) -> None:
    _migrating.add(using)


@receiver(post_migrate, dispatch_uid="outbox_app.database.transactions")
def _end(using: str, **kwargs: Any) -> None:
    _migrating.discard(using)


def require_table(model: type[Model], *, using: str, migration: str = "0001_initial") -> None:
    """Raise ``NotMigrated`` in a data migration that runs before the migration of the table.

    A failed INSERT would break the transaction, and its error would not say what to do.
    """
    table, app = model._meta.db_table, model._meta.app_label
    if using in _migrating and table not in Tables(connections[using]):
        raise NotMigrated(
            f"The table {table} does not exist yet on {using!r}. Let the migration that stages or "
            f'publishes depend on it: dependencies = [("{app}", "{migration}")].'
        )


def require_atomic(call: str, *, using: str) -> None:
    """Raise ``NotAtomic`` unless ``atomic()`` is open on ``using``, or OUTSIDE is "stage"."""
    if outbox_settings().OUTSIDE == "stage" or is_atomic(using):
        return
    where = "outside a transaction"
    if lacks_autocommit(connections[using]):
        where = "with autocommit off and outside atomic()"
    raise NotAtomic(
        f"{call} was called {where} on {using!r}. Wrap the work and the call in "
        f"transaction.atomic(using={using!r})."
    )
