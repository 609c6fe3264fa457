"""Runs commands in a transaction of their own, repeated after a conflict, or in the caller's.

From the second attempt on the head is locked. If it never was, a slow batch would starve; if it
always was, the row would be locked while handlers run. A COMMIT whose reply is lost is no rollback:
another connection repeats the commands, whose ids find a committed answer. If the database or a
receiver refuses a batch while it is written, the batch is halved until one command is alone. A
command that has undone its batch, by a deadlock or a lock that it waited for, is executed apart; so
is each command of the batch if it is unknown which one it was.

In the caller's transaction only the commands are rolled back, to a savepoint. Their head stays
locked until the caller's transaction ends.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from functools import cache
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, IntegrityError, connections, transaction
from django.utils.module_loading import import_string

from ..database.callbacks import keep_callbacks_apart
from ..database.lock_wait import atomic_with_lock_wait, is_conflict, sqlstate
from ..database.transaction_guard import LOST, raise_what_ends_the_thread
from ..database.transactions import lacks_autocommit, open_transactions
from ..exceptions import NotAtomic
from ..failpoints import failpoint
from . import counting
from .batch import Batch, Moved
from .conf import entity_settings
from .declaration import spec_of
from .exceptions import EntityContended, InvalidCommand
from .handlers import running
from .request import Call, Outcome, Undone

#: The most attempts at a batch while other transactions are first.
ATTEMPTS = 10
#: The longest pause between attempts, in seconds.
PAUSE = 0.005
#: The longest wait for a lock, in seconds, of a transaction for which other callers wait.
SHARED_WAIT = 1.0


def in_callers_transaction(entity: Any, *, using: str) -> bool:
    """Return whether the caller is in a transaction. Raises ``InvalidCommand``, ``NotAtomic``."""
    if inside := running.get():
        raise InvalidCommand(
            f"The command {inside.command} may not execute another command: it may run repeatedly. "
            "Execute the other after this one has returned, or in a subscription on its versions."
        )
    connection = connections[using]
    if connection.in_atomic_block:
        return True
    others = open_transactions()
    if others or lacks_autocommit(connection):
        where = others[0] if others else using
        raise NotAtomic(
            f"{entity.__name__}.execute() was called in a transaction on {where!r}, but not in an "
            f"atomic() on {using!r}, the database of the entity. Call it outside the transaction, "
            f"or wrap it in transaction.atomic(using={using!r})."
        )
    return False


def scope_of(using: str) -> Hashable | None:
    """Return the scope of this session, or None. A batch has calls of one scope only."""
    named = entity_settings().ENTITY_SCOPE
    scope: Hashable = import_string(named)() if named else None
    # In a coroutine this is not the thread's schema: it only tells ``aask`` that there are schemas.
    schema = getattr(connections[using], "schema_name", None) if _has_schemas(using) else None
    return None if scope is None and schema is None else (scope, schema)


@cache
def _has_schemas(using: str) -> bool:
    """Return whether each connection has a schema, as with django-tenants."""
    return hasattr(connections[using], "schema_name")


def answer(entity: Any, calls: Sequence[Call], *, using: str) -> Sequence[Call]:
    """Answer calls, committed or in the caller's transaction; return those that need another."""
    perform = _join if connections[using].in_atomic_block else _commit
    calls = [call for call in calls if not call.refuse_unstorable(using)]
    if not calls:
        return ()
    try:
        return perform(entity, calls, using=using)
    except SoftTimeLimitExceeded:  # of the task that this thread executes
        raise
    except Undone as undone:
        if not connections[using].needs_rollback:  # of the caller's transaction
            return _apart(entity, calls, undone, using=using)
        for call in calls:
            call.answer = undone.error if call is undone.call else _own(undone.error)
        return ()
    except Exception as error:
        # The connection is lost, or other transactions hold the locks that all calls need.
        blames_none = isinstance(error, LOST) and (is_conflict(error) or not _is_alive(using))
        if len(calls) == 1 or blames_none:
            for call in calls:
                own = error if len(calls) == 1 else _own(error)
                # A call with a new answer was looked up, and is refused while it is written.
                new = isinstance(call.answer, Outcome) and not call.answer.replayed
                call.answer = own if new else call.error_for_caller(own)
            return ()
        return _in_halves(entity, calls, using=using)


def _in_halves(entity: Any, calls: Sequence[Call], *, using: str) -> Sequence[Call]:
    """If the database or a receiver refuses one command, the others must not fail."""
    half = len(calls) // 2
    return _in_turn(entity, [calls[:half], calls[half:]], using=using)


def _in_turn(entity: Any, parts: Sequence[Sequence[Call]], *, using: str) -> Sequence[Call]:
    """Answer parts of a batch in their order; return the calls that need another transaction."""
    left: list[Call] = []
    for part in parts:
        left += part if left else answer(entity, part, using=using)
    return left


