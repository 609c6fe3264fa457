"""Reads an archive and the log as one: archived rows from the files, later rows from the log, from
exactly the offset at which the archive ends. Each row is read once, however much of the log was
pruned. If rows are pruned between the plan and the reading, an error is raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ..events.exceptions import ReadRefused
from ..events.log.filter import EventFilter
from ..text import get_logger
from .database import column_types, conformed, connect
from .exceptions import ArchiveRefused
from .mark import Day, added
from .offset import Offset, Offsets
from .options import Options
from .parquet import File, content_sum, read_batches, read_checked
from .schema import arrow_schema, ddl, quoted
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .table import Archive

logger = get_logger("outbox_app.pipeline")

#: How many plans are made in a row if the archive grows meanwhile.
PLANS = 10
#: The filter for all rows.
ALL = EventFilter()
#: Overrides the session's settings: a corrupt or missing file is an error; dates are not rebased.
_STRICT = {
    "datetimeRebaseMode": "CORRECTED",
    "parquet.page.verify-checksum.enabled": "true",
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}


def read(
    session: SparkSession,
    *,
    log: Options | Mapping[str, str],
    archive: str,
    schema: str | None = None,
) -> DataFrame:
    """Return the events of an archive and the log's events after its end, in no order.

    Spark reads the files itself, as fast as any Parquet files. If it has no file system for the
    address, Python reads them, as with ``format("outbox").option("archive", …)``. The frame has the
    events committed when it was made. It can be read for a week; make a new one for later events.

    Args:
        session: The session that reads.
        log: Options of the data source that name the log: ``url``, ``log`` …; with ``end``, the end
            of a commit of the archive, nothing after it is read.
        archive: The folder of the archive.
        schema: The columns to read, in Spark's SQL. Default: all.

    Raises:
        ArchiveRefused: The archive is not one of this log, or is damaged.
        InvalidSchema: There is no such column, or it is of another type.
        ReadRefused: The log cannot be read from the end of the archive on.
    """
    options = log if isinstance(log, Options) else Options.of(log)
    whole = replace(options, archive=archive)
    plan = planned(whole)
    table = plan.archive
    assert table is not None
    if not _has_file_system(session, table.store.folder):
        logger.info(
            "Archive is read in Python, as Spark has no file system for it archive=%s", archive
        )
        return frame(session, whole, schema)
    behind = replace(
        options,
        archive="",
        start=table.mark.end,
        end=plan.end.text,
        lowest=str(plan.lowest or ""),
    )
    rest, columns = frame(session, behind, schema), column_types(options)
    arrow_schema(rest.schema, columns)  # Spark would read an unknown column as null
    names = [f"{_address(table.store.folder)}/{file.name}" for file in table.files()]
    if not names:
        return rest
    files = session.read.schema(ddl(columns)).options(**_STRICT).parquet(*names)
    only, params = options.only.sql()
    if only:
        wanted = only.replace("%s", "?")
        files = session.sql(f"SELECT * FROM {{files}} WHERE {wanted}", params, files=files)
    files = files.select(*map(quoted, rest.columns))
    return files.unionByName(rest) if plan.lowest else files


def frame(session: SparkSession, options: Options, schema: str | None = None) -> DataFrame:
    """Return the frame that the data source reads with these options."""
    reader = session.read.format("outbox").options(**options.texts())
    return (reader.schema(schema) if schema else reader).load()


@dataclass(frozen=True)
class ReadPartition(InputPartition):
    """What one task reads: files of an archive, or ranges of a log."""

    files: Sequence[File] = ()
    #: Conditions in SQL. No row meets two of them.
    conditions: Sequence[str] = ()
    #: A position that the log must still have after the reading; 0 if none is required.
    lowest: int = 0


class Planned(NamedTuple):
    parts: list[ReadPartition]
    end: Offset
    #: The lowest position that is read from the log after an archive; 0 if there is none.
    lowest: int
    archive: Archive | None


def planned(options: Options) -> Planned:
    """Plan to read a log, or its archive and the log after it. Raises as ``read``."""
    end = Offset.load(options.end) if options.end else None
    archive = None
    if options.archive:
        from .table import Archive  # tasks, which only read the files, do not need it

        archive = Archive.load(options.archive, options.log, end)
    with closing(connect(options)) as database:
        offsets = Offsets(database)
        for _ in range(PLANS):
            if archive:
                start = archive.end
            else:
                start = Offset.load(options.start) if options.start else offsets.beginning()
            plan = _planned_from(start, offsets, end, archive)
            if end or not archive:
                return plan
            archive.refresh()
            # Only archived rows are pruned: if the end has not moved, all rows after it are there.
            if archive.end == start:
                return plan
    raise ReadRefused(
        f"The archive {options.archive} has grown {PLANS} times while the read was planned. Read "
        "it again, or first let the archiver catch up."
    )


def _planned_from(
    start: Offset, offsets: Offsets, end: Offset | None, archive: Archive | None
) -> Planned:
    """Plan to read the log from an offset on, and the files of the archive before it."""
    options = offsets.database.options
    offsets.verify(start)
    if end is None:
        end = offsets.end(start)
    elif end != start:
        offsets.verify(end)
    ranges = [] if end == start else offsets.parts(start, end, options.partitions)
    lowest = offsets.lowest(ranges) if archive else int(options.lowest or 0)
    files = sorted(archive.files(), key=lambda file: -file.rows) if archive else []
    shares = [files[n :: options.partitions] for n in range(options.partitions)]
    parts = [ReadPartition(files=share) for share in shares if share]
    parts += [ReadPartition(conditions=each, lowest=lowest) for each in ranges]
    # Spark would take an empty list for one partition that is None.
    return Planned(parts or [ReadPartition(lowest=lowest)], end, lowest, archive)


def file_batches(
    files: Sequence[File], schema: pa.Schema, options: Options, only: EventFilter = ALL
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files that match a filter. Raises ``ArchiveRefused``."""
    store = Store(options.archive)
    needed = schema.names if only == ALL else [*schema.names, "topic", "type"]
    for file in files:
        for batch in read_batches(store, file, needed):
            rows = batch if only == ALL else batch.filter(_wanted(batch, only))
            if rows.num_rows:
                yield conformed(_all(rows, schema), schema)


