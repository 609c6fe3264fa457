"""Immediate delivery: the process that committed publishes its jobs right after the commit.

The row is staged as held for IMMEDIATE_HOLD seconds by the database's clock, so no drainer reads it
meanwhile. The process that staged it counts the same seconds on its monotonic clock, from before
the INSERT, and sends nothing if a drainer could read the row before the send has ended. So a job is
published twice only if its hold ran out, and then the drain writes an incident before it publishes.
All jobs of one commit leave as one batch per Celery app, within IMMEDIATE_TIMEOUT. After a failure
no commit waits for that broker until a pause is over, and then only one commit at a time. No error
reaches the caller, except a time limit of its task.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connections

from ..conf import outbox_settings
from ..database.clock import DatabaseNow
from ..database.lock_wait import is_conflict
from ..database.transaction_guard import after_the_commit, raise_what_ends_the_thread
from ..database.transactions import SavepointsBefore, is_in_test
from ..exceptions import BrokerUnavailable
from ..failpoints import failpoint
from ..models import StagedJob
from ..process import counters
from ..process.backoff import Backoff
from ..process.wakeup import JOBS, wake
from ..text import get_logger
from .drain.batch import SMALL_BYTES, Row, delete, mark_sent, release
from .drain.outcome import PublishResult, announce
from .drain.publisher import Publisher
from .staging.sending import celery_app

logger = get_logger("outbox_app.immediate")

#: The most jobs of one transaction that leave immediately: with more, a drainer is faster.
MOST = 500
#: Seconds to wait for a worker that has its row locked, as it begins the job on MySQL or MariaDB.
LOCKED_SECONDS = 0.01


class Overdue(BrokerUnavailable):
    """The rest of a commit's jobs is left to the drain, because the time is over."""


