"""The Celery app of the worker processes: as a project has it, found tasks included."""

from __future__ import annotations

import os

from outbox_app.celery import OutboxCelery

app = OutboxCelery("tasks-worker", broker=os.environ["TASKS_BROKER"])
app.conf.task_default_queue = os.environ["TASKS_QUEUE"]
app.conf.task_queue_max_priority = 10
app.autodiscover_tasks()
