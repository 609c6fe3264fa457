"""``guarded``: runs code of the project inside a transaction of ours, and notices if it ended it.

A handler's effects are committed with its cursor, an idempotent task's with its job id. A COMMIT in
between, or a statement that commits by itself (DDL on MySQL), commits some effects without the
rest. That is noticed at the end, because a savepoint that was made at the start is gone, after a
statement, a procedure, or the driver's own connection has ended the transaction. It cannot be
undone then, only reported: ``TransactionEnded``. One case is not told apart: on MySQL and MariaDB,
a deadlock after the code has ended its transaction.
"""

from __future__ import annotations

import sqlite3
import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import django.db
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections

from ..exceptions import OutboxError, TransactionEnded
from .lock_wait import codes_of, sqlstate

#: Errors with which MySQL rolls back the whole transaction.
_UNDONE = {1020, 1205, 1213}
#: Errors of a savepoint that no longer exists.
_GONE = {"3B001", "25P01", 1305}
#: SQLSTATEs of idle_in_transaction_session_timeout and transaction_timeout: InternalError.
_TOOK_TOO_LONG = ("25P03", "25P04")
#: Errors of a lost connection, which the guarded code has not caused.
LOST = (django.db.OperationalError, django.db.InterfaceError)
#: MySQL's and MariaDB's errors of the server or of a session. With those of the connection (2000 to
#: 2999) they are all that are not of a row: mysqlclient raises one class for both.
_OF_THE_SERVER = {
    *(1016, 1021, 1030, 1037, 1038, 1041, 1114, 1135, 1712, 1877),  # full, out of memory, damaged
    *(1040, 1042, 1043, 1044, 1045, 1129, 1130, 1203, 1226, 1820, 1862),  # no session
    *(1047, 1053, 1290, 1792, 1836, 3032),  # not ready, shut down, read-only, offline
    *(*range(1152, 1162), 1184, 1317, 1927, 1969, 3024, 3169, 4031),  # broken off, killed, too long
    *(1180, 1181, 3100, 3101),  # COMMIT failed
    *(1020, 1205, 1206, 1213, 1297, 1412, 1615, 3058, 3572),  # another transaction, or DDL
}
#: What to do about code that closes the connection of its transaction.
_STAY_OPEN = (
    "Remove close(), close_all() or close_old_connections() from it, or call it outside: Django "
    "closes a connection that is in a transaction, too."
)


class SwallowedError(OutboxError):
    """Code inside a transaction left it in a state in which it cannot be committed."""


class ConnectionClosed(SwallowedError):
    """Code closed the connection of the transaction around it, which the database rolled back."""


