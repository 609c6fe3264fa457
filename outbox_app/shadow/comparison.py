"""The comparison of shadow mode: what was sent, against what was committed, counted by task.

A row and a note with the same key are a pair: the task was sent after the commit, or before it.
After an hour a row without a note counts as never sent, and a note without a row as sent for a
rollback; a transaction that is open for longer is misjudged. A comparison counts and deletes in one
transaction, so that two comparisons count nothing twice. The tables hold only what is not judged.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q

from ..database.clock import DatabaseNow
from ..jobs.drain.batch import delete
from ..process.backoff import Backoff
from ..process.lease import LeaseHolder
from ..text import get_logger
from .models import ShadowJob, ShadowNote, ShadowResult

logger = get_logger("outbox_app.shadow")

#: How long a row waits for its note, or a note for its row.
ALONE = timedelta(hours=1)
#: Rows of each kind in one comparison, and seconds between two comparisons of a drainer.
LIMIT = 1000
INTERVAL = 10.0
Outcome = ShadowResult.Outcome


class ShadowComparison:
    """Runs the comparison for all drainers, in the one that owns shard 0. It raises nothing."""

    def __init__(self, holder: LeaseHolder) -> None:
        self._holder = holder
        self._due = time.monotonic() + INTERVAL
        self._backoff = Backoff(f"shadow mode on {holder.using}", logger)

    def keep(self) -> None:
        if 0 not in self._holder.owned or time.monotonic() < self._due:
            return
        began, pause = time.monotonic(), INTERVAL
        try:
            if compare_batch(using=self._holder.using) >= LIMIT:
                pause = 0.0
        except Exception as error:  # a table that does not exist yet, say
            self._backoff.failed(error)
        else:
            self._backoff.succeeded()
        # Comparisons take at most a fifth of the drainer's time, however many rows wait.
        ended = time.monotonic()
        self._due = ended + max(pause, 4 * (ended - began))


def compare_batch(*, using: str) -> int:
    """Judge up to LIMIT rows of each kind. Return the larger number; below LIMIT all are judged."""
    notes, jobs = ShadowNote.objects.using(using), ShadowJob.objects.using(using)
    if not notes.exists() and not jobs.exists():
        return 0
    pair = Exists(jobs.filter(key=OuterRef("key")))
    is_alone = Q(at__lt=DatabaseNow() - ALONE) & ~Exists(notes.filter(key=OuterRef("key")))
    is_judged = pair | ~Q(refused="") | Q(at__lt=DatabaseNow() - ALONE)
    with transaction.atomic(using=using):
        found = list(notes.filter(is_judged)[:LIMIT])
        rows = {job.key: job for job in jobs.filter(key__in=[note.key for note in found])}
        lost = list(jobs.filter(is_alone)[:LIMIT])
        judged: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for note in found:
            judged[note.task, _outcome(note, note.key in rows)].append(note)
        for job in lost:
            judged[job.task, Outcome.NEVER_SENT].append(job)
        for (task, outcome), halves in sorted(judged.items()):
            _count(task, outcome, halves, using=using)
        # If another comparison has locked these rows, delete() finds fewer: leave them to it.
        for model, halves in ((ShadowNote, found), (ShadowJob, [*rows.values(), *lost])):
            ids = [(half.id, half.task_id) for half in halves]
            if delete(ids, model=model, using=using) < len(ids):
                transaction.set_rollback(True, using=using)
                return 0
    return max(len(found), len(lost))


def report(*, using: str) -> dict[str, dict[str, ShadowResult]]:
    """Compare all rows and notes; return the results by task and outcome."""
    while compare_batch(using=using) >= LIMIT:
        pass
    results: dict[str, dict[str, ShadowResult]] = defaultdict(dict)
    for each in ShadowResult.objects.using(using).order_by("task", "outcome"):
        results[each.task][each.outcome] = each
    return results


def _outcome(note: ShadowNote, is_committed: bool) -> str:
    if note.refused:
        return Outcome.REFUSED
    if not is_committed:
        return Outcome.ROLLED_BACK
    return Outcome.EARLY if note.in_transaction else Outcome.MATCHED


def _count(task: str, outcome: str, halves: Iterable[Any], *, using: str) -> None:
    halves = sorted(halves, key=lambda half: half.at)
    last = {"last_at": halves[-1].at, "last_task_id": halves[-1].task_id}
    results = ShadowResult.objects.using(using)
    found = results.filter(task=task, outcome=outcome)
    if not found.update(count=F("count") + len(halves), **last):
        results.create(task=task, outcome=outcome, count=len(halves), **last)
    if outcome == Outcome.NEVER_SENT:
        text = "Task committed and never sent task=%s count=%d last_task_id=%s"
        logger.warning(text, task, len(halves), last["last_task_id"])
