"""Ends of which only the main process of a worker knows: no process of the pool returns from them.

A task that is revoked, expired or terminated, or whose hard time limit is over, is not executed
again. A worker that was lost is no end. Neither is a copy of a message that is revoked or expired,
or whose limit is over, while another worker executes the job, or was lost a moment ago. The
connection is closed after each: children that are forked later must not inherit it. If the database
is away, the job stays, and is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from billiard.exceptions import TimeLimitExceeded

from ..jobs.message import ADDRESS
from ..text import get_logger
from .ledger import Address, Ledger, Seen
from .run import mark_of

logger = get_logger("outbox_app.receipts")

#: The requests of this worker that have a receipt, as long as Celery has them.
_requests: WeakSet[Any] = WeakSet()


def remember(request: Any, **kwargs: Any) -> None:
    """Note a request: the signal of a failure does not have its headers."""
    if Address.read(request.request_dict.get(ADDRESS), request.id):
        _requests.add(request)


def settle_revoked(request: Any, terminated: bool = False, **kwargs: Any) -> None:
    _end(
        Address.read(getattr(request, ADDRESS, None), request.id),
        lambda seen: terminated or seen.token is None or bool(seen.is_over),
    )


def settle_hard_limit(task_id: str, exception: Any, **kwargs: Any) -> None:
    if isinstance(exception, TimeLimitExceeded):
        from celery.worker.state import active_requests  # only workers have loaded it

        # Celery counts the time since a process took the message, though that may only watch a run.
        over = [each for each in _requests if each.id == task_id and each not in active_requests]
        for request in over:
            job = Address.read(request.request_dict[ADDRESS], task_id)
            _end(job, partial(_is_run_of, request.worker_pid))


def _is_run_of(worker_pid: int, seen: Seen) -> bool:
    return mark_of(worker_pid) in (seen.token or "")


def _end(job: Address | None, is_end: Callable[[Seen], bool]) -> None:
    if job is None:
        return
    try:
        ledger = Ledger(job.alias)
        try:
            if (seen := ledger.look(job)) and is_end(seen):
                ledger.end(job)
        finally:
            ledger.close()
    except Exception as error:
        logger.warning("Receipt not written task_id=%s error=%s", job.task_id, error)
