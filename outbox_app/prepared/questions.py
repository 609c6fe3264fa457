"""A check-back: what is asked, what may be answered, and functions that answer before fences.

Functions are the project's own, and answer from business rows, but only that a transaction has
committed or is in progress: only a fence says 'rolled_back'.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from ..models import Fence
from ..text import get_logger

logger = get_logger("outbox_app.prepared")

COMMITTED, ROLLED_BACK = Fence.Outcome.COMMITTED.value, Fence.Outcome.ROLLED_BACK.value
#: Answers that decide nothing: the transaction is open; its fence may have been removed.
IN_PROGRESS, TOO_OLD = "in_progress", "too_old"


class Question(NamedTuple):
    """What a keeper asks about."""

    event_id: UUID
    #: By the keeper's clock.
    prepared_at: datetime
    stream: str = ""
    #: Of the event, or the task of a job.
    type: str = ""


Function = TypeVar("Function", bound=Callable[[Question], Any])
_functions: list[tuple[str, Callable[[Question], Any]]] = []


def check_back(pattern: str) -> Callable[[Function], Function]:
    """Register a function that answers for events without a fence, from business rows.

    Put it into a module ``subscribers`` of an app, which every process imports: where it is not
    registered, the fence decides, and without one nothing has committed.

    The function is called with a ``Question`` (event_id, prepared_at, stream, type), in no
    transaction. It returns ``COMMITTED`` or ``IN_PROGRESS`` (which may be asked again), or None:
    then the fence decides.

    Args:
        pattern: Types of events, or task names, as for ``fnmatch``: ``"order.*"``.
    """

    def register(function: Function) -> Function:
        _functions.append((pattern, function))
        return function

    return register


def own_answer(question: Question) -> str:
    """Return what the project's own functions say; empty: nothing."""
    for pattern, function in _functions:
        if not fnmatchcase(question.type, pattern):
            continue
        try:
            answer = function(question)
        except Exception:
            logger.exception(
                "Check-back failed function=%r event_id=%s", function, question.event_id
            )
            return IN_PROGRESS
        if answer in (COMMITTED, IN_PROGRESS):
            return str(answer)
        if answer is not None:
            logger.error("Check-back answered neither COMMITTED nor IN_PROGRESS: %r", answer)
            return IN_PROGRESS
    return ""
