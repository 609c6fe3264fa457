"""Folds all events of a log by key, in parallel tasks, and those of a key in order of position.

The driver plans: the files of an archive, the ranges of the log after it, and the offset at which
they end. Tasks read the events, send each to the task of its key, and fold them. A task that is
retried, or runs twice, makes the same rows, because the events are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pyspark.core.rdd import portable_hash

from ..events.log.filter import EventFilter
from .archive_reader import ReadPartition, frame, read
from .database import column_types
from .options import Options
from .schema import COLUMNS as ALL
from .schema import arrow_types, some
from .source import batches

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

#: The columns of an event that a fold is given, in this order.
COLUMNS = tuple(name for name in ALL if name not in ("txid", "slice"))
#: The columns of an entity's version that follow them.
ANSWER = ("command_id", "rejected", "response", "state")

Row = tuple[Any, ...]


def fold(
    session: SparkSession,
    options: Options,
    only: EventFilter,
    parts: Sequence[ReadPartition],
    make: Callable[[], Any],
) -> RDD[Any]:
    """Return what the ``ViewFold`` that each task makes by ``make`` yields for all events.

    Rows behind an archive that were pruned before they were read make the task fail.
    """
    context = session.sparkContext
    answer = ANSWER if column_types(options).keys() >= set(ANSWER) else ()
    schema = arrow_types(some(*COLUMNS, *answer))

    def keyed(parts: Iterable[ReadPartition]) -> Iterator[tuple[tuple[int, int], Row]]:
        key = make().key
        portable_hash("")  # raises if tasks would hash the same text differently
        for part in parts:
            for batch in batches(options, part, schema, only):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield (hash(key(row)), row[0]), row

    def folded(rows: Iterable[tuple[tuple[int, int], Row]]) -> Iterator[Any]:
        fold = make()
        # Keys with the same hash are folded together, so that keys need not be sorted.
        for _, same in groupby(rows, key=lambda each: each[0][0]):
            for _, row in same:
                fold.add(row)
            yield from fold.result()

    rows = context.parallelize(parts, len(parts)).mapPartitions(keyed)
    count = max(context.defaultParallelism, len(parts))
    by_key = rows.repartitionAndSortWithinPartitions(count, partitionFunc=itemgetter(0))
    return by_key.mapPartitions(folded)


def beginning_missing(session: SparkSession, options: Options) -> str | None:
    """Return a stream whose first event is neither in the archive nor in the log, or None."""
    log = replace(options, archive="")
    # Read heads first: their events are committed when the events are searched.
    known = frame(session, replace(log, read="heads")).select("stream").persist()
    try:
        known.count()
        schema = some("stream", "version")
        first = read(session, log=log, archive=options.archive, schema=schema).where("version = 1")
        missing = known.join(first, "stream", "left_anti").first()
    finally:
        known.unpersist()
    return None if missing is None else str(missing["stream"])
