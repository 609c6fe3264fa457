"""The counters of each drainer, and the samples that one drainer takes for all.

Counting costs a batch some memory and no statement. Once a minute the drainer that owns shard 0
samples the job table for all of them: through indexes, counting up to a limit, with a number of
statements that depends only on the number of Celery apps. It also deletes counters that are older
than the retention, an hour's worth at once. Nothing here raises: a sample that fails is left out.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from ...models import StagedJob
from ...models.counting import counted
from ...process import counters
from ...process.backoff import Backoff
from ...process.counters import BUCKETS, EDGES, Counters, prune_if_worth_it
from ...process.lease import LeaseHolder
from ...text import get_logger
from .batch import Row, apps_with_rows
from .status import by_shard

#: The owner of this shard takes the samples.
SAMPLER = 0

logger = get_logger("outbox_app.counters")


class DrainCounters(Counters):
    def __init__(self, holder: LeaseHolder) -> None:
        super().__init__(using=holder.using)
        self._holder = holder
        self._sampling = Backoff(f"samples of {self.using}", logger)
        self._read_at = 0.0
        self._sampled: datetime | None = None

    def reading(self) -> None:
        """Begin a batch: the delay of its rows grows from here on."""
        self._read_at = time.monotonic()

    def count(self, name: str, jobs: int) -> None:
        if minute := self.of(self._holder):
            minute.add(name, jobs)

    def accepted(self, rows: Sequence[Row]) -> None:
        """Count rows of the batch that the broker has just accepted."""
        minute = self.of(self._holder)
        if minute is None or not rows:
            return
        since = time.monotonic() - self._read_at
        delays = Counter(BUCKETS[bisect_left(EDGES, row.waited + since)] for row in rows)
        for label, count in delays.items():
            minute.add(counters.DELAY, count, dimension=counters.LE, label=label)
        minute.add(counters.PUBLISHED, len(rows))

    def keep(self) -> None:
        """Sample and write what is due. Call it between batches, with no transaction open."""
        if SAMPLER in self._holder.owned:
            self._sample_if_due()
        self.write_if_due()

    def _sample_if_due(self) -> None:
        minute = self.of(self._holder)
        if minute is None or minute.begins == self._sampled:
            return
        self._sampled = minute.begins
        try:
            ready = StagedJob.objects.using(self.using).ready()
            minute.put(counters.READY, counted(by_shard(ready, apps_with_rows(using=self.using))))
            prune_if_worth_it(minute.begins, using=self.using)
        except Exception as error:  # of any kind: rows edited by hand may be unreadable
            self._sampling.failed(error)
        else:
            self._sampling.succeeded()
