"""The backend of ``django.tasks``: ``enqueue()`` stages a job, and a Celery worker runs it.

The result is a row, written in the same transaction as the job: after a rollback there is neither.
The message holds only the id; the task and its arguments are read from the row. If a worker dies,
the row stays RUNNING, the message is delivered again, and the task runs once more: at least once.
The first attempt that ends decides the result; a delivery after that does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from traceback import format_exception
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import django.db
from celery import current_app
from celery.exceptions import (
    Retry,
    SoftTimeLimitExceeded,
    WorkerLostError,
    WorkerShutdown,
    WorkerTerminate,
)
from django.core.checks import CheckMessage, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from ..aliases import outbox_alias
from ..database.clock import stored
from ..database.transaction_guard import LOST
from ..database.transactions import is_atomic, send_inside
from ..failpoints import failpoint
from ..jobs.idempotent import retry_later
from ..jobs.staging.calls import alias_outside, force_staging
from ..jobs.staging.insert import chunk_bytes
from ..jobs.staging.receipt import checked_limit
from ..jobs.staging.sending import make_stageable
from ..jobs.staging.validation import check_name, check_size, speaks_amqp
from ..text import get_logger, storable
from .models import RUN_TASK
from .models import TaskResult as Row

if TYPE_CHECKING or django.VERSION >= (6,):
    from django.tasks import DEFAULT_TASK_QUEUE_NAME, TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
else:
    from django_tasks import DEFAULT_TASK_QUEUE_NAME, TaskContext, TaskResult, TaskResultStatus
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

logger = get_logger("outbox_app.django_tasks")

#: Priorities as brokers have them: -100 to 100 is mapped to 0 to 10, so 0 becomes 5.
LEVELS = 10
#: After so many attempts that ended with their worker, a task has failed.
MOST_ATTEMPTS = 10
#: The longest traceback. A longer one is cut at the front, as its end says most.
MOST_CHARACTERS = 100_000
#: The exit codes of pool processes that a signal has ended.
_TERMINATED = range(-255, -191)


class OutboxBackend(BaseTaskBackend):
    """For ``TASKS = {"default": {"BACKEND": "outbox_app.django_tasks.OutboxBackend"}}``."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def enqueue(
        self, task: Task[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult[Any, Any]:
        """Stage a call in the caller's transaction, and write the row of its result there, too.

        Outside a transaction the setting OUTSIDE decides, as for ``delay()``.
        """
        self.validate_task(task)
        path = check_name("task", task.module_path)
        if _load(path).func is not task.func:
            raise InvalidTask(f"A worker would run another function, as {path} is that one.")
        now = timezone.now()
        call = {
            "backend": self.alias,
            "queue_name": task.queue_name,
            "priority": task.priority,
            "run_after": task.run_after and task.run_after.isoformat(),
            "args": [_as_json(each, f"{n}", path) for n, each in enumerate(args, 1)],
            "kwargs": {name: _as_json(each, f"{name}=", path) for name, each in kwargs.items()},
        }
        row = Row(
            task_id=str(uuid4()),
            task=path,
            call=json.dumps(call),
            status=Row.Status.READY,
            enqueued_at=now,
            kept_from=max(now, stored(task.run_after or now)),
        )
        receipt = checked_limit(self.options.get("receipt", 0), f"receipt of TASKS[{self.alias!r}]")
        _send(row, task, receipt)
        result = _result(row, task)
        send_inside(task_enqueued, type(self), outbox_alias(), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        try:
            row = _rows().get(task_id=str(UUID(str(result_id))))
        except (ValueError, Row.DoesNotExist) as error:
            raise TaskResultDoesNotExist(result_id) from error
        return _result(row, _task_of(row))

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return list(_faults(self))


def _as_json(value: Any, argument: str, task: str) -> Any:
    try:
        return normalize_json(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Argument {argument} of {task} cannot be written as JSON: {error}") from error


def _send(row: Row, task: Task[..., Any], receipt: int | None) -> None:
    """Insert the row and stage the job; outside a transaction OUTSIDE may say to send it."""
    using = outbox_alias()
    _check_size(row)
    options: dict[str, Any] = {"task_id": row.task_id, "shadow": row.task}
    level = (task.priority + 100) * LEVELS // 200
    options["priority"] = level if speaks_amqp(current_app) else LEVELS - level
    if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
        options["queue"] = task.queue_name
    if due := task.run_after:
        is_naive, own = timezone.is_naive(due), timezone.get_default_timezone()
        options["eta"] = timezone.make_aware(due, own) if is_naive else due
    run = make_stageable(current_app).tasks[RUN_TASK]
    has_receipt = receipt is not None
    staged = is_atomic(using) or alias_outside(row.task, using, has_receipt=has_receipt)
    # No block inside that of a test case, which does not count: ours would.
    opens = staged and not connections[using].in_atomic_block
    with transaction.atomic(using=using) if opens else nullcontext():
        row.save(using=using, force_insert=True)
        try:
            with force_staging(using=using, receipt=receipt) if staged else nullcontext():
                run.apply_async((row.task_id,), **options)
        except BaseException:
            with suppress(django.db.Error):  # if this fails, the transaction cannot commit, either
                row.delete(using=using)
            raise


def execute(task_id: str, celery_task: Any) -> None:
    """Attempt a task, and record its result. Raise the task's exception again, for Celery."""
    request = celery_task.request
    try:
        row = _begin(task_id, worker=f"{request.hostname}:{os.getpid()}")
        error = _attempt(row, request) if row else None
    except (SoftTimeLimitExceeded, django.db.Error) as unavailable:
        if request.is_eager:
            raise
        connections[outbox_alias()].close()  # CELERY_DB_REUSE_MAX would keep a dead one open
        # An exception would end the task for Celery, and acknowledge its message: retry instead.
        retry_later(celery_task, unavailable)
    if error is not None:  # one with a length may count as false
        raise error


def _begin(task_id: str, *, worker: str) -> Row | None:
    with transaction.atomic(using=outbox_alias()):
        row: Row | None = _rows().select_for_update().filter(task_id=task_id).first()
        if row is None or row.finished_at:
            reason = "it has finished already" if row else "it was cancelled, or has been pruned"
            logger.warning("Task is not run task_id=%s reason=%s", task_id, reason)
            return None
        row.status = Row.Status.RUNNING
        row.last_attempted_at = row.kept_from = timezone.now()
        row.started_at = row.started_at or row.last_attempted_at
        row.worker_ids = json.dumps([*json.loads(row.worker_ids), worker])
        row.save(using=row._state.db)
    return row


def _attempt(row: Row, request: Any) -> Exception | None:
    """Run the task; return the exception that it raised, or None."""
    task = None
    try:
        task = _task_of(row)
        result = _result(row, task)
        if result.attempts > MOST_ATTEMPTS:
            raise WorkerLostError(f"None of {MOST_ATTEMPTS} attempts has ended; see their workers.")
        task_started.send_robust(type(task.get_backend()), task_result=result)
        request.outbox_body = task.func
        context = [TaskContext(task_result=result)] if task.takes_context else []
        returned = task.call(*context, *result.args, **result.kwargs)
        row.return_value = json.dumps(normalize_json(returned))
        _check_size(row)
    except (KeyboardInterrupt, WorkerShutdown, WorkerTerminate):
        raise
    except Retry:
        with suppress(SoftTimeLimitExceeded, django.db.Error):  # the retry is sent; no second one
            _take_back(row)
        raise
    except BaseException as error:
        if _ends_worker(error):
            raise  # the worker ends: the message is delivered again
        row.status, row.return_value = Row.Status.FAILED, "null"
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        trace = storable("".join(format_exception(error)))[-MOST_CHARACTERS:]
        row.errors = json.dumps([{"exception_class_path": path, "traceback": trace}])
        _finish(row, task)
        return error if isinstance(error, Exception) else None
    row.status = Row.Status.SUCCESSFUL
    _finish(row, task)
    return None


def _ends_worker(error: BaseException) -> bool:
    is_killed = type(error).__name__ == "GreenletExit"  # of gevent, or eventlet
    return is_killed or (isinstance(error, SystemExit) and error.code in _TERMINATED)


def _take_back(row: Row) -> None:
    """Take an attempt that ended in ``retry()`` off the count, as it may only have waited."""
    with transaction.atomic(using=outbox_alias()):
        unfinished = _rows().select_for_update().filter(pk=row.pk, finished_at=None)
        for workers in map(json.loads, unfinished.values_list("worker_ids", flat=True)):
            workers.remove(json.loads(row.worker_ids)[-1])
            unfinished.update(worker_ids=json.dumps(workers))


def _finish(row: Row, task: Task[..., Any] | None) -> None:
    """Record the result, unless another attempt has recorded one."""
    failpoint("task_ran")
    row.finished_at = row.kept_from = timezone.now()
    names = ("status", "return_value", "errors", "finished_at", "kept_from")
    values = {name: getattr(row, name) for name in names}
    unfinished = _rows().filter(pk=row.pk, finished_at=None)
    try:
        changed = unfinished.update(**values)
    except (SoftTimeLimitExceeded, *LOST):
        # The connection may have died while the task ran. That is no reason to run the task again.
        if connections[unfinished.db].in_atomic_block:
            raise
        connections[unfinished.db].close()
        changed = unfinished.update(**values)  # maybe only the answer was lost
        changed = changed or _rows().filter(pk=row.pk, finished_at=row.finished_at).count()
    if not changed:
        logger.warning("Another attempt has decided the result task_id=%s", row.task_id)
    elif task:
        task_finished.send_robust(type(task.get_backend()), task_result=_result(row, task))


def _rows() -> Any:
    return Row.objects.using(outbox_alias())


def _check_size(row: Row) -> None:
    check_size(row)
    chunk_bytes([row], using=outbox_alias())


def _load(path: str) -> Task[..., Any]:
    try:
        found = import_string(path)
    except ImportError as error:
        raise InvalidTask(f"A worker cannot import {path}: {error}.") from error
    if not isinstance(found, Task):
        raise InvalidTask(f"A worker finds no task at {path}. Decorate the function itself.")
    return found


def _task_of(row: Row) -> Task[..., Any]:
    task, call = _load(row.task), json.loads(row.call)
    names = ("backend", "queue_name", "priority")
    due = call["run_after"] and datetime.fromisoformat(call["run_after"])
    # If the settings have changed since, the task runs all the same.
    with suppress(InvalidTask, ImproperlyConfigured):  # queue or backend is gone
        task = replace(task, run_after=due, **{name: call[name] for name in names})
    return task


def _result(row: Row, task: Task[..., Any]) -> TaskResult[..., Any]:
    call = json.loads(row.call)
    result: TaskResult[..., Any] = TaskResult(
        task=task,
        id=row.task_id,
        status=TaskResultStatus(row.status),
        enqueued_at=row.enqueued_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        last_attempted_at=row.last_attempted_at,
        args=call["args"],
        kwargs=call["kwargs"],
        backend=call["backend"],
        errors=[TaskError(**each) for each in json.loads(row.errors)],
        worker_ids=json.loads(row.worker_ids),
    )
    object.__setattr__(result, "_return_value", json.loads(row.return_value))
    return result


def _faults(backend: OutboxBackend) -> Iterator[CheckMessage]:
    declared = {getattr(queue, "name", queue) for queue in current_app.conf.task_queues or ()}
    missing = sorted(backend.queues - declared - {DEFAULT_TASK_QUEUE_NAME})
    if declared and missing:
        yield Warning(
            f"TASKS[{backend.alias!r}] has the queues {', '.join(missing)}, which the setting "
            f"task_queues of Celery app {current_app.main!r} does not declare.",
            hint="Add them there. Else no worker takes from them, unless -Q names them; with "
            "task_create_missing_queues off enqueue() is refused.",
            id="outbox.W043",
        )
