"""A check-back: the question, the possible answers, and functions that answer before fences.

The project registers these functions. They answer from business rows, but only that a transaction
has committed or is in progress: only a fence answers 'rolled_back'.
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
    """A keeper's question about one event."""

    event_id: UUID
    #: The time by the keeper's clock.
    prepared_at: datetime
    stream: str = ""
    #: The type of the event, or the task of the job.
    type: str = ""


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


def own_answer(question: Question) -> str:
    """Return the answer of the project's functions; empty if none answers."""
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
