"""The one-line change of a project: ``from outbox_app.celery import OutboxCelery as Celery``.

Inside ``transaction.atomic()`` every way of sending stages a row in that transaction, so the task
is sent if and only if it commits. Outside a transaction, in ``retry()`` and ``replace()``, with an
explicit producer or connection, and for tasks of a mode other than "stage", everything works as in
Celery. Of the other rooms this module imports only staging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery
from django.apps import apps
from django.core import checks
from django.db import connections, transaction

from .aliases import outbox_alias
from .capability import check_app
from .conf import require_celery
from .jobs.staging.calls import is_by_hand, mode_of, shadow_mode
from .jobs.staging.sending import StagingMixin, celery_app

__all__ = ["OutboxCelery", "OutboxTask", "StagingMixin", "celery_app", "shared_task"]


require_celery()
from celery.contrib.django.task import DjangoTask  # noqa: E402  # older Celery has no such module

checks.register(check_app, "outbox")  # here: of an app that is not installed Django asks none

if TYPE_CHECKING:  # Celery's classes can be subscripted since 5.7
    from .typed import TypedTask
    from .typed import shared_task as shared_task

    _DjangoTask = TypedTask[..., Any]
    _Celery = Celery["OutboxTask"]
else:
    from celery import shared_task

    _DjangoTask, _Celery = DjangoTask, Celery


class OutboxTask(_DjangoTask):
    """Task class of ``OutboxCelery``: its ``…_on_commit`` calls stage, so that a crash loses none.

    Inside a transaction of the outbox's alias they call the task's own ``delay`` or ``apply_async``
    at once; but at the commit if ``task_always_eager`` runs the task, or a ``connection=`` sends
    it. Elsewhere they do what Celery does.
    """

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self._stage_or_wait(partial(self.delay, *args, **kwargs), {})

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self._stage_or_wait(partial(self.apply_async, *args, **kwargs), kwargs)

    def _stage_or_wait(self, call: Callable[[], Any], options: Mapping[str, Any]) -> None:
        alias = outbox_alias() if apps.models_ready else None
        mode = mode_of(self.app, self.name) if apps.models_ready else "send"
        is_sent = is_by_hand(options) or self.app.conf.task_always_eager
        if alias is None or mode != "stage" or not connections[alias].in_atomic_block:
            if alias and mode == "shadow" and not is_sent:
                call = shadow_mode().expecting(call, self.name, using=options.get("using") or alias)
            transaction.on_commit(call)
        elif is_sent:
            transaction.on_commit(call, using=alias)
        else:
            call()


class OutboxCelery(StagingMixin, _Celery):
    """A drop-in for ``celery.Celery``; takes the same arguments."""

    task_cls: Any = OutboxTask
