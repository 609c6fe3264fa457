"""Receivers that take Celery's two publish signals for a pair in one process: who hears them when.

OpenTelemetry's instrumentation opens a span at ``before_task_publish``, makes it the current one,
and closes it at ``after_task_publish``. Staging fires the first; the second belongs to the drain,
which publishes later and elsewhere. Left at that, the span would never end, and all that the
request does afterwards would become part of it. So these receivers hear the second signal as soon
as the row is taken, and not from the drain. All others hear it from the drain.

Receivers are known by their module: nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from celery.signals import after_task_publish
from celery.utils.dispatch import Signal

PAIRED = ("opentelemetry.instrumentation.celery",)


def end_of_staging(task: str, *, body: Any, **message: Any) -> None:
    """Fire ``after_task_publish`` for the paired receivers.

    Args:
        task: Its name.
        body: As kombu is given it.
        message: The rest of what the signal carries: headers, exchange, routing_key.
    """
    if signal := _signal_to(_is_paired):
        signal.send(sender=task, body=body, **message)


def signal_of_the_drain() -> Signal | None:
    """Return ``after_task_publish`` for all other receivers; None where there are none."""
    if not any(map(_is_paired, _receivers())):
        return after_task_publish if after_task_publish.receivers else None
    return _signal_to(lambda receiver: not _is_paired(receiver))


def _signal_to(wanted: Callable[[Any], bool]) -> Signal | None:
    pairs = [
        pair
        for pair, receiver in zip(list(after_task_publish.receivers), _receivers(), strict=False)
        if wanted(receiver)
    ]
    if not pairs:
        return None
    signal = Signal(name="after_task_publish")
    signal.receivers = pairs
    return signal


def _receivers() -> list[Any]:
    return [
        receiver() if isinstance(receiver, weakref.ReferenceType) else receiver
        for _, receiver in list(after_task_publish.receivers)
    ]


def _is_paired(receiver: Any) -> bool:
    module = getattr(receiver, "__module__", None) or ""
    return module.startswith(PAIRED)
