"""Ends of which only the main process of a worker knows: no process of the pool returns from them.

A task that is revoked, expired or terminated, or whose hard time limit is over, is not executed
again. A worker that was lost is no end, and neither is a copy of a message that is revoked or
expired while a worker executes the job. The connection is closed after each: children that are
forked later must not inherit it. If the database is away, the job stays, and is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from billiard.exceptions import TimeLimitExceeded

from ..jobs.message import ADDRESS
from ..text import get_logger
from .ledger import Address, Ledger, Seen

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
        for request in [each for each in _requests if each.id == task_id]:
            _end(Address.read(request.request_dict[ADDRESS], task_id), lambda seen: True)


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
