"""Calls without an answer: a confirm after the commit must not hold up a request.

A full queue, an error or a killed process loses a call: the check-back is the retry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from ..process.background import Background
from ..text import get_logger

logger = get_logger("outbox_app.prepared")

calls = Background("outbox-one-way", threads=2, longest=10_000, together=100, at_exit=2.0)


def send(call: Callable[..., None], items: Sequence[Any], *args: Any) -> None:
    """Let a thread make a call soon, combined with equal calls. The call may be lost."""
    calls.send(attempt, items, call, *args)


def attempt(items: Sequence[Any], call: Callable[..., None], *args: Any) -> None:
    """Make a call, and only log its error: the caller would take it for a failed commit."""
    try:
        call(items, *args)
    except SoftTimeLimitExceeded:  # of the task that this thread executes
        raise
    except Exception as error:
        logger.warning("The keeper was not told, so it will ask error=%r", error)
