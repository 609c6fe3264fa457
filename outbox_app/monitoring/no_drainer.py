"""Workers that say in their log that jobs wait and no drainer lives: nobody else might.

They look after a task that they have executed, on the connection which that task has left open, in
the process or thread of the task. The processes of one worker look at most once a minute together:
one query, as long as a drainer lives. Without a connection, or in a transaction, none looks.
"""

from __future__ import annotations

import mmap
import struct
from time import monotonic
from typing import Any

import django.db
from celery.signals import task_postrun
from django.db import connections

from ..aliases import outbox_alias
from ..database.lock_wait import atomic_with_lock_wait
from ..database.transactions import lacks_autocommit
from ..models import Process
from ..process.lease import alive
from ..text import get_logger

logger = get_logger("outbox_app.worker")

#: Seconds between two looks of a worker.
PAUSE = 60.0
#: A job that has waited for more seconds matters: a drainer that is replaced is absent, too.
WAITED = 30.0
#: Seconds for which a look waits for a table that is locked, by a migration, say.
LOCK_SECONDS = 1.0

#: When a process of this worker looked last: forked processes share it. Two that meet look twice.
_last_look = mmap.mmap(-1, 8)


@task_postrun.connect(dispatch_uid="outbox_app.no_drainer")  # before Celery closes the connection
def look(sender: Any = None, **kwargs: Any) -> None:
    now, [last] = monotonic(), struct.unpack("d", _last_look[:])
    if (last and now - last < PAUSE) or sender.request.is_eager:
        return
    using = outbox_alias()
    used = [each for each in connections.all(initialized_only=True) if each.alias == using]
    if not used or used[0].connection is None:
        return
    if used[0].in_atomic_block or lacks_autocommit(used[0]):
        return
    _last_look[:] = struct.pack("d", now)
    try:
        with atomic_with_lock_wait(LOCK_SECONDS, using=using):
            waited = seconds_without_drainer(using)
    except django.db.Error:  # tasks and drainers say so, if the database cannot be read
        return
    if waited > WAITED:
        logger.warning(
            "No drainer runs, and jobs wait database=%s seconds=%d start=%s",
            *(using, waited, "manage.py drain_outbox"),
        )


def seconds_without_drainer(using: str) -> float:
    """Return for how long the oldest job has waited while no drainer lives; 0 if one does."""
    from ..jobs.drain.batch import apps_with_rows
    from ..jobs.drain.status import oldest_seconds

    if alive(Process.objects.using(using).filter(resource="jobs")):
        return 0.0
    return oldest_seconds(apps_with_rows(using=using), using=using)
