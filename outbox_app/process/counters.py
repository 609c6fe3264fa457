"""Counters: a few figures per minute in the table of statistics, so that no page counts old rows.

A process counts in memory and writes the figure of the minute so far as a whole row, under its own
source: a write that is repeated after an unknown outcome changes nothing. Every ten seconds it
writes the figures that have changed, in a short transaction of its own, never inside an open one. A
process that is killed loses the counts of ten seconds, never a job. Minutes are the database's
(immediate publishing takes the host's).

A web server or a worker has no loop that writes. Its threads share counters: a thread that has
counted also writes them, if a write is due and no transaction is open. So the counts of the last
seconds before a pause are written with the next ones. A forked child starts from zero.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import django.db
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections
from django.db.models import QuerySet
from django.utils.timezone import is_aware

from ..capability import all_doors
from ..database.clock import stored
from ..database.lock_wait import atomic_with_lock_wait
from ..database.transaction_guard import after_the_commit
from ..models import Statistic
from ..models.statistic import label_of, write_figures
from ..text import get_logger
from .backoff import Backoff
from .lease import LeaseHolder

#: Jobs that the broker has accepted in a minute, and jobs that were moved to dead.
PUBLISHED, DEAD = "published", "dead"
#: Jobs that were published immediately after their commit.
IMMEDIATE = "immediate"
#: Jobs of a minute by their delay, from staging, or the end of their hold, to their acceptance by
#: the broker. Each job is in one bucket; the label is the upper bound of the bucket in seconds.
DELAY, LE = "delay", "le"
#: A sample: ready rows, up to a limit.
READY = "ready"
#: The counters of jobs. Each capability has its own (``Doors.counters``).
NAMES = (PUBLISHED, DEAD, IMMEDIATE, DELAY, READY)

#: Upper bounds of the buckets of ``delay``, in seconds. One more bucket has the longer delays.
EDGES = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)
#: The labels of all buckets, the last one's included.
BUCKETS = (*(f"{edge:g}" for edge in EDGES), "+Inf")

#: The shortest time between two writes, in seconds.
EVERY = 10.0
#: How many minutes stay in memory, to be updated, or to be written when the database is back.
KEPT = 60
#: The same for shared counters, of which there may be one for each of many tenants.
KEPT_SHARED = 10
#: Seconds for which a write waits for a lock. A drainer must not lose its lease over a figure.
LOCK_WAIT = 1
#: Days for which counters are kept.
KEPT_DAYS = 2
#: How many rows a drainer removes by one DELETE, and about how many in a minute.
PRUNE_BATCH, PRUNE_MOST = 1000, 10_000
#: A drainer prunes when a sample is older than the retention by this time.
PRUNE_WORTH = timedelta(hours=1)

logger = get_logger("outbox_app.counters")

#: Name, dimension and label.
Key = tuple[str, str, str]


class Minute:
    def __init__(self, begins: datetime, source: str) -> None:
        self.begins, self.source = begins, source
        self.values: dict[Key, float] = {}
        #: The keys of the values that have changed since the last write.
        self.changed: set[Key] = set()

    def add(self, name: str, value: float, *, dimension: str = "", label: str = "") -> None:
        if value:
            key = name, dimension, label
            self.values[key] = self.values.get(key, 0.0) + value
            self.changed.add(key)

    def observe(self, name: str, value: float, edges: Sequence[float] = EDGES) -> None:
        """Count a value in its bucket."""
        at = bisect_left(edges, value)
        self.add(name, 1, dimension=LE, label=f"{edges[at]:g}" if at < len(edges) else "+Inf")

    def put(self, name: str, value: float, *, dimension: str = "", label: str = "") -> None:
        key = name, dimension, label
        if self.values.get(key) != value:
            self.values[key] = value
            self.changed.add(key)


class Counters:
    def __init__(
        self, *, using: str, clock: Callable[[], float] = time.monotonic, kept: int = KEPT
    ) -> None:
        self.using = using
        self.clock = clock
        self.kept = kept
        self.lock = threading.Lock()
        #: For shared counters: the source of their rows, and the lock of the thread that writes.
        self.source, self.writing = str(uuid4()), threading.Lock()
        self._backoff = Backoff(f"counters of {using}", logger)
        self._tried_at = clock()
        #: By minute and source. Minutes stay for a while after they were written: if the clock is
        #: set back, counting goes on from their figures.
        self._minutes: dict[datetime, dict[str, Minute]] = {}

    def of(self, holder: LeaseHolder) -> Minute | None:
        """Return the counters of this minute; None while the database's time is not known."""
        now = holder.now()
        return None if now is None else self.at(now, str(holder.id))

    def at(self, now: datetime, source: str) -> Minute:
        begins = now.replace(second=0, microsecond=0)
        if begins not in self._minutes and len(self._minutes) >= self.kept:
            del self._minutes[next(iter(self._minutes))]
        sources = self._minutes.setdefault(begins, {})
        if source not in sources:
            sources[source] = Minute(begins, source)
        return sources[source]

    @property
    def is_due(self) -> bool:
        return self.clock() - self._tried_at >= EVERY

    def write_if_due(self) -> None:
        if self.is_due:
            self.write()

    def changed(self) -> list[Minute]:
        """Return the minutes that are to be written, the newest last."""
        minutes = (each for sources in self._minutes.values() for each in sources.values())
        return [each for each in minutes if each.changed]

    def write(self) -> None:
        """Write the changed figures. After an error the next write includes them."""
        self._tried_at = self.clock()
        if connections[self.using].in_atomic_block:
            return
        with self.lock:
            taken = [
                (minute, key, minute.values[key])
                for minute in self.changed()
                for key in sorted(minute.changed)
            ]
        if not taken:
            return
        rows = [
            Statistic(
                source=minute.source,
                minute=minute.begins,
                name=name,
                dimension=dimension,
                label=label_of(label),
                value=value,
            )
            for minute, (name, dimension, label), value in taken
        ]
        try:
            with atomic_with_lock_wait(LOCK_WAIT, using=self.using):
                write_figures(rows, using=self.using)
        except django.db.Error as error:
            self._backoff.failed(error)
            return
        self._backoff.succeeded()
        with self.lock:
            for minute, key, value in taken:
                if minute.values[key] == value:  # else it was counted on in the meantime
                    minute.changed.discard(key)


