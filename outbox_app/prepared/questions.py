"""The sender's side of a check-back: what became of these events of yours?

The fences answer. A function of the project's own may answer before them, from business rows, but
only that a transaction has committed or is in progress: only a fence says 'rolled_back'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from ..text import get_logger
from . import fences
from .fences import COMMITTED, IN_PROGRESS

logger = get_logger("outbox_app.prepared")


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


def answers(
    questions: Iterable[Question], *, keeper: str = "", using: str, seconds: float | None = None
) -> dict[UUID, str]:
    """Answer questions about the transactions of an alias: see ``fences.outcomes``."""
    asked = {each.event_id: each for each in questions}
    own: dict[UUID, str] = {}
    if _functions:
        fenced = fences.recorded(asked, keeper=keeper, using=using)
        for id, question in asked.items():
            if id not in fenced and (answer := _own_answer(question)):
                own[id] = answer
    known = {id for id, answer in own.items() if answer == COMMITTED}
    left = {id: each.prepared_at for id, each in asked.items() if own.get(id) != IN_PROGRESS}
    return own | fences.outcomes(left, known=known, keeper=keeper, using=using, seconds=seconds)


def _own_answer(question: Question) -> str:
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
