"""Paced writers for ``losses``: they write batches into a log, and delay their commits at random.

The writers do to the database what ``publish_many`` does: its own statement bumps the versions in
the heads of the streams, and the rows get their versions while the heads are locked. One INSERT
writes the rows. Its text is made by hand, because Django would take five times the CPU time, which
the readers need. A few transactions stay open for seconds, a few roll back.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

PROCESSES, THREADS = 2, 16
#: All writers share these streams, so they wait for one another's locks.
STREAMS = 20_000
#: Rows of a transaction, and the number of streams that they belong to.
ROWS, STREAMS_OF_ONE = 100, 10
#: One transaction in so many stays open for up to ``LONG`` seconds, the others up to ``SHORT``.
ONE_IN, LONG, SHORT = 100, 3.0, 0.05
#: One transaction in so many rolls back.
ROLLED_BACK = 200
DATA = '{"number": 17, "note": "a customer\'\'s order", "items": [{"sku": "a-17", "count": 2}]}'


@dataclass
class Written:
    """The rows that the writers know to be committed."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    #: For each id the time at which COMMIT returned, in seconds since 1970.
    committed_at: array[float] = field(default_factory=lambda: array("d"))
    transactions: int = 0
    began: float = 0.0
    ended: float = 0.0

    def add(self, other: Written) -> None:
        """Add the rows of another writer."""
        self.ids += other.ids
        self.committed_at += other.committed_at
        self.transactions += other.transactions
        self.began = min(self.began or other.began, other.began)
        self.ended = max(self.ended, other.ended)

    @property
    def summary(self) -> dict[str, Any]:
        """The achieved rates."""
        seconds = self.ended - self.began
        return {
            "rows": len(self.ids),
            "transactions": self.transactions,
            "seconds": round(seconds, 2),
            "rows_per_second": round(len(self.ids) / seconds),
            "transactions_per_second": round(self.transactions / seconds, 1),
        }


def write(*, rows_per_second: float, seconds: float) -> Written:
    """Write ``rows_per_second * seconds`` rows, at that rate or as fast as the machine can."""
    from django.db import connections

    connections.close_all()
    share = max(1, round(rows_per_second * seconds / ROWS / PROCESSES / THREADS))
    pause = ROWS / (rows_per_second / PROCESSES / THREADS)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        jobs = [pool.submit(_process, share, pause, n) for n in range(PROCESSES)]
        return _sum(job.result() for job in jobs)


def _process(share: int, pause: float, number: int) -> Written:
    with ThreadPoolExecutor(THREADS) as pool:
        seeds = range(number * THREADS, (number + 1) * THREADS)
        return _sum(pool.map(lambda seed: _thread(share, pause, seed), seeds))


def _sum(parts: Any) -> Written:
    total = Written()
    for part in parts:
        total.add(part)
    return total


def _thread(share: int, pause: float, seed: int) -> Written:
    """Commit ``share`` transactions, one every ``pause`` seconds."""
    from django.db import connection

    dice, written = random.Random(seed), Written(began=time.time())
    due = time.monotonic() + pause * dice.random()
    while written.transactions < share:
        time.sleep(max(0.0, due - time.monotonic()))
        _transaction(dice, written)
        due += pause
    written.ended = time.time()
    connection.close()
    return written


def _transaction(dice: random.Random, written: Written) -> None:
    from django.db import transaction

    from .models import TimedEvent

    long = not dice.randrange(ONE_IN)
    back = not dice.randrange(ROLLED_BACK)
    with transaction.atomic():
        streams = [f"order-{dice.randrange(STREAMS)}" for _ in range(STREAMS_OF_ONE)]
        ids = insert(streams, ROWS, log=TimedEvent)
        time.sleep(dice.uniform(0, LONG if long else SHORT))
        if back:
            transaction.set_rollback(True)
    if not back:
        written.ids.extend(ids)
        written.committed_at.extend([time.time()] * len(ids))
        written.transactions += 1


def insert(streams: list[str], rows: int, *, log: Any) -> list[int]:
    """Insert rows into a log, for each stream in turn. Returns their positions."""
    from django.db import connection

    from outbox_app.database.upsert import last_inserted
    from outbox_app.events.log.heads import bump_versions
    from outbox_app.events.log.newevent import slice_of

    table = log._meta.db_table
    order = [streams[n % len(streams)] for n in range(rows)]
    counts = Counter(order)
    heads = bump_versions(table, counts, {}, using="default")
    versions = {stream: heads[stream] - count for stream, count in counts.items()}
    now, uuid, txid = "STATEMENT_TIMESTAMP()", "gen_random_uuid()", "DEFAULT"
    if connection.vendor == "mysql":
        now, uuid, txid = "UTC_TIMESTAMP(6)", "REPLACE(UUID(), '-', '')", "0"
    values = []
    for stream in order:
        versions[stream] += 1
        values.append(
            f"({txid}, '', '{stream}', {versions[stream]}, 'order.placed', '{DATA}', '{{}}', "
            f"{slice_of(stream)}, {uuid}, {now})"
        )
    returns = connection.features.can_return_rows_from_bulk_insert
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (txid, topic, stream, version, type, data, metadata, slice, "
            f"message_id, recorded_at) VALUES {', '.join(values)}"
            + (" RETURNING id" if returns else "")
        )
        ids = cursor.fetchall() if returns else last_inserted(cursor, log, ["id"], len(values))
        return [id for (id,) in ids]
