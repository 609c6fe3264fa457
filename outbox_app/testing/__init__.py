"""Helpers for a project's tests: assert which jobs are staged, and run them.

Each capability has helpers of its own, in its module ``testing``. They work in a plain
``TestCase``, whose transaction never commits, and in ``TransactionTestCase``. Only
``drain_inline()`` needs a broker; none needs a worker or a drainer. They do not see tasks that were
sent past the outbox, as by a call outside any transaction. With pytest the fixture ``outbox`` has
the helpers of all installed apps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from celery.app.task import Task
from celery.canvas import Signature
from django.dispatch import receiver

from ..aliases import outbox_alias
from ..conf import outbox_settings
from ..database.transactions import is_atomic
from ..jobs.drain.batch import Row
from ..jobs.drain.drain import Drain, DrainStats
from ..jobs.staging.calls import force_staging
from ..jobs.staging.results import forget_staged
from ..models import StagedJob
from ..signals import jobs_published, jobs_staged
from .job import LISTED, Job

if TYPE_CHECKING:
    TaskOrName = Task[Any, Any] | str

__all__ = ["Job", "assert_not_staged", "assert_staged", "drain_inline", "run_staged", "staged_jobs"]

#: Ids of jobs staged only because of the test's transaction: production sends them at once.
_outside: set[str] = set()


def staged_jobs(task: TaskOrName | None = None, *, using: str | None = None) -> list[Job]:
    """Return the jobs that are staged, in the order in which they were staged.

    Args:
        task: A task or its name. Default: all tasks.
        using: Database alias. Default: the outbox's.
    """
    rows = StagedJob.objects.using(using or outbox_alias()).order_by("id")
    if task is not None:
        rows = rows.filter(task=_name(task))
    return [Job.of(row) for row in rows]


def assert_staged(
    task: TaskOrName,
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ordering_key: str | None = None,
    count: int = 1,
    outside: bool = False,
    using: str | None = None,
) -> list[Job]:
    """Assert that a job is staged exactly ``count`` times.

    Args:
        task: A task or its name.
        args, kwargs: All of the arguments. Default: any. ``unittest.mock.ANY`` matches any single
            argument.
        ordering_key: The job's ordering key; ``""`` for none. Default: any.
        count: The expected number of such jobs.
        outside: Accept calls outside any transaction of the code, where production sends at once.
            Default: such a call is an error.
        using: Database alias. Default: the outbox's.

    Returns:
        The jobs.

    Raises:
        AssertionError: There are more or fewer, or some were called outside a transaction. The
            message lists the staged jobs.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not this one
    using = using or outbox_alias()
    args = None if args is None else tuple(args)  # an iterator can be compared once only
    jobs = staged_jobs(using=using)
    found = [job for job in jobs if job.matches(_name(task), args, kwargs, ordering_key)]
    if len(found) != count:
        wanted = {"args": args, "kwargs": kwargs, "ordering_key": ordering_key}
        arguments = ", ".join(
            f"{name}={value!r}" for name, value in wanted.items() if value is not None
        )
        what = f"{_name(task)} with {arguments}" if arguments else _name(task)
        raise AssertionError(
            f"Expected {count} staged of {what}; found {len(found)}.\n{_listed(jobs, using=using)}"
        )
    sent = [job for job in found if job.task_id in _outside]
    if sent and not outside:
        raise AssertionError(
            f"{len(sent)} of {count} {_name(task)} called outside a transaction, where production "
            f"sends at once. Open transaction.atomic(using={using!r}) in the code, or pass "
            "outside=True. The test's own transaction does not count, and none does for a task "
            "whose mode is not 'stage'."
        )
    return found


