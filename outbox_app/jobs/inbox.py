"""The row of a job id in the inbox: inserted first, with the effects, and completed with them.

It keeps the result for a second delivery, and the callbacks of ``on_commit`` that are at risk. Once
they have run, after the commit, it names only those that have failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from celery.backends.base import DisabledBackend
from kombu.utils import json

from ..database.callbacks import AfterCommit, Callback
from ..database.transaction_guard import after_the_commit
from ..exceptions import CallbackFailed, InboxError
from ..text import error_text, get_logger, shown

try:
    from celery.app.task import get_actual_ignore_result  # type: ignore[attr-defined]
except ImportError:  # before Celery 5.7 a call cannot turn off its task's ignore_result

    def get_actual_ignore_result(task: Any, request: Any) -> bool:
        return bool(task.ignore_result or request.ignore_result)


logger = get_logger("outbox_app.inbox")

#: While a worker executes a job with a receipt: the aliases on which it has an entry, which goes
#: with the row of the job. Without a receipt the entry stays until its retention is over.
inboxes: ContextVar[set[str] | None] = ContextVar("outbox_app_inboxes", default=None)

#: Seconds for which another delivery waits for the callbacks of the first one.
CALLBACK_SECONDS = 60

HINT = (
    "It does not run again, as the job id is in the inbox. Do its work by hand. In the task call "
    "delay() or stage() inside the transaction instead: the job is committed with the effects."
)


def note(job_id: str, task: str, *, using: str) -> bool:
    """Insert the id; return False if it exists already.

    The INSERT comes before any read: it waits for another delivery that holds the id.
    """
    from ..database.upsert import insert_if_missing

    if len(job_id) > 255:
        raise InboxError(f"The job id {job_id[:60]!r}… has {len(job_id)} characters; at most 255.")
    values = {"job_id": job_id, "task": task[:255], "result": "", "callbacks": ""}
    return insert_if_missing(entry_of(job_id, using=using).model, values, using=using)


def entry_of(job_id: str, *, using: str) -> Any:
    from ..models import InboxEntry  # models cannot be imported yet when tasks are declared

    return InboxEntry.objects.using(using).filter(pk=job_id)


def keep(result: Any, callbacks: list[Callback], task: Any, job_id: str, *, using: str) -> None:
    """Keep the result, if it may be asked for, and the callbacks at risk."""
    values = {}
    if result is not None and _is_asked_for(task):
        try:
            values["result"] = json.dumps(result)
        except (TypeError, ValueError) as error:
            raise InboxError(
                f"The result of {task.name}[{job_id}] cannot be kept for a second delivery: "
                f"{error}. Return what JSON can hold, or declare the task with ignore_result=True."
            ) from error
    if callbacks:
        names = _listed(map(str, callbacks))
        values["callbacks"] = _unfinished(names, until=time.time() + CALLBACK_SECONDS)
    if values:
        entry_of(job_id, using=using).update(**values)


def _is_asked_for(task: Any) -> bool:
    """Return whether a later task, an eager caller or a result backend may read the result."""
    request = task.request
    if request.chain or request.callbacks or request.chord or request.is_eager:
        return True
    if hasattr(request, "outbox_body"):  # a task of django.tasks: its result is a row
        return True
    ignored = get_actual_ignore_result(task, request)
    return not ignored and not isinstance(task.backend, DisabledBackend)


def _unfinished(callbacks: str, *, until: float = 0.0) -> str:
    return str(json.dumps({"callbacks": callbacks, "until": until}))


def _listed(texts: Iterable[str]) -> str:
    """Return each text once, and no more of all than a row and an error can hold."""
    return shown("; ".join(dict.fromkeys(texts)))


def settle(what: str, job_id: str, after: AfterCommit, *, using: str) -> None:
    """Record that the callbacks have run. Raises ``CallbackFailed`` if one has failed."""
    failed = _listed(
        f"{callback} raised {shown(error_text(error), 1000)}" for callback, error in after.failed
    )

    def log(error: Exception) -> None:
        text = "End of callbacks was not recorded job=%s error=%s"
        logger.warning(text, what, error)

    with after_the_commit(log, using=using):
        left = _unfinished(failed) if failed else ""
        entry_of(job_id, using=using).update(callbacks=left)
    if failed:
        raise CallbackFailed(
            f"{what} has committed its effects, but an on_commit callback failed: {failed}. {HINT}"
        ) from after.failed[0][1]
