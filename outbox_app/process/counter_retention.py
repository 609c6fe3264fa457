"""Retention of the counters: rows go when they have been kept for long enough.

Name by name, the oldest first, in batches that are found by the index (name, minute) and deleted by
primary key. Whoever is interrupted has lost nothing. The statistics of a log stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from ..conf import outbox_settings
from ..models import Statistic
from .counters import NAMES, NEWEST_ID

#: Rows that a drainer deletes with one statement, and about how many in a minute.
BATCH, MOST = 1000, 10_000
#: Rows older than the retention and this are worth a look at all of them.
WORTH = timedelta(hours=1)


def prune_if_worth_it(now: datetime, *, using: str) -> int:
    """Delete old counters if an hour's worth of them has piled up."""
    before = now - timedelta(hours=outbox_settings().STATISTICS_RETENTION_HOURS)
    samples = Statistic.objects.using(using).filter(name=NEWEST_ID)
    if not samples.filter(minute__lt=before - WORTH).exists():
        return 0
    removed = 0
    for count in pruned(before, using=using, batch_size=BATCH):
        removed += count
        if removed >= MOST:
            break
    return removed


def pruned(
    before: datetime, *, using: str, batch_size: int, dry_run: bool = False
) -> Iterator[int]:
    """Delete counters of minutes before a time; yield how many, batch by batch.

    Args:
        before: The time, as Django stores times: with a time zone where ``USE_TZ`` is on.
        using: Database alias.
        batch_size: Rows of one DELETE.
        dry_run: Delete nothing: count them.
    """
    rows = Statistic.objects.using(using)
    # The samples last: while some of them are old, there may be more of the others.
    for name in sorted(NAMES, key=lambda name: name == NEWEST_ID):
        old = rows.filter(name=name, minute__lt=before).order_by("minute")
        if dry_run:
            yield old.count()
            continue
        while batch := list(old.values_list("pk", flat=True)[:batch_size]):
            rows.filter(pk__in=batch).delete()
            yield len(batch)
            if len(batch) < batch_size:
                break