def _apart(entity: Any, calls: Sequence[Call], undone: Undone, *, using: str) -> Sequence[Call]:
    """Answer a call that is alone; return calls that need other transactions, some one each."""
    call, error = undone.call, undone.error
    if len(calls) == 1 and not undone.waited:
        calls[0].answer = error  # its command id was looked up under the lock
        return ()
    of_one_caller = calls[0].waits is None
    if of_one_caller and call is not None:  # they have an order
        at = calls.index(call)
        parts = (calls[:at], [call], calls[at + 1 :])
        return _in_turn(entity, [part for part in parts if part], using=using)
    if of_one_caller or (call is None and not is_conflict(error)):
        return _in_halves(entity, calls, using=using)
    for each in calls:
        # The others whose handlers may wait would take a second each, one after the other.
        each.apart |= call in (None, each) or (undone.waited and _may_query(entity, each))
        if call is each:
            each.undone_by = error if each.answer is error else _contended(entity, each, error)
        each.answer = None
    return calls


def _may_query(entity: Any, call: Call) -> bool:
    spec = spec_of(entity).commands.get(call.command)
    return spec is not None and spec.atomic


def _contended(entity: Any, call: Call, cause: BaseException | None) -> EntityContended:
    contended = EntityContended(
        f"{entity.__name__} {call.id!r}, or what {call.command!r} needs, was changed or locked by "
        "other transactions in each attempt. Nothing was written: send it again."
    )
    contended.__cause__ = cause
    return contended


def _own(error: Any) -> Any:
    """Return a copy for one caller, with its own traceback; the error itself if that fails."""
    with suppress(Exception):
        own = copy(error).with_traceback(error.__traceback__)
        own.__cause__ = error.__cause__
        return own
    return error


def _is_alive(using: str) -> bool:
    connection = connections[using]
    return connection.connection is not None and connection.is_usable()


def _join(entity: Any, calls: Sequence[Call], *, using: str) -> Sequence[Call]:
    while True:
        with suppress(Moved), transaction.atomic(using=using):
            batch = Batch(entity, calls, using=using, locked=True, wait=None)
            left = batch.run()
            counting.count_after_commit(batch)
            return left


def _commit(entity: Any, calls: Sequence[Call], *, using: str) -> Sequence[Call]:
    if lacks_autocommit(connections[using]):  # in a pool thread: no caller has looked
        in_callers_transaction(entity, using=using)
    outer = sys.exception()
    # The head is locked before the rows that a handler locks, in the first attempt too.
    atomic = any(_may_query(entity, call) for call in calls)
    batch: Batch | None = None
    attempts = cut = 0
    while attempts - cut < ATTEMPTS:
        attempts += 1
        undone: Undone | None = None
        recorded: list[Call] | None = None
        began = time.monotonic()
        # An interrupted COMMIT may still be under way. It holds the lock until it ends.
        locked = atomic or attempts > 1 or any(call.begun or call.apart for call in calls)
        wait = max(calls[0].seconds_left, 0)
        if calls[0].waits is not None:
            wait = min(wait, SHARED_WAIT)
        try:
            with _transaction(wait, locked=locked, using=using):
                batch = Batch(entity, calls, using=using, locked=locked, wait=wait)
                left = batch.run()
                # An error of one is not the answer.
                after = keep_callbacks_apart(using, of=f"commands of {entity.__name__}")
                recorded = batch.steps
            for limit in after.limits:
                raise limit
            seconds = time.monotonic() - began
            refused = sum(len(call.refused) for call in calls)  # by an index: no conflicts
            counting.count(batch, conflicts=max(0, attempts - 1 - refused), seconds=seconds)
            failpoint("entity_committed")
            return left
        except Moved as error:
            if error.__cause__ is not None:  # an index refused a row: no need to pause
                continue
        except Undone as error:
            undone = error
            if len(calls) > 1 or error.waited or not is_conflict(error.error):
                counting.count(batch, conflicts=attempts)
                raise
        except IntegrityError:
            if attempts > 1:
                raise
        except Error as error:
            is_lost = isinstance(error, LOST)
            if is_conflict(error):
                cut += time.monotonic() - began >= wait  # the time of the calls is the limit
            elif recorded is None and (is_lost or batch is None):  # None: it has not begun
                if not _is_alive(using):
                    connections[using].close()
                if attempts > 1:  # a stale connection is reopened once
                    raise
            elif recorded is not None and (is_lost or not sqlstate(error)):
                # The server has not refused the COMMIT: it may have taken effect.
                connections[using].close()
                raise_what_ends_the_thread(error, outer)
                for call in recorded:
                    call.begun, call.answer = True, None
            else:
                raise
        time.sleep(random.uniform(0, PAUSE))
        if calls[0].seconds_left <= 0:
            break
    counting.count(batch, conflicts=attempts)
    if undone is not None and undone.error is calls[0].answer:  # of its handler
        raise undone
    cause = undone and undone.error
    # The oldest call's time may be over while others have time left.
    missing = [call for call in calls if not (call.is_replay and call.answer)]
    rest = [call for call in missing if call.seconds_left > 0 and attempts - cut < ATTEMPTS]
    for call in set(missing).difference(rest):
        call.answer = call.error_for_caller(_contended(entity, call, cause))
    return rest


def _transaction(wait: float, *, locked: bool, using: str) -> AbstractContextManager[None]:
    connection: Any = connections[using]
    connection.ensure_connection()
    level: Any = getattr(connection, "isolation_level", None)
    if connection.vendor == "postgresql" and not locked and level.name == "READ_COMMITTED":
        return transaction.atomic(using=using)  # load() sets lock_timeout in its statement
    return atomic_with_lock_wait(wait, using=using, read_committed=True)
