"""The Celery task that runs the enqueued tasks.

Celery loads this module in every worker, even if neither Django 6 nor ``django-tasks`` is
installed: code that needs one of them is imported at first use.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task


# The worker acknowledges a message after its task: if the worker dies, the broker redelivers it.
@shared_task(
    name="outbox_app.run_task",
    bind=True,
    acks_late=True,
    reject_on_worker_lost=True,
    ignore_result=True,
)
def run_task(self: Any, task_id: str) -> None:
    """Run the task of ``django.tasks`` that has this id."""
    from .backend import execute

    execute(task_id, self)
