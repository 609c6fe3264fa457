"""Fences: one row in the sender's database decides the outcome of a transaction.

The sender inserts 'committed' as the first statement of its business transaction. To answer a
question, ``outcomes`` reads the row and, if there is none, inserts 'rolled_back' in a transaction
of its own. The INSERT waits for an open business transaction; once the row exists, that transaction
cannot commit. So an answer stays true. "Not found, so rolled back" could be wrong a moment later.

Functions of the project answer before the fences, from business rows, but only that a transaction
has committed or is in progress: only a fence answers 'rolled_back'.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

import django.db
from django.db import IntegrityError, connections, transaction

from ..database.clock import aware, stored
from ..database.lock_wait import atomic_with_lock_wait, is_conflict
from ..database.transactions import is_atomic, is_in_test, own_connection
from ..database.upsert import insert_if_missing, insert_rows
from ..exceptions import NotAtomic
from ..failpoints import failpoint
from ..text import get_logger
from .exceptions import FencedOut
from .models import Fence

if TYPE_CHECKING:
    from .sender import Prepared

logger = get_logger("outbox_app.prepared")

COMMITTED, ROLLED_BACK = Fence.Outcome.COMMITTED.value, Fence.Outcome.ROLLED_BACK.value
#: Answers that decide nothing: the transaction is open; its fence may have been removed.
IN_PROGRESS, TOO_OLD = "in_progress", "too_old"
#: The outcome of an id that has committed as another keeper's event. It is never sent.
OF_ANOTHER = "another keeper's"

ID: Any = Fence._meta.pk
#: Seconds that an answer waits for an open transaction. MySQL has whole seconds only.
LOCK_SECONDS = 0.5
#: Seconds after which the remaining ids of a question are answered without waiting.
ANSWER_SECONDS = 5.0
#: How much the clocks of keeper and sender may differ.
CLOCKS = timedelta(days=1)


class Question(NamedTuple):
    """A keeper's question about one event."""

    event_id: UUID
    #: The time by the keeper's clock.
    prepared_at: datetime
    stream: str = ""
    #: The type of the event, or the task of the job.
    type: str = ""


def fence(event: Prepared) -> None:
    """Write the fence: the event is published if the open transaction commits.

    Call it first, before you write business rows, so that a check-back waits for the transaction.

    Args:
        event: What ``prepare()`` returned.

    Raises:
        NotAtomic: No transaction is open on the alias of the event.
        FencedOut: The event's outcome is decided already. The transaction, or the open savepoint,
            can no longer commit.
    """
    using = event.using
    connection = connections[using]
    if not connection.in_atomic_block:
        raise NotAtomic(
            f"fence() was called outside a transaction on {using!r}. Wrap the work and the call in "
            f"transaction.atomic(using={using!r})."
        )
    try:
        # SQL by hand: every business transaction pays for it; ``save()`` takes twice as long.
        with transaction.atomic(using=using, savepoint=False), connection.cursor() as cursor:
            values = [ID.get_db_prep_value(event.event_id, connection), COMMITTED, event.to]
            insert_rows(cursor, Fence, ("event_id", "outcome", "keeper"), values)
    except IntegrityError as error:
        raise FencedOut(
            f"The prepared event {event.event_id} is already decided on {using!r}: the keeper "
            "asked about it before this transaction began (a longer immune= makes it ask later), "
            "or its id was used before. This transaction is rolled back; prepare a new event."
        ) from error
    failpoint("fenced")


Function = TypeVar("Function", bound=Callable[[Question], Any])
_functions: list[tuple[str, Callable[[Question], Any]]] = []


def check_back(pattern: str) -> Callable[[Function], Function]:
    """Register a function that answers for events without a fence, from business rows.

    Put it into the module ``subscribers`` of an app, which every process imports. In a process that
    has not registered it, the fence decides; without a fence nothing has committed.

    The function is called with a ``Question`` (event_id, prepared_at, stream, type), outside
    transactions. It returns ``COMMITTED``, or ``IN_PROGRESS`` (the keeper may ask again), or None
    to let the fence decide.

    Args:
        pattern: Types of events, or task names, as for ``fnmatch``: ``"order.*"``.
    """

    def register(function: Function) -> Function:
        _functions.append((pattern, function))
        return function

    return register


