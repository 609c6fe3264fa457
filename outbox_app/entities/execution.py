"""Where a command runs: in a transaction of its own, done anew at a conflict, or in the caller's.

A conflict (another command was ahead, a deadlock, a lock that is not given) rolls everything back
and does it anew, locked from the second time on: optimistic alone starves, locked alone would hold
the row while handlers run. A COMMIT whose reply is lost is no rollback: the command is done anew on
another connection, and if the first one was committed, its id finds the answer.

In the caller's transaction nothing is rolled back but the command itself, to a savepoint: its head
stays locked until the caller's transaction ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django.db
from django.db import IntegrityError, OperationalError, connections, transaction

from ..exceptions import EntityContended, InvalidCommand, NotAtomic, OutcomeUnknown
from ..failpoints import failpoint
from ..process.lock_wait import atomic_with_lock_wait
from ..transactions import lacks_autocommit, open_transactions
from .attempt import Moved, attempt, handling
from .declaration import commands_of
from .request import Outcome, Request

#: How often a command is tried while others are ahead.
ATTEMPTS = 10
#: Seconds to wait for the lock of an entity.
LOCK_SECONDS = 10
#: A pause between attempts is at most so long, in seconds.
PAUSE = 0.005
#: Deadlocks, lock time-outs and snapshots that are too old, by SQLSTATE or MySQL's number.
CONFLICTS = {"40001", "40P01", "55P03", 1020, 1205, 1213}


def run(entity: Any, request: Request, *, using: str) -> Outcome:
    """Answer a command: committed, or part of the caller's open transaction.

    Raises:
        InvalidCommand: It was called by a command.
        NotAtomic: A transaction is open on another alias only.
        EntityContended: Others were ahead each time.
        OutcomeUnknown: The connection was lost at the commit, and the database is away.
        OutboxError: What ``attempt`` raises.
    """
    if handling.get():
        raise InvalidCommand(
            f"The command {handling.get()} may not execute another one: it may run several times. "
            "Do it after this one has been answered; or from a subscription on its versions."
        )
    connection = connections[using]
    if connection.in_atomic_block:
        return _in_callers_transaction(entity, request, using=using)
    others = open_transactions()
    if others or lacks_autocommit(connection):
        raise NotAtomic(
            f"{entity.__name__}.execute() was called in a transaction on {others[0]!r}, and the "
            f"entity lives on {using!r}. Call it outside, or wrap both in "
            f"transaction.atomic(using={using!r})."
            if others and others != [using]
            else f"{entity.__name__}.execute() was called on {using!r} with autocommit off. Wrap "
            f"the call in transaction.atomic(using={using!r})."
        )
    return _in_own_transaction(entity, request, using=using)


def _in_callers_transaction(entity: Any, request: Request, *, using: str) -> Outcome:
    with transaction.atomic(using=using):
        return attempt(entity, request, using=using, locked=True)


def _in_own_transaction(entity: Any, request: Request, *, using: str) -> Outcome:
    unknown: Exception | None = None
    spec = commands_of(entity).get(request.command)
    # The rows that a handler locks come after the head, in the first attempt too.
    atomic = spec is not None and spec.atomic
    committed: list[bool] = []
    for number in range(ATTEMPTS):
        handled = False
        try:
            with _read_committed(using=using):
                transaction.on_commit(lambda: committed.append(True), using=using)
                outcome = attempt(entity, request, using=using, locked=atomic or number > 0)
                handled = True
            failpoint("entity_committed")
            return outcome
        except Moved:
            pass
        except IntegrityError:
            if number or committed:
                raise
        except (OperationalError, django.db.InterfaceError) as error:
            if committed:  # raised by another callback: no conflict, and no lost commit
                raise
            if not is_conflict(error):
                connections[using].close()
                if not handled and unknown is None:
                    raise
                if not handled:
                    break
                unknown = error
        time.sleep(random.uniform(0, PAUSE))
    if unknown is None:
        raise _contended(entity, request, ATTEMPTS)
    raise OutcomeUnknown(
        f"The connection to {using!r} was lost while {request.command!r} of {request.id!r} was "
        "committed. Send it again with the same command id: it is executed once."
    ) from unknown


@contextmanager
def _read_committed(*, using: str) -> Iterator[None]:
    """Open a transaction at READ COMMITTED, which the connection's own level may not be."""
    connection: Any = connections[using]
    connection.ensure_connection()
    level = getattr(connection, "isolation_level", "read committed")  # SQLite has none
    name = str(getattr(level, "name", level))
    other = name.lower().replace("_", " ") != "read committed"
    statement = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
    if other and connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute(statement)
    with atomic_with_lock_wait(LOCK_SECONDS, using=using):
        if other and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(statement)
        yield


def is_conflict(error: Exception) -> bool:
    """Say whether a transaction was refused because of another one, and may be done anew."""
    cause = error.__cause__
    codes = [getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None), *error.args[:1]]
    return not CONFLICTS.isdisjoint(codes) or "database is locked" in str(error)


def _contended(entity: Any, request: Request, attempts: int) -> EntityContended:
    return EntityContended(
        f"{entity.__name__} {request.id!r} was changed by other commands during each of {attempts} "
        f"attempts at {request.command!r}. Nothing was written: send it again."
    )