class Broker:
    """The broker of one Celery app in this process: idle connections and a circuit breaker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.circuit = Backoff(f"broker of Celery app {name!r}, immediate delivery", logger)
        self._idle: list[Publisher] = []

    def publish(self, rows: Sequence[Row], *, using: str, deadline: float) -> PublishResult:
        app = celery_app(self.name)
        if app is None or self.circuit.remaining:
            return PublishResult()
        if self.circuit.failures:
            # This caller tries the broker; others skip it until this send must have ended. A lock
            # would stay held if a signal (as of Celery's soft time limit) raised here.
            self.circuit.wait_until(deadline + outbox_settings().IMMEDIATE_TIMEOUT)
        try:
            publisher = self._idle.pop()  # atomic: no two threads get the same one
        except IndexError:
            publisher = Publisher(app, timeout=outbox_settings().IMMEDIATE_TIMEOUT)
        return self._send(publisher, rows, using, deadline)

    def close(self) -> None:
        with suppress(IndexError):  # no check before: another thread may take the last one
            while True:
                self._idle.pop().close()

    def _send(
        self, publisher: Publisher, rows: Sequence[Row], using: str, deadline: float
    ) -> PublishResult:
        def may_send(seconds: float = 0.0) -> float:
            if (left := deadline - time.monotonic()) <= 0:
                raise Overdue(f"The broker of Celery app {self.name!r} takes too long.")
            return left

        outer = sys.exception()
        try:
            now = datetime.now(UTC)
            result = publisher.publish(rows, using=using, now=now, may_send=may_send)
            for error in (result.error, *(error for _, error in result.refused)):
                raise_what_ends_the_thread(error, outer)
            with suppress(Overdue):  # events for Celery's monitors, while there is time
                publisher.send_events(result, may_send)
        except BaseException:  # a time-out of gevent, say
            publisher.close()
            raise
        error = result.error
        if error is None or (isinstance(error, Overdue) and result.accepted):
            self.circuit.succeeded()
            if len(self._idle) < (publisher.app.conf.broker_pool_limit or 0):
                self._idle.append(publisher)
            else:
                publisher.close()
        else:
            self.circuit.failed(error)
            self.close()
            # This publisher probes the broker before it sends again.
            self._idle.append(publisher)
        return result


_brokers: dict[tuple[int, str], Broker] = {}


def broker_of(app: str) -> Broker:
    """Return an app's broker. A forked child does not touch its parent's connections."""
    key = os.getpid(), app
    return _brokers.get(key) or _brokers.setdefault(key, Broker(app))


class CommitBatch:
    """The jobs of one transaction that leave right after its commit."""

    def __init__(self, using: str) -> None:
        self.using = using
        #: The jobs to publish: callbacks of the commit add those whose savepoint was kept.
        self.jobs: list[StagedJob] = []
        #: How many immediate jobs were staged.
        self.count = 0
        #: The monotonic times at which the first job was staged and its hold may run out.
        self.began = time.monotonic()
        self.until = self.began + outbox_settings().IMMEDIATE_HOLD

    def leave_out(self, ids: list[int]) -> None:
        self.jobs[:] = [job for job in self.jobs if job.pk not in ids]

    def publish(self) -> None:
        def log(error: Exception) -> None:  # unsettled jobs stay held
            logger.exception("Immediate delivery failed database=%s", self.using)

        with after_the_commit(log, using=self.using):
            if self.jobs:
                self._publish()

    def _publish(self) -> None:
        failpoint("immediate_claimed")
        by_app: dict[str, list[Row]] = {}
        for job in self.jobs:
            by_app.setdefault(job.app, []).append(_row(job))
        results = [self._publish_app(app, rows) for app, rows in by_app.items()]
        # A row in both lists was sent twice: it stays held, so that the drain writes an incident.
        kept = {row.id for result in results for row in result.unknown}
        accepted = [row for result in results for row in result.accepted if row.id not in kept]
        kept.update(row.id for row in accepted)
        left = [(job.pk, job.task_id) for job in self.jobs if job.pk not in kept]
        failpoint("immediate_published")
        try:
            self._settle(accepted)
        except OperationalError as error:
            if not is_conflict(error):  # with another commit, at SERIALIZABLE
                raise
            self._settle(accepted)
        failpoint("immediate_deleted")
        if left:
            release(left, using=self.using)
            wake(self.using, JOBS)
        self._count(accepted)
        for result in results:
            announce(result, sender=StagedJob, using=self.using)

    def _settle(self, accepted: list[Row]) -> None:
        awaited = [(row.id, row.task_id) for row in accepted if row.receipt is not None]
        delete([(r.id, r.task_id) for r in accepted if r.receipt is None], using=self.using)
        if mark_sent(awaited, using=self.using) < len(awaited):
            time.sleep(LOCKED_SECONDS)
            mark_sent(awaited, using=self.using)

    def _publish_app(self, app: str, rows: list[Row]) -> PublishResult:
        timeout = outbox_settings().IMMEDIATE_TIMEOUT
        began = time.monotonic()
        # A send that begins before the deadline ends at most one time-out after it.
        if began + 2 * timeout > self.until:
            return PublishResult()
        return broker_of(app).publish(rows, using=self.using, deadline=began + timeout)

    def _count(self, accepted: list[Row]) -> None:
        # The minutes are the host's: asking the database's clock would cost a statement.
        with counters.counting(datetime.now(UTC), using=self.using) as minute:
            for name in (counters.PUBLISHED, counters.IMMEDIATE):
                minute.add(name, len(accepted))
            for _ in accepted:
                minute.observe(counters.DELAY, time.monotonic() - self.began)
        counters.write_shared(self.using)


def hold(jobs: Sequence[StagedJob], *, using: str) -> CommitBatch | None:
    """Hold the jobs that can leave immediately; take the mark from the others.

    Return the batch that takes them once they are written: see ``publish_after_commit``.
    """
    connection: Any = connections[using]
    wanted = [job for job in jobs if job.is_immediate]
    batch = _open_batch(connection) or CommitBatch(using)
    # A test's own transaction never commits. With autocommit off Django runs no callbacks at the
    # commit.
    possible = (
        connection.commit_on_exit and not is_in_test(using) and batch.count + len(wanted) <= MOST
    )
    until = DatabaseNow() + timedelta(seconds=outbox_settings().IMMEDIATE_HOLD)
    for job in wanted:
        if possible and job.size <= SMALL_BYTES and not broker_of(job.app).circuit.remaining:
            job.available_at = until
        else:
            job.is_immediate = None
    return batch if any(job.is_immediate for job in wanted) else None


def publish_after_commit(batch: CommitBatch, jobs: Sequence[StagedJob]) -> None:
    """Publish these written jobs after the commit, unless their savepoint is rolled back."""
    held = [job for job in jobs if job.is_immediate]
    batch.count += len(held)
    for job in held:
        job.available_at = None  # in memory it was an expression
    _before_publish(batch, batch.jobs.extend, held)


def leave_out(ids: Iterable[int], *, using: str) -> None:
    """Do not publish deleted jobs, unless the savepoint of their deletion is rolled back."""
    if batch := _open_batch(connections[using]):
        _before_publish(batch, batch.leave_out, list(ids))


def _before_publish(batch: CommitBatch, change: Callable[..., None], items: list[Any]) -> None:
    # Run before other callbacks, which may be slow, or raise and stop the rest. Django drops the
    # callbacks of a rolled-back savepoint. publish() belongs to none, and runs after the changes.
    connection: Any = connections[batch.using]
    pending: list[Any] = connection.run_on_commit
    places = (n for n, (_, func, _) in enumerate(pending) if func == batch.publish)
    if (place := next(places, None)) is None:
        place = 0
        pending.insert(0, (set(), batch.publish, False))
    savepoints = SavepointsBefore(connection.savepoint_state)
    if place and pending[place - 1][0] == savepoints and pending[place - 1][1].func == change:
        pending[place - 1][1].args[0].extend(items)
    else:
        pending.insert(place, (savepoints, partial(change, items), True))


def _open_batch(connection: Any) -> CommitBatch | None:
    owners = (getattr(func, "__self__", None) for _, func, _ in connection.run_on_commit)
    return next((owner for owner in owners if isinstance(owner, CommitBatch)), None)


def _row(job: StagedJob) -> Row:
    return Row(
        *(job.pk, job.shard, "", job.app, job.task, job.task_id, job.queue),
        *(bytes(job.body), job.envelope),
        receipt=job.receipt,
    )
