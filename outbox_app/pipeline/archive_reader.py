"""An archive and the log behind it, read as one: what is archived from its files, the rest from the
log, from the very offset at which the archive ends. No row is in both, and none in neither, however
much of the log was pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from ..eventlog.filter import EventFilter
from .database import conformed
from .offset import Offset
from .options import Options
from .parquet import File, read_batches, read_checked
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .table import Archive


def archive_parts(options: Options) -> tuple[Offset, list[list[File]]]:
    """Plan the reading of an archive. Raises ``ArchiveRefused``."""
    from .table import Archive  # not where tasks read the files

    end = Offset.load(options.end) if options.end else None
    archive = Archive.load(options.archive, options.log, end)
    files = sorted(archive.files(), key=lambda file: file.rows, reverse=True)
    parts = [files[n :: options.partitions] for n in range(options.partitions)]
    return archive.end, [part for part in parts if part]


def file_batches(
    files: Sequence[File], schema: pa.Schema, options: Options
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files that the options want. Raises ``ArchiveRefused``."""
    store = Store(options.archive)
    only = options.only
    chooses = only.topics is not None or only.types is not None
    needed = [*schema.names, *(["topic", "type"] if chooses else [])]
    for file in files:
        for batch in read_batches(store, file, needed):
            rows = batch.filter(_wanted(batch, only)) if chooses else batch
            if rows.num_rows:
                yield conformed(_all(rows, schema), schema)


def check_files(session: SparkSession, archive: Archive) -> None:
    """See that every file is as it was written, each in a task. Raises ``PySparkException``."""
    folder, files = archive.store.folder, archive.files()
    if files:
        tasks = session.sparkContext.parallelize(files, len(files))
        tasks.foreach(lambda file: read_checked(Store(folder), file))


def _all(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema; those that the log was given later are null."""
    there = set(rows.schema.names)
    nulls = pa.nulls(rows.num_rows)
    columns = [rows.column(name) if name in there else nulls for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _wanted(batch: pa.RecordBatch, only: EventFilter) -> pa.Array:
    topics, types = batch.column("topic").to_pylist(), batch.column("type").to_pylist()
    pairs = list(zip(topics, types, strict=True))
    wanted = {pair: only.matches(*pair) for pair in set(pairs)}
    return pa.array([wanted[pair] for pair in pairs], pa.bool_())
