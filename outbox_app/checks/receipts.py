"""Tasks with a receipt: workers can give one, and a worker that is lost costs no more than a run.

Celery stores a failure, and fails the chord, for a task whose worker is lost, unless the task has
both ``acks_late`` and ``reject_on_worker_lost``: its job runs again all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core.checks import CheckMessage, Error, Warning

from ..exceptions import InvalidJob
from ..jobs.staging.receipt import check_worker, receipt_of
from ..jobs.staging.sending import staging_apps
from .messages import listed


def check_receipts(**kwargs: Any) -> Iterator[CheckMessage]:
    unsafe: set[str] = set()
    for app in staging_apps():
        tasks: dict[str, Any] = {}
        with suppress(Exception):  # reported by check_apps
            tasks.update(app.tasks)
        for name, task in sorted(tasks.items()):
            try:
                if receipt_of(task, name) is None:
                    continue
                check_worker(task, name)
            except InvalidJob as error:
                yield Error(str(error), hint="Its jobs are refused.", id="outbox.E050")
                continue
            is_builtin = name.startswith("celery.")
            if not is_builtin and not (task.acks_late and task.reject_on_worker_lost):
                unsafe.add(name)
    if unsafe:
        yield Warning(
            "These tasks have a receipt, but not both acks_late and reject_on_worker_lost: "
            f"{listed(sorted(unsafe))}. If a worker is lost, Celery reports a failure and fails "
            "their chords, though their jobs run again, and that only after their limit.",
            hint="Declare them with acks_late=True and reject_on_worker_lost=True. Silence this if "
            "no code reads their results.",
            id="outbox.W054",
        )