#: The shared counters, by alias, and by schema if tenants have schemas.
_shared: dict[tuple[str, Any], Counters] = {}
os.register_at_fork(after_in_child=_shared.clear)


def _key(using: str) -> tuple[str, Any]:
    return using, getattr(connections[using], "schema_name", None)


@contextmanager
def counting(now: datetime, *, using: str) -> Iterator[Minute]:
    """Yield the shared counters of a minute. Errors in the block are logged: all is committed."""
    try:
        key, now = _key(using), stored(now, using=using) if is_aware(now) else now
        shared = _shared.get(key) or _shared.setdefault(
            key, Counters(using=using, kept=KEPT_SHARED)
        )
        with shared.lock:
            yield shared.at(now, shared.source)
    except SoftTimeLimitExceeded:  # of the task that this thread executes
        raise
    except Exception:
        logger.exception("Committed work was not counted database=%s", using)


def write_shared(using: str, samples: Callable[[], Mapping[str, float]] = dict[str, float]) -> None:
    """Write the shared counters, if a write is due, with samples by name.

    Only what has to end this thread is raised, as a time limit.
    """
    shared = _shared.get(_key(using))
    if shared is None or not shared.is_due or connections[using].in_atomic_block:
        return
    if not shared.writing.acquire(blocking=False):
        return  # with two writers, the older figure might be written last
    log = partial(logger.warning, "Counters were not written database=%s error=%s", using)
    try:
        with after_the_commit(log, using=using):
            found = samples()
            with shared.lock:
                for minute in shared.changed()[-1:]:
                    for name, value in found.items():
                        minute.put(name, value)
            shared.write()
    finally:
        shared.writing.release()


def prune_if_worth_it(now: datetime, *, using: str) -> int:
    before = now - timedelta(days=KEPT_DAYS)
    rows, removed = Statistic.objects.using(using), 0
    if not rows.filter(name=READY, minute__lt=before - PRUNE_WORTH).exists():
        return 0
    for named in by_name(rows):
        old = named.filter(minute__lt=before).values_list("pk", flat=True)
        while removed < PRUNE_MOST and (batch := list(old[:PRUNE_BATCH])):
            rows.filter(pk__in=batch).delete()
            removed += len(batch)
    return removed


def by_name(rows: QuerySet[Statistic]) -> list[QuerySet[Statistic]]:
    """Return the rows of each counter, the oldest first."""
    # The samples are the last: old ones show that there may be other old rows.
    names = [name for doors in all_doors() for name in doors.counters if name != READY]
    return [rows.filter(name=name).order_by("minute") for name in (*names, READY)]
