"""One attempt of a worker to execute a job with a receipt.

A job whose run has a lease is executed by a worker, or was a moment ago: its worker may be lost, or
the job may have retried itself. So the run is watched. If its lease is renewed, this message is a
copy. If the lease ends, or the run is gone and the row is not, this worker begins the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from socket import gethostname
from threading import get_ident
from traceback import walk_tb
from typing import Any
from uuid import uuid4

from celery import Task, states
from celery.exceptions import Reject, Retry
from django.db import connections

from ..exceptions import NoReceipt
from ..jobs.drain.batch import Row
from ..jobs.drain.dead_rows import move_to_dead
from ..jobs.staging.receipt import ATTEMPTS, receipt_of
from ..text import get_logger
from .keeper import Keeper, keeper_of
from .ledger import Address, Seen

logger = get_logger("outbox_app.receipts")

#: Seconds between two looks at a run that another worker has: at first, and at most.
WATCH_SECONDS = (0.02, 1.0)


class JobRun:
    """A job that this worker has begun."""

    def __init__(self, job: Address, token: str, keeper: Keeper) -> None:
        self.job, self.token, self.keeper = job, token, keeper
        #: The aliases of the inboxes in which the job has an entry: ``@idempotent`` adds to it.
        self.inboxes: set[str] = set()

    def finish(self, info: Any) -> None:
        """Settle the row by how the job ended.

        Args:
            info: What Celery's tracer returns beside the value: None for a success.
        """
        value: Any = getattr(info, "retval", None)
        state = getattr(info, "state", states.SUCCESS)
        if state == states.RETRY:
            self.drop(retry_in=_seconds_until(value))
        elif state == states.REJECTED and (value.requeue or _is_of_retry(value)):
            self.drop()
        else:
            self.end()

    def end(self) -> None:
        self.keeper.forget(self.token)
        has_entry = self.job.alias in self.inboxes
        ledger = self.keeper.ledger
        self.keeper.do(self.job.task_id, lambda: ledger.end(self.job, has_entry=has_entry))

    def drop(self, *, retry_in: float | None = None) -> None:
        """Take the run back: the job's message comes again."""
        self.keeper.forget(self.token)
        ledger = self.keeper.ledger
        self.keeper.do(
            self.job.task_id, lambda: ledger.drop(self.job, self.token, retry_in=retry_in)
        )

    def abandon(self) -> None:
        """Renew the lease no longer: this was no end, and then another worker begins the job."""
        self.keeper.forget(self.token)


def mark_of(worker_pid: int) -> str:
    """Return what the tokens hold of what Celery calls a ``worker_pid``, on this host."""
    return sha256(f"{gethostname()}:{worker_pid}".encode()).hexdigest()[:10]


def new_token() -> str:
    """Return a token that names its worker: with gevent and eventlet that is a greenlet."""
    return f"{mark_of(os.getpid())}-{mark_of(get_ident())}-{uuid4().hex[:10]}"


def begin(task: Any, job: Address, request: Mapping[str, Any]) -> JobRun | None:
    """Begin a job, or return None: it has ended, or was cancelled; or another worker runs it."""
    receipt = receipt_of(task, task.name)
    most = receipt.attempts if receipt else ATTEMPTS
    keeper = keeper_of(job.alias)
    run = JobRun(job, new_token(), keeper)
    attempts = _begin(run, request)
    if attempts is None:
        return None
    if attempts > most:
        _bury(run, task.name, most)
        return None
    keeper.keep(job, run.token)
    return run


def _begin(run: JobRun, request: Mapping[str, Any]) -> int | None:
    ledger, first = run.keeper.ledger, None
    retries = request.get("retries") or 0
    worker = str(request.get("hostname") or "")
    pause, longest = WATCH_SECONDS
    while True:
        attempts = ledger.begin(
            run.job,
            worker=worker,
            token=run.token,
            retries=retries,
            seconds=run.keeper.lease_seconds,
        )
        if attempts is not None:
            return attempts
        seen = ledger.look(run.job)
        if seen is None:
            logger.info("Job has ended or was cancelled task_id=%s", run.job.task_id)
            return None
        if seen.token is not None:
            if first is not None and _is_alive(seen, first, retries):
                logger.info("Job is executed by another worker task_id=%s", run.job.task_id)
                return None
            first = first or seen
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _is_alive(seen: Seen, first: Seen, retries: int) -> bool:
    """Return whether another worker executes the same message, as its lease has been renewed.

    A run of an earlier retry ends in a moment: it has sent this message.
    """
    renewed = seen.lease_until != first.lease_until
    return renewed and retries <= (seen.retries or 0)


def _bury(run: JobRun, task: str, most: int) -> None:
    job = run.job
    error = NoReceipt(
        f"The job was begun {most} times, and no worker has executed it to its end. Look for "
        "what kills workers (memory, time limits), and in their logs for an internal error of "
        "Celery (no result stored, no next step sent). Then requeue the job."
    )
    # Its lease ends now: a job that a worker executes is not given up.
    run.keeper.ledger.renew([(job.id, run.token)], seconds=0)
    row = Row(job.id, 0, "", "", task, job.task_id, "", b"", "")
    try:
        move_to_dead(row, error, using=job.alias)
    finally:
        connections[job.alias].close()  # it is not a task's, after which Celery closes it
    run.end()


def _is_of_retry(reject: Reject) -> bool:
    """Return whether ``retry()`` raised it: so Celery reports that the broker took no retry."""
    code = None
    for frame, _ in walk_tb(reject.__traceback__):
        code = frame.f_code
    return code is Task.retry.__code__


def _seconds_until(retry: Retry) -> float:
    when = retry.when
    if isinstance(when, datetime):
        now = datetime.now(when.tzinfo) if when.tzinfo else datetime.now()
        return max(0.0, (when - now).total_seconds())
    return max(0.0, float(when or 0))
