"""Counts what this process has answered, by the minute: how many, how fast, on which entities.

Counting costs a batch some memory and no statement: the minute is that of its own reading of the
database's clock. What runs in the caller's transaction is counted when that commits. The counters
are written after the answers are with their callers. Nothing here raises.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from django.db import transaction

from ..process import counters
from ..transactions import is_in_test
from .attempt import Attempt

#: Upper bounds of the buckets of batches by size; one more has the larger ones.
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SIZE_LABELS = (*map(str, SIZES), "+Inf")
#: Codes of rejections that a process tells apart in a minute; the others are "other".
CODES, OTHER = 20, "other"
#: Entities that a process knows of at most, each minute.
KNOWN = 1000


class Batch(NamedTuple):
    """What is counted of a batch: the time that it read, its commands, those that it rejected."""

    using: str
    now: datetime
    entity: str
    size: int
    codes: Counter[str]


def count(attempt: Attempt, *, conflicts: int, seconds: float) -> None:
    """Count a batch that was committed, and the attempts before it."""
    _count(_batch(attempt), conflicts, seconds)


def count_conflicts(attempt: Attempt | None, conflicts: int) -> None:
    """Count the attempts of a batch of which none was committed."""
    if attempt is not None and hasattr(attempt, "now"):  # it has read the database's clock
        with counters.counting(attempt.now, using=attempt.using) as minute:
            minute.add(counters.CONFLICTS, conflicts)


def count_after_commit(attempt: Attempt) -> None:
    # A test's own transaction never commits; captureOnCommitCallbacks would list the callback.
    if attempt.steps and not is_in_test(attempt.using):
        counted = partial(_count_and_write, _batch(attempt))
        transaction.on_commit(counted, using=attempt.using, robust=True)


def write_if_due(using: str) -> None:
    """Write the counters, unless that was done lately or a transaction is open. Raises nothing."""
    counters.write_shared(using, partial(_samples, using))


def _samples(using: str) -> dict[str, float] | None:
    from .queue import queues  # which imports this

    if queues.leads_here():
        return None  # a callback of a batch whose callers wait for their answers
    return {counters.WAITING: queues.waiting_on(using)}


def _batch(attempt: Attempt) -> Batch:
    answers: list[Any] = [step.call.answer for step in attempt.steps if step.rejected]
    codes = Counter(each.rejected.code for each in answers)
    name = f"{attempt.entity._meta.label}:{attempt.id}"
    return Batch(attempt.using, attempt.now, name, len(attempt.steps), codes)


def _count(batch: Batch, conflicts: int = 0, seconds: float | None = None) -> None:
    with counters.counting(batch.now, using=batch.using) as minute:
        minute.add(counters.CONFLICTS, conflicts)
        if not batch.size:
            return
        minute.add(counters.COMMANDS, batch.size)
        minute.observe(counters.BATCH_SIZE, batch.size, SIZES)
        if seconds is not None:
            minute.observe(counters.COMMIT_TIME, seconds)
        for code, count in batch.codes.items():
            known = [label for name, _, label in minute.values if name == counters.REJECTED]
            label = code if code in known or len(known) < CODES else OTHER
            minute.add(counters.REJECTED, count, dimension=counters.CODE, label=label)
        minute.entities[batch.entity] += batch.size
        if len(minute.entities) > KNOWN:
            minute.entities = Counter(dict(minute.entities.most_common(KNOWN // 10)))


def _count_and_write(batch: Batch) -> None:
    _count(batch)
    write_if_due(batch.using)
