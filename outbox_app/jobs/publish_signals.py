"""Who calls the receivers of ``after_task_publish``: staging calls some, the drain all others.

OpenTelemetry and ddtrace open a span at ``before_task_publish``, which staging fires, and close it
at ``after_task_publish``. If only the drain fired that, all that the request does after staging
would become part of the span. So staging calls these receivers, known by their module, as soon as
the row is taken, and the drain calls all others. Celery's own code fires the signals, and staging
lets it run to its end: tools that trace it would report an exception as an error. So the signals
get a class of ours, which leaves out receivers of one task, in one thread, during one call.
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
        modules = ((each, getattr(each, "__module__", None) or "") for each in live)
        return [each for each, module in modules if module.startswith(PAIRED) == heard[1]]


for _signal in (after_task_publish, task_sent):
    _signal.__class__ = _PublishSignal


def heard_by(*, paired: bool, task: str) -> AbstractContextManager[None]:
    """Let ``after_task_publish`` of a task reach the paired receivers only, or all others only."""
    return let(_heard, (task, paired))
