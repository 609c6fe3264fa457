"""Wakes the drainers and the subscriptions after a commit. A lost wake-up costs one interval.

On PostgreSQL a NOTIFY is sent by a statement of its own, after the commit: inside the business
transaction it would take a lock on the whole database at commit. On other databases readers poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from django.db import connections, transaction

from ..conf import outbox_settings
from ..database.transaction_guard import after_the_commit
from ..text import get_logger

logger = get_logger("outbox_app.wakeup")

#: Channel of the drainers, and channel of the subscriptions.
JOBS = "outbox_jobs"
EVENTS = "outbox_events"
#: At most one NOTIFY of a process on a channel in this time, in seconds.
DEBOUNCE = 0.02
#: A reader that was woken, or had work, looks again after each of these pauses, in seconds.
#: Together they are longer than DEBOUNCE, so no commit in between is missed.
LINGER = (0.002, 0.004, 0.008, 0.016)

_last_sent: dict[tuple[str, str], float] = {}


def wake_after_commit(using: str, channel: str) -> None:
    """Wake the readers of ``using`` when the open transaction commits."""
    connection = connections[using]
    if connection.vendor != "postgresql" or not outbox_settings().WAKE:
        return
    # A test's own transaction never commits; captureOnCommitCallbacks would list the callback.
    if any(block._from_testcase for block in connection.atomic_blocks):  # type: ignore[attr-defined]
        return
    waker = _waker(using, channel)
    pending = connection.run_on_commit
    # One is enough: only the rollback of a savepoint that is open now, too, would drop it.
    if pending and pending[-1][1] is waker:
        return
    transaction.on_commit(waker, using=using)


def wake(using: str, channel: str) -> None:
    """Wake the listeners on a channel of ``using``, unless this process has just done so."""
    now = time.monotonic()
    if now - _last_sent.get((using, channel), -DEBOUNCE) < DEBOUNCE:
        return
    connection = connections[using]
    if connection.in_atomic_block or connection.vendor != "postgresql":
        return
    _last_sent[using, channel] = now
    with connection.cursor() as cursor:
        cursor.execute(f"NOTIFY {channel}")


@cache
def _waker(using: str, channel: str) -> Callable[[], None]:
    def log(error: Exception) -> None:
        logger.warning("Readers not woken, they will poll database=%s error=%s", using, error)

    def wake_readers() -> None:
        with after_the_commit(log, using=using):
            wake(using, channel)

    return wake_readers
