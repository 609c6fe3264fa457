"""``stage()`` and ``stage_many()``: explicit staging, for any Celery app, plain ones too.

Both need an open transaction on their alias and write into it. ``stage_many`` writes one INSERT per
thousand rows or MiB, holds one chunk in memory, and stages all of its jobs or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from celery import Celery, current_app
from celery.app.task import Task
from celery.canvas import Signature
from django.db import transaction

from ...aliases import outbox_alias
from ...database.transactions import require_atomic
from ...exceptions import InvalidJob
from ..context import in_own_context
from .calls import force_staging
from .insert import batching
from .sending import make_stageable
from .template import Templates

if TYPE_CHECKING:
    from typing import Unpack

    from ...typed import CeleryOptions


@in_own_context
def stage(
    task: Task[Any, Any] | Signature[Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    using: str | None = None,
    ordering_key: str = "",
    immediate: bool | None = None,
    app: Celery[Any] | None = None,
    **options: Unpack[CeleryOptions],
) -> Any:
    """Stage a task, a signature (chain, group and chord included) or a task name.

    Args:
        task: The task to stage. A string is a task name, sent by ``app``.
        args, kwargs: Arguments of the task; added to those of a signature, as ``apply_async`` does.
        using: Database alias. Default: the outbox's.
        ordering_key: Jobs with one key leave in the order in which they were staged. Default: no
            order.
        immediate: Publish the job right after the commit. Default: the task's attribute
            ``immediate``, else the setting IMMEDIATE.
        app: Celery app for a task name. Default: the current app.
        **options: Options of ``apply_async``.

    Returns:
        The result of ``apply_async``: an ``AsyncResult``, or a ``GroupResult`` for a group.

    Raises:
        NotAtomic: No transaction is open on ``using``, and the setting OUTSIDE is not "stage".
        InvalidJob: The job could never be sent. The transaction stays usable.
    """
    using = using or outbox_alias()
    require_atomic("stage()", using=using)
    forced = force_staging(using=using, ordering_key=ordering_key, immediate=immediate)
    with forced, batching():
        if isinstance(task, str):
            return make_stageable(app or current_app).send_task(task, args, kwargs, **options)
        if not isinstance(task, Task | Signature):
            raise InvalidJob(
                f"stage() takes a Celery task, a signature or a task name; got {task!r}. "
                "Decorate the function with @shared_task."
            )
        make_stageable(task.app)
        return task.apply_async(args, kwargs, **options)  # type: ignore[arg-type, misc]


@in_own_context
def stage_many(
    jobs: Iterable[Signature[Any]],
    *more: Never,
    using: str | None = None,
    ordering_key: str = "",
    immediate: bool | None = None,
    **options: Unpack[CeleryOptions],
) -> int:
    """Stage many signatures, all of them or none.

    Args:
        jobs: Signatures (``task.s(…)``), taken one by one: a generator of millions is fine.
        using: Database alias. Default: the outbox's.
        ordering_key: One key for all jobs. Default: the key in each signature's options.
        immediate: As for ``stage``, for all jobs.
        **options: Options of ``apply_async``, for all jobs.

    Returns:
        How many signatures were staged.

    Raises:
        NotAtomic, InvalidJob: As for ``stage``. No job of the call is staged then.
    """
    # A signature is a mapping; the words in it would name tasks.
    if more or isinstance(jobs, Mapping | str | Task):
        raise _no_signatures(jobs)
    using = using or outbox_alias()
    require_atomic("stage_many()", using=using)
    count = 0
    templates = Templates(ordering_key=ordering_key)
    ours: dict[str, Any] = {
        "using": using,
        "ordering_key": ordering_key,
        "immediate": immediate,
        **options,
    }
    with transaction.atomic(using=using), batching(streaming=True):
        for job in jobs:
            if not isinstance(job, Task | Signature | str):
                raise _no_signatures(job)
            templates.stage(job, None, None, options, partial(stage, job, **ours))
            count += 1
    return count


def _no_signatures(jobs: Any) -> InvalidJob:
    return InvalidJob(
        f"stage_many() takes a list of signatures; got {jobs!r:.60}. Use stage() for one job, "
        "and pass signatures for many: stage_many([task.s(1), task.s(2)])."
    )
