"""All events of a log by key, each key's in the order of positions, folded by tasks side by side.

One plan is made by the driver: which files of an archive, which ranges of the log behind it, and
the offset at which both end. A reader that continues there misses nothing and gets nothing
twice. Tasks read, hand each event to the task of its key, and fold; a task that is tried again, or
runs twice, makes the same rows, as the events are fixed. Nothing is written to a database.

A log that is pruned meanwhile may lack what was planned: ``pruned`` says so, and the
caller makes another plan. Imports no Django.
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
from .archive_reader import Part, file_batches, frame, planned, read
from .database import connect
from .offset import Offset, Offsets
from .options import Options
from .schema import COLUMNS as ALL
from .schema import arrow_types, some
from .source import batches

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

#: What a fold is given of an event, in this order.
COLUMNS = tuple(name for name in ALL if name not in ("txid", "slice"))
#: And of a version of an entity, behind these.
ANSWER = ("command_id", "rejected", "response", "state")

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    options: Options
    only: EventFilter
    schema: pa.Schema
    parts: list[Part]
    end: Offset
    #: The lowest position that is read from the log; 0: none is.
    lowest: int

    @classmethod
    def make(cls, options: Options, only: EventFilter) -> Plan:
        """Plan for what is committed by now. Raises ``ArchiveRefused``, ``ReadRefused``."""
        parts, end, lowest, _ = planned(options)
        with closing(connect(options)) as database:
            answer = ANSWER if database.schema().keys() >= set(ANSWER) else ()
            lowest = lowest or Offsets(database).lowest(part.conditions for part in parts)
        return cls(options, only, arrow_types(some(*COLUMNS, *answer)), parts, end, lowest)

    def rows(self, part: Part) -> Iterator[Row]:
        if part.files:
            found = file_batches(part.files, self.schema, self.options, self.only)
        else:
            found = batches(self.options, part.conditions, self.schema, self.only)
        for batch in found:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def pruned(self) -> bool:
        """Say whether something of it may have gone from the log before it was read."""
        if not self.lowest:
            return False
        with closing(connect(self.options)) as database:
            return not database.has(self.lowest)


def fold(session: SparkSession, plan: Plan, make: Callable[[], Any]) -> RDD[Any]:
    """Return what the events of each key become, by ``ViewFold``, which tasks make anew."""
    context = session.sparkContext
    parts = plan.parts or [Part()]
    plan = replace(plan, parts=[])  # a task is sent its own part only

    def keyed(parts: Iterable[Part]) -> Iterator[tuple[tuple[int, int], Row]]:
        key = make().key
        portable_hash("")  # raises where tasks would hash one text to several numbers
        for part in parts:
            for row in plan.rows(part):
                yield (hash(key(row)), row[0]), row

    def folded(rows: Iterable[tuple[tuple[int, int], Row]]) -> Iterator[Any]:
        fold = make()
        # Keys of one hash are folded together: so they need no order among themselves.
        for _, same in groupby(rows, key=lambda each: each[0][0]):
            for _, row in same:
                fold.add(row)
            yield from fold.result()

    rows = context.parallelize(parts, len(parts)).mapPartitions(keyed)
    count = max(context.defaultParallelism, len(parts))
    by_key = rows.repartitionAndSortWithinPartitions(count, partitionFunc=itemgetter(0))
    return by_key.mapPartitions(folded)


def beginning_missing(session: SparkSession, options: Options) -> str | None:
    """Return a stream whose first event is neither in the archive nor in the log; None: none is."""
    log = replace(options, archive="")
    # Heads first: what was committed before the events are looked for must be among them.
    known = frame(session, replace(log, read="heads")).select("stream").persist()
    try:
        known.count()
        schema = some("stream", "version")
        first = read(session, log=log, archive=options.archive, schema=schema).where("version = 1")
        missing = known.join(first, "stream", "left_anti").first()
    finally:
        known.unpersist()
    return None if missing is None else str(missing["stream"])
