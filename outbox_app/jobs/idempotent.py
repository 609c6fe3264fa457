"""The inbox: ``@idempotent`` lets a job's database effects happen once, however often it arrives.

The task runs in one transaction with an INSERT of its job id (Celery's task id), so the id is there
if and only if the effects are. A second delivery finds the id, does nothing and returns the first
result. If two deliveries run at the same moment, the second waits at the primary key; if the
database ends that wait, Celery retries the task. A task that raises leaves no id, so ``retry()``
and ``replace()`` work. Not covered: mail, HTTP, other databases, and ids older than the retention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction
from celery import Task
from celery._state import get_current_task
from celery.backends.base import DisabledBackend
from celery.exceptions import Reject
from celery.local import Proxy
from django.db import OperationalError, connections, transaction
from kombu.utils import json

from ..aliases import inbox_alias
from ..exceptions import InboxError, TransactionEnded
from ..process.enclosure import SwallowedError, enclosed
from ..process.lock_wait import is_conflict, sqlstate
from ..text import get_logger
from .context import let

try:
    from celery.app.task import get_actual_ignore_result  # type: ignore[attr-defined]
except ImportError:  # before Celery 5.7 a call cannot turn off its task's ignore_result

    def get_actual_ignore_result(task: Any, request: Any) -> bool:
        return bool(task.ignore_result or request.ignore_result)


logger = get_logger("outbox_app.inbox")

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds until a delivery that met another one in progress is tried again.
RETRY_SECONDS = 5

_in_progress: ContextVar[frozenset[str]] = ContextVar("outbox_app_in_progress", default=frozenset())


@overload
def idempotent(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def idempotent(*, using: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def idempotent(function: Any = None, /, *, using: str | None = None) -> Any:
    """Make a task's database effects happen once per job id. Goes below ``@shared_task``.

    The function runs inside ``transaction.atomic(using=using)``. A direct call, without a
    worker, has no job id: it just runs the function in a transaction.

    Args:
        function: The function of a task (or the method ``run`` of a task class).
        using: Database alias of the effects, and of the inbox. Default: the setting INBOX_DATABASE,
            else the alias of the outbox.

    Returns:
        The function; a coroutine function is called without ``await`` from then on. A second
        delivery returns the first result, or None if no caller could ask for the result
        (``ignore_result``, or no result backend) and no later task of a chain takes it.

    Raises:
        TypeError: The argument is no function: ``@idempotent`` stands above ``@shared_task``, say.
        InboxError: At run time: the id or the result cannot be stored. Nothing is committed.
    """
    if function is None:
        return partial(idempotent, using=using)
    if isinstance(function, Proxy | Task):
        raise TypeError("@idempotent stands above the task decorator. Write it directly below.")
    if not callable(function):
        raise TypeError(f"@idempotent takes a function; got {function!r}. An alias goes to using=.")
    # The queries of a coroutine (a task of django.tasks) run in this thread and its transaction.
    body = async_to_sync(function) if iscoroutinefunction(function) else function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        alias = using or inbox_alias()
        task = get_current_task()
        job_id = str(task.request.id or "") if task else ""
        # The id is in progress if the task calls itself, or an eager replace() runs in its place.
        if not job_id or job_id in _in_progress.get():
            with transaction.atomic(using=alias):
                return body(*args, **kwargs)
        if not _is_body(run, task):
            raise InboxError(
                f"The idempotent function {function.__qualname__} was called inside {task.name}"
                f"[{job_id}], of which it is not the body, so that id is not its own. Call a task "
                "itself, not its run(); let decorators in between use functools.wraps."
            )
        return _once(task, job_id, lambda: body(*args, **kwargs), using=alias)

    # Celery checks the arguments of delay() by the signature, and does not look through wrappers.
    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


def _once(task: Any, job_id: str, function: Callable[[], Any], *, using: str) -> Any:
    noted = False
    try:
        with transaction.atomic(using=using):
            if not connections[using].commit_on_exit:
                raise InboxError(
                    f"Autocommit is off on {using!r}, so nothing would commit the effects of "
                    f"{task.name}[{job_id}]. Turn it on before the task runs."
                )
            first = _note(job_id, task.name, using=using)
            noted = True
            if not first:
                logger.info("Job was handled already task=%s task_id=%s", task.name, job_id)
                kept = _entry(job_id, using=using).values_list("result", flat=True).first()
                return json.loads(kept) if kept else None
            running = let(_in_progress, _in_progress.get() | {job_id})
            with running, enclosed(f"{task.name}[{job_id}]", using=using):
                result = function()
            if result is not None and _is_asked_for(task):
                _keep(result, task, job_id, using=using)
            return result
    except SwallowedError as error:
        raise InboxError(str(error)) from error
    except TransactionEnded as error:
        # With the id there, another delivery would skip a job whose effects may be incomplete.
        _entry(job_id, using=using).delete()
        error.add_note("Its job id was deleted from the inbox: run again, it does all of it again.")
        raise
    except OperationalError as error:
        if noted or task.request.is_eager or not _is_race(error):
            raise
        # Another delivery is in progress. An error would report a job as failed that may succeed.
        retry_later(task, error)


def retry_later(task: Any, error: Exception) -> NoReturn:
    """Retry the task later, even beyond its ``max_retries``."""
    attempts = task.request.retries + 1
    try:
        raise task.retry(exc=error, countdown=RETRY_SECONDS, max_retries=attempts) from error
    except Reject as refused:  # the broker refused the retry: keep this message
        raise Reject(refused.args[0], requeue=True) from error
    finally:
        # Celery keeps ``max_retries`` for ``autoretry_for``, as the limit of all jobs of this task
        # in this process.
        vars(task).pop("override_max_retries", None)


def _note(job_id: str, task: str, *, using: str) -> bool:
    """Insert the id; return False if it exists already.

    The INSERT comes before any read: it waits for another delivery that holds the id.
    """
    from ..models.upsert import insert_if_missing

    if len(job_id) > 255:
        raise InboxError(f"The job id {job_id[:60]!r}… has {len(job_id)} characters; at most 255.")
    entry = {"job_id": job_id, "task": task[:255], "result": ""}
    return insert_if_missing(_entry(job_id, using=using).model, entry, using=using)


def _entry(job_id: str, *, using: str) -> Any:
    from ..models import InboxEntry  # models cannot be imported yet when tasks are declared

    return InboxEntry.objects.using(using).filter(pk=job_id)


def _keep(result: Any, task: Any, job_id: str, *, using: str) -> None:
    try:
        text = json.dumps(result)
    except (TypeError, ValueError) as error:
        raise InboxError(
            f"The result of {task.name}[{job_id}] cannot be kept for a second delivery: {error}. "
            "Return what JSON can hold, or declare the task with ignore_result=True."
        ) from error
    _entry(job_id, using=using).update(result=text)


def _is_asked_for(task: Any) -> bool:
    """Return whether a later task, an eager caller or a result backend may read the result."""
    request = task.request
    if request.chain or request.callbacks or request.chord or request.is_eager:
        return True
    if hasattr(request, "outbox_body"):  # a task of django.tasks: its result is a row
        return True
    ignored = get_actual_ignore_result(task, request)
    return not ignored and not isinstance(task.backend, DisabledBackend)


def _is_body(run: Any, task: Any) -> bool:
    """Return whether ``task`` executes ``run``, maybe wrapped by autoretry, pydantic or tracing."""
    inner = getattr(task.request, "outbox_body", None)
    for body in (task.run, getattr(task, "__wrapped__", None), inner):
        while body is not None:
            if getattr(body, "__func__", body) is run:
                return True
            body = getattr(body, "__wrapped__", None)
    return False


def _is_race(error: OperationalError) -> bool:
    # 57014: a time-out of statements has ended the wait. SQLite: connections share a cache.
    if sqlstate(error) == "57014" or "database table is locked" in str(error):
        return True
    return is_conflict(error)
