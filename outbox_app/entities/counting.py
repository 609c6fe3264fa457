"""Counts what this process has answered, by the minute: how many, how fast, on which entities.

Counting costs a batch some memory and no statement: the minute is that of its own reading of the
database's clock. What runs in the caller's transaction is counted when that commits. At most every
ten seconds a thread that has answered a batch also writes the counters, after the answers are with
their callers and with no transaction open; there is no thread of ours. So the last seconds before a
pause are written with the next command, and those before the end of a process are lost. Nothing
here raises: a write that fails is logged, and tried again with the next. A child counts anew.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from django.db import connections, transaction

from ..process import counters
from ..text import get_logger
from .attempt import Attempt
from .versions import Step

logger = get_logger("outbox_app.counters")

#: Upper bounds of the buckets of batches by size; one more has the larger ones.
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SIZE_LABELS = (*map(str, SIZES), "+Inf")
#: Codes of rejections that a process tells apart in a minute; the others are "other".
CODES, OTHER = 20, "other"
#: Entities that a process writes, and how many it knows of at most, each minute.
TOP, KNOWN = 10, 1000
#: Minutes that are kept in memory. There may be many tenants.
KEPT = 10


class Batch(NamedTuple):
    """What is counted of a batch: the time that it read, its commands, those that it rejected."""

    now: datetime
    entity: str
    size: int
    codes: Counter[str]


def _batch(attempt: Attempt, steps: Sequence[Step]) -> Batch:
    answers: list[Any] = [step.call.answer for step in steps if step.rejected]
    codes = Counter(each.rejected.code for each in answers)
    return Batch(attempt.now, f"{attempt.entity._meta.label}:{attempt.id}", len(steps), codes)


class Counting(counters.Counters):
    """The counters of one alias, and of one schema where tenants have theirs."""

    def __init__(self, using: str) -> None:
        super().__init__(using=using, kept=KEPT)
        self.source = str(uuid4())
        self.writing = threading.Lock()

    def add(self, batch: Batch, conflicts: int, seconds: float | None) -> None:
        with self.lock:
            minute = self.at(batch.now, self.source)
            minute.add(counters.CONFLICTS, conflicts)
            if not batch.size:
                return
            minute.add(counters.COMMANDS, batch.size)
            label = SIZE_LABELS[bisect_left(SIZES, batch.size)]
            minute.add(counters.BATCH_SIZE, 1, dimension=counters.LE, label=label)
            if seconds is not None:
                label = counters.BUCKETS[bisect_left(counters.EDGES, seconds)]
                minute.add(counters.COMMIT_TIME, 1, dimension=counters.LE, label=label)
            for code, count in batch.codes.items():
                known = [label for name, _, label in minute.values if name == counters.REJECTED]
                label = code if code in known or len(known) < CODES else OTHER
                minute.add(counters.REJECTED, count, dimension=counters.CODE, label=label)
            minute.entities[batch.entity] += batch.size
            if len(minute.entities) > KNOWN:
                minute.entities = Counter(dict(minute.entities.most_common(KNOWN // 10)))

    def write_with(self, waiting: int) -> None:
        if not self.writing.acquire(blocking=False):
            return  # two writers: the older figure could be the last
        try:
            with self.lock:
                changed = self.changed()
                for minute in changed:
                    for label, count in minute.entities.most_common(TOP):
                        minute.put(counters.HOTTEST, count, dimension=counters.ENTITY, label=label)
                for minute in changed[-1:]:
                    minute.put(counters.WAITING, waiting)
            self.write()
        finally:
            self.writing.release()


#: By alias and schema.
_countings: dict[tuple[str, Any], Counting] = {}
os.register_at_fork(after_in_child=_countings.clear)


def count(attempt: Attempt, *, conflicts: int, seconds: float) -> None:
    """Count a batch that was committed, and the attempts before it."""
    _count(attempt.using, _batch(attempt, attempt.steps), conflicts, seconds)


def count_conflicts(attempt: Attempt | None, conflicts: int) -> None:
    """Count the attempts of a batch of which none was committed."""
    if attempt is not None and hasattr(attempt, "now"):  # it has read the database's clock
        _count(attempt.using, _batch(attempt, ()), conflicts)


def count_after_commit(attempt: Attempt) -> None:
    using = attempt.using
    # A test's own transaction never commits; captureOnCommitCallbacks would list the callback.
    blocks: Any = connections[using].atomic_blocks
    if attempt.steps and not any(block._from_testcase for block in blocks):
        batch = _batch(attempt, attempt.steps)
        transaction.on_commit(partial(_count_and_write, using, batch), using=using, robust=True)


def write_if_due(using: str) -> None:
    """Write the counters, unless that was done lately or a transaction is open. Raises nothing."""
    counting = _countings.get(_key(using))
    if counting is None or not counting.is_due or connections[using].in_atomic_block:
        return
    from .queue import queues  # which imports this

    if queues.leads_here():
        return  # a callback of a batch whose callers wait for their answers
    try:
        counting.write_with(queues.waiting_on(using))
    except Exception as error:
        logger.warning("Counters of entities were not written database=%s error=%r", using, error)


def _count(using: str, batch: Batch, conflicts: int = 0, seconds: float | None = None) -> None:
    try:
        key = _key(using)
        counting = _countings.get(key) or _countings.setdefault(key, Counting(using))
        counting.add(batch, conflicts, seconds)
    except Exception:  # its commands are committed
        logger.exception("A batch of %s was not counted.", batch.entity)


def _count_and_write(using: str, batch: Batch) -> None:
    _count(using, batch)
    write_if_due(using)


def _key(using: str) -> tuple[str, Any]:
    return using, getattr(connections[using], "schema_name", None)
