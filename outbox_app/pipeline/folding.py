"""Folds all events of a log by key, in parallel tasks, and those of a key in order of position.

The driver makes a plan: the files of an archive, the ranges of the log after it, and the offset at
which they end. Tasks read the events, send each to the task of its key, and fold them. A task that
is retried, or runs twice, makes the same rows, because the events are fixed. If the log is pruned
meanwhile, planned rows may be missing: ``pruned`` reports that, and the caller makes another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.core.rdd import portable_hash

from ..eventlog.filter import EventFilter
from .archive_reader import Part, frame, planned, read
from .database import connect
from .offset import Offset, Offsets
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


@dataclass(frozen=True, slots=True)
class Plan:
    options: Options
    only: EventFilter
    schema: pa.Schema
    parts: list[Part]
    end: Offset
    #: The lowest position that is read from the log; 0 if none is.
    lowest: int

    @classmethod
    def make(cls, options: Options, only: EventFilter) -> Plan:
        """Plan to read what is committed by now. Raises ``ArchiveRefused``, ``ReadRefused``."""
        parts, end, lowest, _ = planned(options)
        with closing(connect(options)) as database:
            answer = ANSWER if database.schema().keys() >= set(ANSWER) else ()
            lowest = lowest or Offsets(database).lowest(part.conditions for part in parts)
        return cls(options, only, arrow_types(some(*COLUMNS, *answer)), parts, end, lowest)

    def rows(self, part: Part) -> Iterator[Row]:
        for batch in batches(self.options, part, self.schema, self.only):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def pruned(self) -> bool:
        """Return whether planned rows may have been pruned from the log before they were read."""
        if not self.lowest:
            return False
        with closing(connect(self.options)) as database:
            return not database.has(self.lowest)


def fold(session: SparkSession, plan: Plan, make: Callable[[], Any]) -> RDD[Any]:
    """Return what the ``ViewFold`` that each task makes by ``make`` yields for all events."""
    context = session.sparkContext
    parts = plan.parts
    plan = replace(plan, parts=[])  # a task is sent its own part only

    def keyed(parts: Iterable[Part]) -> Iterator[tuple[tuple[int, int], Row]]:
        key = make().key
        portable_hash("")  # raises if tasks would hash the same text differently
        for part in parts:
            for row in plan.rows(part):
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