def check_files(session: SparkSession, archive: Archive) -> None:
    """Check in tasks, one for each file, that no file has changed, and then what each day has.

    Raises ``ArchiveRefused``, ``PySparkException``.
    """
    folder, files, days = archive.store.folder, archive.files(), archive.mark.days
    if not files:
        return

    def total(file: File) -> int:
        rows = read_checked(Store(folder), file)
        return content_sum(rows) if file.day in days else 0

    tasks = session.sparkContext.parallelize(files, len(files))
    found: dict[str, Day] = {}
    for file, each in zip(files, tasks.map(total).collect(), strict=True):
        found[file.day] = added(found.get(file.day, [0, "0"]), file.rows, each)
    for day, read in days.items():
        if found.get(day) != list(read):
            raise ArchiveRefused(
                f"The archive {folder} is damaged: its files of {day} have {found.get(day)} (rows, "
                f"sum of their hashes), but {read} was archived. Put the folder back from a copy; "
                "as long as the log has the rows, you can archive to a new folder instead."
            )


def _has_file_system(session: SparkSession, folder: str) -> bool:
    if re.search(r"[*?{}\[\]\\]", folder):
        return False  # Spark would take it for a pattern
    scheme = _address(folder).partition("://")[0]
    classes = session._jvm.org.apache.hadoop.fs.FileSystem  # type: ignore[union-attr]
    try:
        classes.getFileSystemClass(scheme, session._jsc.hadoopConfiguration())
    except Exception:
        return False
    return True


def _address(folder: str) -> str:
    """Return the address of a folder for Spark, which takes a bare path for one of the cluster.

    Spark's name for S3 is s3a.
    """
    return (folder if "://" in folder else f"file://{folder}").replace("s3://", "s3a://", 1)


def _all(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema; columns that were added to the log later are null."""
    there = set(rows.schema.names)
    nulls = pa.nulls(rows.num_rows)
    columns = [rows.column(name) if name in there else nulls for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _wanted(batch: pa.RecordBatch, only: EventFilter) -> pa.Array:
    topics, types = batch.column("topic").to_pylist(), batch.column("type").to_pylist()
    pairs = list(zip(topics, types, strict=True))
    wanted = {pair: only.matches(*pair) for pair in set(pairs)}
    return pa.array([wanted[pair] for pair in pairs], pa.bool_())
