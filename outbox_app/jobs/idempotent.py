"""The inbox: ``@idempotent`` lets a job's database effects happen once, however often it arrives.

The task runs in one transaction with an INSERT of its job id (Celery's task id), so the id is there
if and only if the effects are. A second delivery finds the id, does nothing and returns the first
result. If two deliveries run at the same moment, the second waits at the primary key; if the
database ends that wait, Celery retries the task. A task that raises leaves no id, so ``retry()``
and ``replace()`` work. Not covered: mail, HTTP, other databases, and ids older than the retention.

A callback of ``on_commit`` runs after the commit, once at most. While one is at risk
(``database.callbacks``) the row of the id names it, so that a later delivery does not succeed as if
it had run: after a callback that failed, or a worker that died before it, the job has failed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction
from celery import Task
from celery._state import get_current_task
from celery.exceptions import Reject
from celery.local import Proxy
from django.db import OperationalError, connections, transaction
from kombu.utils import json

from ..aliases import inbox_alias
from ..database.callbacks import AfterCommit, at_risk, keep_callbacks_apart
from ..database.lock_wait import is_conflict, sqlstate
from ..database.transaction_guard import SwallowedError, guarded
from ..exceptions import CallbackFailed, InboxError, TransactionEnded
from ..text import get_logger
from .context import let
from .inbox import HINT, entry_of, inboxes, keep, note, settle
from .staging.detector import watching_callbacks

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
        CallbackFailed: At run time: the effects are committed, but a callback of ``on_commit`` has
            raised, or did not run because the worker died.
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
    what, noted = f"{task.name}[{job_id}]", False
    try:
        with transaction.atomic(using=using):
            if not connections[using].commit_on_exit:
                raise InboxError(
                    f"Autocommit is off on {using!r}, so nothing would commit the effects of "
                    f"{what}. Turn it on before the task runs."
                )
            first = note(job_id, task.name, using=using)
            noted = True
            if first:
                running = let(_in_progress, _in_progress.get() | {job_id})
                watched = watching_callbacks(f"The task {task.name}", using=using)
                with running, guarded(what, using=using), watched:
                    result = function()
                # In another transaction, as of a test case, callbacks run at its end, not here.
                is_outermost = len(connections[using].atomic_blocks) == 1
                callbacks = at_risk(using) if is_outermost else []
                keep(result, callbacks, task, job_id, using=using)
                after = AfterCommit()
                if is_outermost:
                    after = keep_callbacks_apart(using, of=what, alone=True)
            else:
                logger.info("Job was handled already task=%s task_id=%s", task.name, job_id)
                columns = entry_of(job_id, using=using).values_list("result", "callbacks")
                kept, unfinished = columns.first() or ("", "")
        # Not before the commit: the task that replaces this one has the same id.
        if (noted_on := inboxes.get()) is not None:
            noted_on.add(using)
        if not first:
            return _repeat(task, what, kept, unfinished)
        if callbacks:
            settle(what, job_id, after, using=using)
        for limit in after.limits:
            raise limit
        return result
    except SwallowedError as error:
        raise InboxError(str(error)) from error
    except TransactionEnded as error:
        # With the id there, another delivery would skip a job whose effects may be incomplete.
        entry_of(job_id, using=using).delete()
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


def _repeat(task: Any, what: str, kept: str, unfinished: str) -> Any:
    """Return the first result. Raises ``CallbackFailed`` if a callback did not run to its end."""
    if unfinished:
        left = json.loads(unfinished)
        error = CallbackFailed(
            f"An earlier delivery of {what} has committed its effects, but its worker did not run "
            f"these on_commit callbacks to their end: {left['callbacks']}. {HINT}"
        )
        if time.time() < left["until"] and not task.request.is_eager:
            retry_later(task, error)  # the earlier delivery may still run them
        raise error
    return json.loads(kept) if kept else None


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
