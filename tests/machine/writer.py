"""Staging for the machine: jobs of every kind, through Celery's own calls, in an open transaction.

``LateWriter`` keeps a transaction open over several steps, in a thread with a connection of its
own, so that rows with low ids commit after rows with higher ids were drained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from django.db import connections, transaction
from django.utils import timezone

from outbox_app.models import StagedJob
from tests.patience import patience

from .brokers import REFUSED_QUEUE
from .model import DAMAGED, EXPIRED, HELD, REFUSED, SCRIBBLED, STRANGER, Model, Spec

T = TypeVar("T")
#: Held jobs are due after so many seconds.
DUE = 3600
_DAMAGE = {
    SCRIBBLED: {"body": b"\xff{"},
    DAMAGED: {"envelope": "{nonsense"},
    STRANGER: {"app": "nobody"},
}


class Writer:
    """Stages jobs and tells the model.

    Args:
        using: Database alias.
        tasks: One task of each Celery app.
        model: What to tell.
    """

    def __init__(self, *, using: str, tasks: Sequence[Any], model: Model) -> None:
        self.using = using
        self.tasks = tasks
        self.model = model

    def stage(
        self, specs: Sequence[Spec], *, transaction: int, immediate: bool = False
    ) -> list[str]:
        """Stage jobs in the transaction that this thread has open. Returns their task ids."""
        return [self._stage(spec, transaction, immediate) for spec in specs]

    def requeued(self, task_ids: Sequence[str]) -> None:
        """Tell the model of jobs that a person has just requeued, with their new ids."""
        rows = StagedJob.objects.using(self.using).filter(task_id__in=task_ids)
        for task_id, id in rows.values_list("task_id", "id"):
            self.model.requeued(task_id, id=id)

    def _stage(self, spec: Spec, transaction: int, immediate: bool) -> str:
        # Not a random id: it decides on the shard, and runs have to repeat.
        task_id = f"job-{len(self.model.specs)}"
        options: dict[str, Any] = {"ordering_key": spec.key, "task_id": task_id}
        options["immediate"] = immediate
        if spec.kind == EXPIRED:
            options["expires"] = timezone.now() - timedelta(hours=1)
        elif spec.kind == HELD:
            options["countdown"] = DUE
        elif spec.kind == REFUSED:
            options["queue"] = REFUSED_QUEUE
        self.tasks[spec.app].apply_async((spec.key, 1), **options)
        rows = StagedJob.objects.using(self.using)
        id, shard = rows.filter(task_id=task_id).values_list("id", "shard").get()
        if damage := _DAMAGE.get(spec.kind):
            rows.filter(pk=id).update(**damage)  # no index has task ids: it would lock all rows
        self.model.staged(task_id, spec, transaction=transaction, id=id, shard=shard)
        return task_id


class LateWriter:
    """A transaction that stays open.

    Args:
        using: Database alias.
    """

    def __init__(self, *, using: str) -> None:
        self.using = using
        self._thread = ThreadPoolExecutor(1, "late-writer")
        self._atomic = transaction.atomic(using=using)
        self.do(self._atomic.__enter__)

    def do(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do something inside the transaction."""
        return self._thread.submit(step, *args, **kwargs).result(timeout=patience(30))

    def end(self, *, commit: bool) -> None:
        """Commit or roll back."""
        self.do(self._end, commit)
        self._thread.shutdown()

    def _end(self, commit: bool) -> None:
        if not commit:
            transaction.set_rollback(True, using=self.using)
        self._atomic.__exit__(None, None, None)
        connections[self.using].close()