def assert_not_staged(
    task: TaskOrName | None = None,
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ordering_key: str | None = None,
    using: str | None = None,
) -> None:
    """Assert that no such job is staged, or without a task no job at all: see ``assert_staged``.

    Raises:
        AssertionError: There is one. The message lists the staged jobs.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not this one
    if task is not None:
        assert_staged(task, args, kwargs, ordering_key=ordering_key, count=0, using=using)
    elif jobs := staged_jobs(using=using):
        listed = _listed(jobs, using=using or outbox_alias())
        raise AssertionError(f"Expected nothing staged.\n{listed}")


def run_staged(*, using: str | None = None, limit: int = 1000) -> list[Job]:
    """Execute staged jobs as a worker would, in this process, until none is left.

    Tasks that these send in turn are staged and executed, too: further steps of a chain, ``link``,
    the body of a chord (which needs a result backend such as ``cache+memory://``). Jobs with an eta
    run last, without waiting; ``retry()`` runs the task again, after the others. Jobs that have
    expired are not run, as a worker would revoke them.

    Args:
        using: Database alias. Default: the outbox's.
        limit: The most jobs to execute.

    Returns:
        The jobs, in the order in which they were executed.

    Raises:
        Exception: A task raised it. Its ``link_error`` was staged; later jobs stay staged.
        AssertionError: A worker would not know the task, or jobs are left after ``limit`` jobs.
    """
    using = using or outbox_alias()
    done: list[Job] = []
    retries: list[Job] = []
    outside = set(_outside)
    try:
        while (jobs := staged_jobs(using=using)) or retries:
            now = [job for job in jobs if job.eta is None]
            if not now:
                now, retries = retries or sorted(jobs, key=attrgetter("eta"))[:1], []
            waiting = {job.row.pk for job in jobs}  # without retries, whose rows are gone
            for job in now:
                if len(done) == limit:
                    listed = _listed(staged_jobs(using=using), using=using)
                    raise AssertionError(f"There is no end after {limit} jobs (limit=).\n{listed}")
                removed, _ = StagedJob.objects.using(using).filter(pk=job.row.pk).delete()
                forget_staged([job.task_id], using=using)
                if job.has_expired or (job.row.pk in waiting and not removed):
                    continue  # expired, or cancelled by a task
                done.append(job)
                with force_staging(using=using, immediate=False):
                    retry = job.execute()
                retries += [retry] if retry else []
    finally:  # tasks sent by a worker are no calls of the code under test
        _outside.intersection_update(outside)
    return done


def drain_inline(*, using: str | None = None) -> DrainStats:
    """Publish staged jobs to the brokers of their Celery apps, as a drainer would, in this process.

    Needs a broker; ``memory://`` is enough. Jobs that are held for later stay staged.

    Args:
        using: Database alias. Default: the outbox's.

    Returns:
        The numbers of published and of dead jobs.

    Raises:
        AssertionError: The broker or the database failed; a drainer would have tried again.
    """

    def give_up(drain: Drain) -> None:
        if drain.trouble:
            raise AssertionError(f"The drain is in trouble: {drain.trouble}")

    return Drain(using=using, on_turn=give_up).run(once=True)


@receiver(jobs_published, dispatch_uid="outbox_app.testing")
def _note_published(jobs: Iterable[Row], using: str, **kwargs: Any) -> None:
    forget_staged([job.task_id for job in jobs], using=using)  # a test's worker may answer


@receiver(jobs_staged, dispatch_uid="outbox_app.testing")
def _note_outside(jobs: list[StagedJob], using: str, **kwargs: Any) -> None:
    is_outside = outbox_settings().OUTSIDE == "send" and not is_atomic(using)
    _outside.difference_update(job.task_id for job in jobs)
    # A job with a receipt is staged in production, too.
    outside = [job for job in jobs if is_outside and job.receipt is None]
    _outside.update(job.task_id for job in jobs if job in outside or job.mode != "stage")


def _name(task: TaskOrName) -> str:
    if isinstance(task, Signature):  # its arguments would count for nothing
        raise TypeError(f"Give the task of {task!r}, and the arguments as args= and kwargs=.")
    return task if isinstance(task, str) else str(task.name)


def _listed(jobs: list[Job], *, using: str) -> str:
    if not jobs:
        return f"Nothing is staged on {using!r}."
    lines = [f"Staged on {using!r}:", *(f"  {job}" for job in jobs[:LISTED])]
    if len(jobs) > LISTED:
        lines.append(f"  … and {len(jobs) - LISTED} more")
    return "\n".join(lines)
