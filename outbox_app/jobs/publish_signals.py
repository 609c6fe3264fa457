"""Who hears Celery's ``after_task_publish`` when: staging fires it for some, the drain for others.

OpenTelemetry and ddtrace open a span at ``before_task_publish``, make it the current one, and close
it at ``after_task_publish``. Staging fires the first; the drain publishes later and elsewhere. Left
at that, the span would never end, and all that the request does afterwards would become part of it.
So these receivers, known by their module, hear the second signal as soon as the row is taken, and
not from the drain. All others hear it from the drain alone.

Staging runs Celery's own sender to its end, since an exception that ended it would be an error for
all who watch the functions on the way. The signals have a class of ours for that reason: it leaves
receivers out for one task, in one thread, for the time of one call. Other calls see no difference.
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
