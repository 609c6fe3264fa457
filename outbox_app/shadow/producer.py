"""Shadow mode: a task is sent as before, and a record of it is compared with what was committed.

A call inside a transaction writes a row (``ShadowJob``) into that transaction, after all checks of
staging. When the broker has the message, a thread writes a note on a connection of its own; the
note survives a rollback. No drainer of any version reads these tables as jobs, so nothing in them
is ever published. The row has a savepoint, and a row or note that cannot be written is logged. So
no failure of the record reaches the caller, unless it has undone the caller's transaction. If a
process is killed between a send and its note, the row counts as never sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import update_wrapper
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections, transaction

from ..database.transactions import is_atomic, is_in_test
from ..exceptions import StagingRefused
from ..jobs.context import let
from ..jobs.staging.producer import LazyProducer, StagingProducer
from ..process.background import Background
from ..text import get_logger, storable

if TYPE_CHECKING:  # a project's celery.py is imported before Django's models may be
    from .models import ShadowJob, ShadowNote

logger = get_logger("outbox_app.shadow")

#: Seconds after which a failed INSERT of notes is tried again, and how often it is tried.
PAUSE = 1.0
ATTEMPTS = 10
#: Writes notes: those that queue up meanwhile are written by one INSERT.
writer = Background("outbox-shadow", threads=1, longest=100_000, together=1000, at_exit=5.0)

#: The key of the row that a ``…_on_commit`` call of each task has written, until it is sent.
_expected: ContextVar[dict[str, UUID] | None] = ContextVar("outbox_app_expected", default=None)


def expecting(call: Callable[[], Any], task: str, *, using: str) -> Callable[[], Any]:
    """Write the row for a call to make after the commit; return a call that adds the note."""
    from .models import ShadowJob

    job = ShadowJob(key=uuid4(), task=task)
    try:
        if not is_atomic(using) or is_in_test(using):
            return call
        _write(job, using=using)
    except Exception as error:
        _log(error, task, using=using)
        return call

    def call_expected() -> Any:
        with let(_expected, {task: job.key}):
            return call()

    return update_wrapper(call_expected, call)


def is_expected(task: str) -> bool:
    """Return whether the row for a call of this task was written before."""
    return task in (_expected.get() or {})


class ShadowProducer(LazyProducer):
    """Records the one message that is published through it, and publishes it as Celery would."""

    def __init__(self, app: Any, task: str, *, using: str, ordering_key: str, refused: str) -> None:
        from .models import ShadowNote

        super().__init__(app, strict=False)
        self._producer = StagingProducer(app, using=using, ordering_key=ordering_key)
        self._producer.task = task
        #: The key of the row that was written before the call.
        self._written = (_expected.get() or {}).pop(task, None)
        self._note: ShadowNote | None = ShadowNote(task=task, refused=refused)
        self._note.key = self._written or self._note.key
        self._is_recorded = False

    def __enter__(self) -> ShadowProducer:
        return self

    def publish(self, body: Any, **options: Any) -> Any:
        if self._note is not None and not self._is_recorded:
            self._is_recorded = True  # Celery may retry the follow-up of a task
            self._note = self._recorded(self._note, body, options)
        result = self.__getattr__("publish")(body, **options)
        note, self._note = self._note, None  # a ``task-sent`` event comes after the task
        if note is not None:
            using = self._producer.using
            note.in_transaction = is_atomic(using)
            writer.send(_write_notes, [note], using)
        return result

    def _recorded(self, note: ShadowNote, body: Any, options: Any) -> ShadowNote | None:
        from .models import ShadowJob

        try:
            if not note.refused:
                job = self._producer.job_of(body, **{**options, "retry": False})
                note.task_id = job.task_id
                if self._written is None:
                    row = ShadowJob(key=note.key, task=note.task, task_id=note.task_id)
                    _write(row, using=self._producer.using)
        except StagingRefused as error:
            note.refused = str(error)
        except Exception as error:
            _log(error, note.task, using=self._producer.using)
            return None
        if note.refused:
            logger.warning("Staging would refuse task=%s reason=%s", note.task, note.refused)
            note.refused = storable(note.refused)[:255]
        return note


def _write_notes(notes: list[ShadowNote], using: str) -> None:
    for left in reversed(range(ATTEMPTS)):
        try:
            # A note that exists was written by an attempt whose answer was lost.
            type(notes[0])._default_manager.using(using).bulk_create(notes, ignore_conflicts=True)
            return
        except Exception as error:
            with suppress(Exception):
                connections[using].close()
            if not left:
                text = "Shadow notes lost database=%s count=%d error=%s"
                logger.error(text, using, len(notes), error)
            else:
                time.sleep(PAUSE)


def _write(job: ShadowJob, *, using: str) -> None:
    if not connections[using].needs_rollback:  # else the row would be rolled back, too
        with transaction.atomic(using=using):  # a savepoint, for the caller to survive a failure
            job.save(using=using, force_insert=True)


def _log(error: Exception, task: str, *, using: str) -> None:
    """Log an error, unless it ends the caller's task, or its transaction, whose end raises none."""
    undone = using in connections and connections[using].needs_rollback
    if undone or isinstance(error, SoftTimeLimitExceeded):
        raise error
    logger.error("Shadow row not written task=%s", task, exc_info=error)
