"""An archive and the log behind it, read as one: what is archived from its files, the rest from the
log, from the very offset at which the archive ends. No row is in both, and none in neither, however
much of the log was pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from ..eventlog.filter import EventFilter
from ..exceptions import ArchiveRefused
from .database import conformed
from .manifest import File, Manifest
from .offset import Offset, Offsets
from .options import Options
from .parquet import read_batches, read_checked
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def archive_parts(offsets: Offsets, options: Options) -> tuple[Offset, list[list[File]]]:
    """Plan the reading of an archive. Raises ``ArchiveRefused``."""
    manifest = Manifest.load(Store(options.archive), options.log)
    entries = manifest.entries
    if options.end:
        # Batches may have been added since the caller asked where it ends.
        end = Offset.load(options.end)
        entries = entries[: 1 + next((n for n, each in enumerate(entries) if each.end == end), -1)]
        if not entries:
            raise ArchiveRefused(
                f"No batch of the archive {options.archive} ends at the offset that is asked for. "
                "Leave the option end out, or take the end of an entry of its manifest; where "
                "batches were put together meanwhile, begin again."
            )
    files = [file for entry in entries for file in entry.files]
    files.sort(key=lambda file: file.rows, reverse=True)
    parts = [files[n :: options.partitions] for n in range(options.partitions)]
    start = entries[-1].end if entries else offsets.beginning()
    return start, [part for part in parts if part]


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
                yield conformed(rows.select(schema.names), schema)


def check_files(session: SparkSession, manifest: Manifest) -> None:
    """See that every file is as it was written, each in a task. Raises ``PySparkException``."""
    folder, files = manifest.store.folder, manifest.files()
    if files:
        tasks = session.sparkContext.parallelize(files, len(files))
        tasks.foreach(lambda file: read_checked(Store(folder), file))


def _wanted(batch: pa.RecordBatch, only: EventFilter) -> pa.Array:
    topics, types = batch.column("topic").to_pylist(), batch.column("type").to_pylist()
    pairs = list(zip(topics, types, strict=True))
    wanted = {pair: only.matches(*pair) for pair in set(pairs)}
    return pa.array([wanted[pair] for pair in pairs], pa.bool_())
