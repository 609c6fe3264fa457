"""Where a worker begins and ends a job: around Celery's tracer of its task.

``Task.__trace__`` becomes a data descriptor whose setter wraps the tracer once. All pools assign
and call this attribute, and nothing else does: eager mode and direct calls never pass it. After the
tracer the callbacks, the next step of a chain and the part of a chord are sent, and the result is
stored. A message without the header of a row costs one look-up in a dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.task import Task
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.signals import (
    task_failure,
    task_received,
    task_revoked,
    worker_process_shutdown,
    worker_shutdown,
)

from ..jobs.context import let
from ..jobs.inbox import inboxes
from ..jobs.message import ADDRESS
from ..text import get_logger
from . import settling
from .keeper import stop_keepers
from .ledger import Address
from .run import JobRun, begin

logger = get_logger("outbox_app.receipts")

#: Seconds that a worker waits before it gives a message back, because the database is away; and
#: how often it waits with a message that was acknowledged before.
AWAY_SECONDS = 5.0
EARLY_TRIES = 12
#: What the tracer returns for a message that is acknowledged, and nothing else: no result, no
#: follow-up.
SKIPPED = trace_ok_t(None, None, 0.0, "None")


class TracerAttribute:
    """``Task.__trace__``: None, or a tracer of the task, wrapped."""

    def __get__(self, task: Any, owner: type) -> Any:
        return None if task is None else vars(task).get("__trace__")

    def __set__(self, task: Any, tracer: Any) -> None:
        vars(task)["__trace__"] = None if tracer is None else with_receipt(task, tracer)


def install() -> None:
    """Let the workers of this process give receipts. Called once, when Django is ready."""
    if isinstance(vars(Task).get("__trace__"), TracerAttribute):
        return
    Task.__trace__ = TracerAttribute()
    task_received.connect(settling.remember, dispatch_uid="outbox_app.receipts")
    task_revoked.connect(settling.settle_revoked, dispatch_uid="outbox_app.receipts")
    task_failure.connect(settling.settle_hard_limit, dispatch_uid="outbox_app.receipts")
    for ending in (worker_process_shutdown, worker_shutdown):
        ending.connect(stop_keepers, dispatch_uid="outbox_app.receipts")


def with_receipt(task: Any, tracer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tracer that begins and ends the run of a job, if its message names a row."""

    @wraps(tracer)
    def trace(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        job = Address.read((request or {}).get(ADDRESS), uuid)
        if job is None:
            return tracer(uuid, args, kwargs, request)
        try:
            run = _begin_or_wait(task, job, request)
        except Exception as error:
            return _given_back(error)
        if run is None:
            return SKIPPED
        try:
            with let(inboxes, run.inboxes):
                result = tracer(uuid, args, kwargs, request)
        except Reject as reject:
            run.finish(TraceInfo(states.REJECTED, reject))
            raise
        except BaseException:
            run.abandon()
            raise
        is_internal = getattr(result[0], "internal", False)
        if is_internal and getattr(result[1], "state", "") == states.FAILURE:
            run.abandon()  # what follows it was not sent, or the result not stored
        else:
            run.finish(result[1])
        return result

    return trace


def _begin_or_wait(task: Any, job: Address, request: Any) -> JobRun | None:
    """Begin a job. While the database is away wait, and then give the message back to the broker.

    A message that was acknowledged before cannot be given back: then wait for longer. After that
    the row is still there, and the drain sends the job again.
    """
    pauses = [AWAY_SECONDS] * (1 if task.acks_late else EARLY_TRIES)
    while True:
        try:
            return begin(task, job, request)
        except Exception as error:
            text = "Job not begun task=%s task_id=%s error=%s"
            logger.error(text, task.name, job.task_id, error)
            if not pauses or isinstance(error, SoftTimeLimitExceeded):
                raise
            time.sleep(pauses.pop())


def _given_back(error: Exception) -> Any:
    """Return what Celery's tracer returns for a task that rejects its message with requeue."""
    try:
        raise Reject(error, requeue=True)
    except Reject as reject:
        return trace_ok_t(
            ExceptionInfo(internal=True), TraceInfo(states.REJECTED, reject), 0.0, None
        )