def is_lost(error: BaseException) -> bool:
    """Return whether the database failed, as opposed to refusing a value of a row."""
    if not isinstance(error, LOST):
        return False
    number = error.args[0] if error.args else None
    if isinstance(number, int):  # of MySQL; 0: the connection is closed
        return number < 1 or 2000 <= number < 3000 or number in _OF_THE_SERVER
    if state := sqlstate(error):
        return not state.startswith("54")  # a limit of the program, as the size of an index row
    # SQLite's code 1 is of statements and of the functions in them.
    return getattr(error.__cause__, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR


def raise_what_ends_the_thread(error: Exception | None, outer: BaseException | None) -> None:
    """Raise the exception behind an error that has to end this thread, if there is one.

    ``outer`` is the exception that was being handled before, which has not caused the error.
    """
    for each in chain_of(error):
        if each is outer:
            return
        # CancelledError, of which asyncio makes a TimeoutError, ends a coroutine only.
        ordinary = isinstance(each, Exception | CancelledError)
        if isinstance(each, SoftTimeLimitExceeded) or not ordinary:
            raise each


def chain_of(error: BaseException | None) -> list[BaseException]:
    """Return an error, its cause, the cause of that one, and so on."""
    chain: list[BaseException] = []
    # ``raise error from error`` makes a ring.
    while error is not None and all(error is not each for each in chain):
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


@contextmanager
def after_the_commit(log: Callable[[Exception], object], *, using: str) -> Iterator[None]:
    """Leave an error of the block to ``log``: nothing that is committed has failed.

    What has to end this thread, as a time limit of Celery or gevent, is raised. The connection is
    closed then: it may wait for an answer still.
    """
    outer = sys.exception()
    try:
        try:
            yield
        except Exception as error:
            raise_what_ends_the_thread(error, outer)
            with suppress(Exception):  # a filter of the project's logging may raise
                log(error)
    except BaseException:
        connections[using].close()
        raise


@contextmanager
def guarded(what: str, *, using: str) -> Iterator[None]:
    """Run code of the project inside the open transaction, which it cannot end unnoticed.

    ``TransactionEnded`` means that the code ended it: its effects so far may be committed, without
    the cursor or job id. ``SwallowedError`` means that the code caught an error that had undone the
    transaction, and ``ConnectionClosed`` that it closed the connection. Drivers tell neither: asked
    for the savepoint, some say that the connection is lost, and others that an error came before.
    """
    connection = connections[using]
    driver, savepoint = connection.connection, connection.savepoint()
    undone = False

    def note_undone(execute: Any, *arguments: Any) -> Any:
        nonlocal undone
        try:
            return execute(*arguments)
        except django.db.Error as error:
            undone |= _undoes(error)
            raise

    def is_gone() -> bool:
        # Not by its release: after an error PostgreSQL refuses that, though the savepoint is there.
        broken, connection.needs_rollback = connection.needs_rollback, False
        failure = _failure(connection.savepoint_rollback, savepoint)
        connection.needs_rollback = broken
        return _is_gone(failure) and not undone

    watch = connection.execute_wrapper(note_undone) if connection.vendor == "mysql" else None
    try:
        with watch or nullcontext():
            yield
    except BaseException as error:
        undone |= connection.vendor == "mysql" and _undoes(error)
        if is_gone():
            raise TransactionEnded(_ended(what)) from error
        if isinstance(error, django.db.Error):  # it may say only that statements are refused
            require_same(driver, connection, what)
        raise
    require_same(driver, connection, what)
    failure = _failure(connection.savepoint_commit, savepoint)
    if failure is None:
        return
    if is_gone():
        raise TransactionEnded(_ended(what)) from failure
    if isinstance(failure, LOST) and not _is_gone(failure):
        raise failure
    if sqlstate(failure) in _TOOK_TOO_LONG:
        raise django.db.OperationalError(*failure.args) from failure
    raise SwallowedError(
        f"{what} caught an error of the database that had rolled back its transaction. Put "
        "the statement that may fail into atomic()."
    ) from failure


def require_same(driver: Any, connection: Any, what: str) -> None:
    """Raise an error if code has closed the connection of its transaction, ``driver``'s."""
    if connection.closed_in_transaction:
        raise ConnectionClosed(
            f"{what} closed the connection of its transaction, so the database rolled back its "
            f"effects. {_STAY_OPEN}"
        )
    if connection.connection is not driver:
        raise TransactionEnded(
            f"{what} closed the connection of its transaction and opened another one. What it had "
            f"written before was rolled back; what it wrote afterwards is committed. {_STAY_OPEN}"
        )


def _failure(step: Callable[[str], None], savepoint: Any) -> Exception | None:
    try:
        step(savepoint)
    except SoftTimeLimitExceeded:  # of the Celery task in this thread
        raise
    except Exception as error:  # the driver's, or Django's if the connection was closed
        return error
    return None


def _is_gone(error: Exception | None) -> bool:
    """Return whether the error says that the savepoint no longer exists."""
    if error is None:
        return False
    return not _GONE.isdisjoint(codes_of(error)) or "no such savepoint" in str(error)


def _undoes(error: BaseException) -> bool:
    return not _UNDONE.isdisjoint(codes_of(error))


def _ended(what: str) -> str:
    return (
        f"{what} ended its transaction: by COMMIT, ROLLBACK or BEGIN, by a statement that commits "
        "by itself (as CREATE TABLE on MySQL and MariaDB), by a procedure, or by the driver's own "
        "connection. What it has written may be committed in part. Execute such a statement "
        "elsewhere, for example in a task of its own."
    )
