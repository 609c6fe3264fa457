"""Who calls the receivers of ``after_task_publish``: staging calls some, the drain all others.

OpenTelemetry and ddtrace open a span at ``before_task_publish``, make it the current one, and close
it at ``after_task_publish``. Staging fires the first; the drain publishes later and elsewhere. If
only the drain fired the second, the span would never end, and all that the request does afterwards
would become part of it. So staging calls these receivers, known by their module, as soon as the row
is taken, and the drain skips them. The drain alone calls all other receivers.

Celery's own code fires the signals. Staging lets it run to its end, since tools that trace these
functions would report an exception as an error. So the signals get a class of ours, which leaves
receivers out for one task, in one thread, for the duration of one call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from celery.signals import after_task_publish, task_sent
from celery.utils.dispatch import Signal

from .context import let

PAIRED = ("opentelemetry.instrumentation.celery", "ddtrace.contrib")

_heard: ContextVar[tuple[str, bool] | None] = ContextVar("outbox_app_heard", default=None)


class _PublishSignal(Signal):
    def _live_receivers(self, sender: Any) -> list[Any]:
        live: list[Any] = super()._live_receivers(sender)  # type: ignore[misc]
        heard = _heard.get()
        if heard is None or heard[0] != sender:
            return live
        return [receiver for receiver in live if _is_paired(receiver) == heard[1]]


for _signal in (after_task_publish, task_sent):
    _signal.__class__ = _PublishSignal


def heard_by(*, paired: bool, task: str) -> AbstractContextManager[None]:
    """Let ``after_task_publish`` of a task reach the paired receivers only, or all others only."""
    return let(_heard, (task, paired))


def _is_paired(receiver: Any) -> bool:
    return (getattr(receiver, "__module__", None) or "").startswith(PAIRED)
