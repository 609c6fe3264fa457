"""Finds the event for which pages fail, by halves: each a shorter page, committed with the cursor.

Effects are as exact as those of whole pages: a half either commits with its place or leaves
nothing. A handler that fails only for a combination of events gets past it. One event that fails
alone is kept on the cursor, with its traceback, and is tried alone until it succeeds or a person
skips it (``subscriptions.skips``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..eventlog.completeness import Checked
from ..eventlog.reader import LogReader
from ..eventlog.record import RecordedEvent
from ..eventlog.state import WindowState
from ..eventlog.window import Page
from ..exceptions import TransactionEnded
from ..models import Cursor
from ..text import storable

#: Characters of a traceback that are kept: its end.
TRACEBACK = 8000


@dataclass(slots=True)
class Feed:
    """One log of a partition."""

    reader: LogReader
    cursor: Cursor
    state: WindowState
    stored_at: float


class Found(NamedTuple):
    """A page, and what of it is to be handled."""

    events: list[RecordedEvent]
    page: Page[Any]
    checked: Checked
    #: The event to be skipped, where the page ends in front of it.
    keeps: dict[str, Any] | None = None


class Attempt(NamedTuple):
    """What became of a page."""

    #: Rows that were read.
    rows: int = 0
    #: Whether there may be more at once.
    more: bool = False
    error: Exception | None = None
    #: What the handler was given.
    events: list[RecordedEvent] = []


def narrowed(failed: Attempt, attempt: Callable[[int], Attempt]) -> Attempt:
    """Return the attempt at one event that fails; or the last one, where all of the page succeeds.

    Args:
        failed: The page as a whole.
        attempt: Tries a page of at most so many rows, from where the cursor is by then.
    """
    left, tried = failed.rows, failed
    while left > 0:
        size = max(1, left // 2)
        tried = attempt(size)
        ended = isinstance(tried.error, TransactionEnded)  # nothing of it is tried again
        if tried.error and (size == 1 or not tried.rows or ended):
            break
        if not (tried.error or tried.rows or tried.more):
            break
        left = size if tried.error else left - tried.rows  # none of them may be wanted
    return tried


def evidence(event: RecordedEvent, error: BaseException) -> dict[str, Any]:
    """Return what is kept of an event that fails."""
    text = storable("".join(traceback.format_exception(error)))
    return {
        "position": event.id,
        "version": event.version,
        "type": event.type,
        "stream": event.stream,
        "traceback": text[-TRACEBACK:],
    }