def outcomes(
    questions: Iterable[Question], *, keeper: str = "", using: str, seconds: float | None = None
) -> dict[UUID, str]:
    """Return the outcomes of the transactions of events, and make them final unless in progress.

    The result leaves out an event whose id has committed with another keeper.

    Args:
        keeper: The keeper of the events, as in ``Fence.keeper``.
        seconds: The time after which it waits for no other transaction, up to ``ANSWER_SECONDS``.
    """
    asked = {each.event_id: each for each in questions if each.event_id != Fence.MARK}
    if is_in_test(using) and is_atomic(using):
        return dict.fromkeys(asked, IN_PROGRESS)
    until = time.monotonic() + min(seconds or ANSWER_SECONDS, ANSWER_SECONDS)
    # A session of its own: its transactions commit even if the caller's rolls back.
    with nullcontext() if is_in_test(using) else own_connection(using, seconds=LOCK_SECONDS):
        answers = _recorded(asked, keeper=keeper, using=using)
        mark = answers.pop(Fence.MARK, None)
        missing = [id for id in asked if id not in answers]
        # In random order: otherwise the same open transactions would use up the time every time.
        for id in random.sample(missing, len(missing)):
            if time.monotonic() >= until:
                break
            own = _own_answer(asked[id])
            if not own and mark is not None and asked[id].prepared_at < mark + CLOCKS:
                answers[id] = TOO_OLD
            elif own != IN_PROGRESS:
                _insert(id, own or ROLLED_BACK, keeper, using=using)
        # A fence that exists now is final. Without one, the transaction is still in progress.
        if missing:
            answers = _recorded(missing, keeper=keeper, using=using) | answers
        return {id: answers.get(id, IN_PROGRESS) for id in asked if answers.get(id) != OF_ANOTHER}


def _own_answer(question: Question) -> str:
    """Return the answer of the project's functions; empty if none answers."""
    for pattern, function in _functions:
        if not fnmatchcase(question.type, pattern):
            continue
        try:
            answer = function(question)
        except Exception:
            logger.exception(
                "Check-back failed function=%s event_id=%s", function, question.event_id
            )
            return IN_PROGRESS
        if answer in (COMMITTED, IN_PROGRESS):
            return str(answer)
        if answer is not None:
            logger.error("Check-back answered neither COMMITTED nor IN_PROGRESS answer=%s", answer)
            return IN_PROGRESS
    return ""


def _recorded(ids: Iterable[UUID], *, keeper: str, using: str) -> dict[UUID, Any]:
    """Return the outcomes of existing fences; under ``MARK``, the time up to which they went."""
    rows = Fence.objects.using(using).filter(pk__in=[*ids, Fence.MARK])
    found: dict[UUID, Any] = {}
    for id, outcome, by, at in rows.values_list("event_id", "outcome", "keeper", "written_at"):
        if id == Fence.MARK:
            found[id] = stored(aware(at, using=using))  # comparable with Question.prepared_at
        else:
            found[id] = OF_ANOTHER if outcome == COMMITTED and by != keeper else outcome
    return found


def _insert(id: UUID, outcome: str, keeper: str, *, using: str) -> None:
    """Decide the outcome of a transaction, unless it is decided already or still open."""
    stored = ID.get_db_prep_value(id, connections[using])
    values = {"event_id": stored, "outcome": outcome, "keeper": keeper}
    try:
        # Each INSERT has its own transaction: it holds no lock while the next one waits. At READ
        # COMMITTED it locks no gap on MySQL.
        with atomic_with_lock_wait(LOCK_SECONDS, using=using, read_committed=True):
            insert_if_missing(Fence, values, using=using)
    except django.db.OperationalError as error:
        if not is_conflict(error):
            raise


def mark_pruned(before: datetime, *, using: str) -> None:
    """Answer 'too_old', which decides nothing, about events prepared before a time.

    Call it before you prune fences. The mark never moves back: after an interrupted run more
    questions are refused than necessary, never fewer.
    """
    fences = Fence.objects.using(using)
    mark = Fence(event_id=Fence.MARK, outcome=Fence.Outcome.PRUNED, written_at=before)
    fences.bulk_create([mark], ignore_conflicts=True)
    fences.filter(pk=Fence.MARK, written_at__lt=before).update(written_at=before)
