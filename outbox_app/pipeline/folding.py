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
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.core.rdd import portable_hash

from ..eventlog.filter import EventFilter
from .archive_reader import file_batches, planned, read
from .database import connect
from .offset import Offset, Offsets
from .options import Options
from .parquet import File
from .schema import COLUMNS as ALL
from .schema import arrow_types, some
from .source import batches, wanted

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

#: What a fold is given of an event, in this order.
COLUMNS = tuple(name for name in ALL if name not in ("txid", "slice"))
#: And of a version of an entity, behind these.
ANSWER = ("command_id", "rejected", "response", "state")
_TOPIC, _TYPE = COLUMNS.index("topic"), COLUMNS.index("type")
_ARROW = arrow_types(some(*COLUMNS))
_VERSIONS = arrow_types(some(*COLUMNS, *ANSWER))
_ALL = EventFilter()

Row = tuple[Any, ...]


class Fold(Protocol):
    """What the events of a key become. Made anew in each task."""

    def key(self, row: Row) -> Any:
        """Return the key of an event: a text, a number, or what hashes the same everywhere."""

    def add(self, row: Row) -> None:
        """Take the next event of a key. All events of a key come to one fold, in order."""

    def result(self) -> Iterable[Any]:
        """Return what the events since the last call became."""


@dataclass(frozen=True, slots=True)
class FoldPart:
    options: Options
    files: tuple[File, ...] = ()
    conditions: tuple[str, ...] = ()
    #: A condition on all of them, in SQL, and the same in Python.
    wanted: str = ""
    only: EventFilter = _ALL
    schema: pa.Schema = _ARROW

    def rows(self) -> Iterator[Row]:
        if self.files:
            found = file_batches(self.files, self.schema, self.options)
        else:
            found = batches(self.options, self.conditions, self.schema, self.wanted)
        matches: dict[tuple[str, str], bool] = {}
        for batch in found:
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                kind = row[_TOPIC], row[_TYPE]
                if kind not in matches:
                    matches[kind] = self.only.matches(*kind)
                if matches[kind]:
                    yield row


@dataclass(frozen=True, slots=True)
class Plan:
    options: Options
    parts: tuple[FoldPart, ...]
    end: Offset
    #: The lowest position that is read from the log; 0: none is.
    lowest: int

    @classmethod
    def make(cls, options: Options, only: EventFilter) -> Plan:
        """Plan for what is committed by now. Raises ``ArchiveRefused``, ``ReadRefused``."""
        options = replace(options, topics="", types="", start="", end="")
        with closing(connect(options)) as database:
            offsets = Offsets(database)
            shares: list[list[File]] = []
            if options.archive:
                _, shares, ranges, end, lowest = planned(options)
            else:
                start = offsets.beginning()
                offsets.verify(start)
                end = offsets.end(start)
                ranges = [] if end == start else offsets.parts(start, end, options.partitions)
                lowest = offsets.lowest(ranges)
            chosen = wanted(only, database)
            is_versions = database.schema().keys() >= set(ANSWER)
            schema = _VERSIONS if is_versions else _ARROW
            parts = [FoldPart(options, tuple(files), (), "", only, schema) for files in shares]
            parts += [FoldPart(options, (), tuple(each), chosen, only, schema) for each in ranges]
            return cls(options, tuple(parts), end, lowest)

    def pruned(self) -> bool:
        """Say whether something of it may have gone from the log before it was read."""
        if not self.lowest:
            return False
        with closing(connect(self.options)) as database:
            return not database.has(self.lowest)


def fold(session: SparkSession, plan: Plan, make: Callable[[], Fold]) -> RDD[Any]:
    context = session.sparkContext
    parts = plan.parts or (FoldPart(plan.options),)

    def keyed(parts: Iterable[FoldPart]) -> Iterator[tuple[tuple[int, int], Row]]:
        key = make().key
        portable_hash("")  # raises where tasks would hash one text to several numbers
        for part in parts:
            for row in part.rows():
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
    archive = options.archive
    log = replace(options, topics="", types="", start="", end="", push_filters=False, archive="")
    # Heads first: what was committed before the events are looked for must be among them.
    heads = session.read.format("outbox").options(**log.texts()).option("read", "heads")
    known = heads.load().select("stream").persist()
    try:
        known.count()
        events = read(session, log=log, archive=archive, schema="stream string, version bigint")
        first = events.where("version = 1")
        missing = known.join(first, "stream", "left_anti").first()
    finally:
        known.unpersist()
    return None if missing is None else str(missing["stream"])
