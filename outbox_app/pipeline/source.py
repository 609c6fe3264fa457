"""The data source ``outbox``: a log as a table of Spark, and as a stream.

Its offset is the cursor of the log, so a batch has the same rows whenever and wherever it is read,
and no row that commits late is missed. The driver plans: it cuts the new rows into ranges of
positions. Executors read these as Arrow batches, each over its own connection. No row is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ..events.exceptions import ReadRefused
from ..events.log.filter import EventFilter
from .archive_reader import ALL, ReadPartition, file_batches, planned
from .database import column_types, connect
from .exceptions import InvalidOption
from .offset import Offset, Offsets
from .options import Options
from .schema import arrow_schema, ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

#: Tables that are read as they are.
_TABLES = {"heads": "outbox_stream", "inbox": "outbox_inbox"}


def register(session: SparkSession) -> None:
    """Register ``format("outbox")`` with a session. If installed, Spark finds it by itself."""
    session.dataSource.register(OutboxDataSource)


class OutboxDataSource(DataSource):
    """``format("outbox")`` of ``spark.read`` and ``spark.readStream``; it takes ``Options``."""

    @classmethod
    def name(cls) -> str:
        return "outbox"

    def schema(self) -> str:
        return ddl(column_types(Options.of(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        return Reader(Options.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = Options.of(self.options)
        bounds = (options.archive, options.start, options.end, options.lowest)
        if options.read != "events" or any(bounds):
            raise InvalidOption(
                "A stream reads events, and starts where its checkpoint says: leave out read, "
                "archive, start, end and lowest."
            )
        return StreamReader(options, schema)


class Reader(DataSourceReader):
    """Reads a log once: from the beginning, or an offset, up to now, or another offset."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema, column_types(options), options.read)

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        if options.read == "events":
            return planned(options).parts
        if options.read == "inbox":
            return [ReadPartition(conditions=["1 = 1"])]
        with closing(connect(options)) as database:
            return [ReadPartition(conditions=[f"log = {database.literal(options.log)}"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReadPartition)
        return batches(self.options, partition, self.schema, self.options.only)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema, column_types(options), options.read)
        #: The end of a query with the trigger ``availableNow``.
        self._bound: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._planner.beginning().dump()

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self.options.max_rows_per_batch
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = Offset.load(start)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = self._planner.end(at, rows, bound=self._bound)
        self._planner.verify(at)  # the log may have been emptied, or set back
        return end.dump()

    def prepareForTriggerAvailableNow(self) -> None:
        self._bound = self._planner.latest()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._planner.latest().dump()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        first, last = Offset.load(start), Offset.load(end)
        for offset in (first, last):  # perhaps from a checkpoint
            self._planner.verify(offset)
        parts = self._planner.parts(first, last, self.options.partitions)
        return [ReadPartition(conditions=each) for each in parts] or [ReadPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReadPartition)
        return batches(self.options, partition, self.schema, self.options.only)

    def stop(self) -> None:
        if planner := self.__dict__.pop("_planner", None):
            planner.database.close()

    @cached_property
    def _planner(self) -> Offsets:
        return Offsets(connect(self.options))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_planner"}


def batches(
    options: Options, part: ReadPartition, schema: pa.Schema, only: EventFilter = ALL
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part that match a filter.

    Raises ``ArchiveRefused``, ``Unreachable``, and ``ReadRefused`` if the log was pruned meanwhile.
    """
    if part.files:
        yield from file_batches(part.files, schema, options, only)
    if not (part.conditions or part.lowest):
        return
    with closing(connect(options)) as database:
        table = database.quoted(_TABLES.get(options.read, options.log))
        columns = ", ".join(database.column(name) for name in schema.names)
        wanted, params = only.sql() if options.read == "events" else ("", [])
        chosen = f" AND ({wanted % tuple(map(database.literal, params))})" if wanted else ""
        for each in part.conditions:
            where = f"({each}){chosen}"
            yield from database.batches(f"SELECT {columns} FROM {table} WHERE {where}", schema)
        if part.lowest and not database.has(part.lowest):
            raise ReadRefused(
                f"Position {part.lowest} was removed from {options.log} while the log was read: "
                "the archive has grown, and the log was pruned. Read both again."
            )
