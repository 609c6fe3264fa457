"""The one-line change of a project: ``from outbox_app.celery import OutboxCelery as Celery``.

Inside ``transaction.atomic()`` every way of sending stages a row in that transaction, so the task
is sent if and only if it commits. Outside a transaction, in ``retry()`` and ``replace()``, and with
an explicit producer or connection, everything works as in Celery. A door: imports only the intake.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.db import connections

from .intake.rows import outbox_alias
from .intake.sending import StagingMixin, celery_app

__all__ = ["OutboxCelery", "OutboxTask", "celery_app"]


class OutboxTask(DjangoTask[Any, Any]):
    """Task class of ``OutboxCelery``: its ``…_on_commit`` calls stage what Celery would forget."""

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Stage inside a transaction of the outbox's alias; elsewhere as Celery does."""
        if connections[outbox_alias()].in_atomic_block:
            self.apply_async(*args, **kwargs)
        else:
            super().apply_async_on_commit(*args, **kwargs)

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Stage inside a transaction of the outbox's alias; elsewhere as Celery does."""
        self.apply_async_on_commit(args, kwargs)


class OutboxCelery(StagingMixin, Celery):
    """A drop-in for ``celery.Celery``; takes the same arguments."""

    task_cls: Any = OutboxTask
