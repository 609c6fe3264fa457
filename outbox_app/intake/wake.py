"""Waking the drainers after a commit. Nothing depends on it: a lost wake-up costs one interval.

On PostgreSQL a NOTIFY goes out in a statement of its own, after the commit: inside the business
transaction it would take a lock on the whole database at commit. A process sends at most one in
``DEBOUNCE`` seconds. What is left out in that time is not lost: a drainer that was woken looks
again after ``LINGER`` seconds, which is longer, before it goes back to its interval. Elsewhere
nothing is sent, and the drainers poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from django.db import connections, transaction

from ..conf import settings

CHANNEL = "outbox_jobs"
#: At most one NOTIFY of a process in this time, in seconds.
DEBOUNCE = 0.02
#: A woken drainer looks once more after this time, in seconds. Longer than DEBOUNCE.
LINGER = 0.05

_last_sent: dict[str, float] = {}


def wake_after_commit(using: str) -> None:
    """Have the drainers of ``using`` woken when the open transaction commits."""
    connection = connections[using]
    if connection.vendor != "postgresql" or not settings().WAKE:
        return
    waker = _waker(using)
    pending = connection.run_on_commit
    # One is enough: it is gone only if a savepoint is rolled back that is open now as well.
    if pending and pending[-1][1] is waker:
        return
    transaction.on_commit(waker, using=using, robust=True)


def wake(using: str) -> None:
    """Wake the drainers that listen on ``using``, unless this process has just done so."""
    now = time.monotonic()
    if now - _last_sent.get(using, -DEBOUNCE) < DEBOUNCE:
        return
    connection = connections[using]
    if connection.in_atomic_block or connection.vendor != "postgresql":
        return
    _last_sent[using] = now
    with connection.cursor() as cursor:
        cursor.execute(f"NOTIFY {CHANNEL}")


@cache
def _waker(using: str) -> Callable[[], None]:
    def wake_drainers() -> None:  # no partial: where it fails, Django logs its __qualname__
        wake(using)

    return wake_drainers
