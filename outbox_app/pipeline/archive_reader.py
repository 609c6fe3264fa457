"""An archive and the log behind it, read as one: what is archived from its files, the rest from the
log, from the very offset at which the archive ends. No row is in both, and none in neither, however
much of the log was pruned; what is pruned between the plan and its reading is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ..eventlog.filter import EventFilter
from ..exceptions import ReadRefused
from ..text import get_logger
from .database import columns_of, conformed, connect
from .offset import Offset, Offsets
from .options import Options
from .parquet import File, read_batches, read_checked
from .schema import arrow_schema, ddl, quoted
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .table import Archive

logger = get_logger("outbox_app.pipeline")

#: Plans that are made, one after the other, where the archive gets on meanwhile.
PLANS = 10
#: Asks for all rows.
ALL = EventFilter()
#: Over the session's settings: a file that has rotted or gone is an error, and a day is that day.
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
    """Return the events of an archive, and those that the log has behind its end, in no order.

    Spark reads the files itself, as fast as any Parquet files. Where it has no file system for the
    address, Python does, as with ``format("outbox").option("archive", …)``. The frame has what was
    committed when it was made, whenever it is read, within a week: make another one to see more.

    Args:
        session: Where it is read.
        log: Options of the data source that say which log: ``url``, ``log`` …; with ``end``, that
            of a commit of the archive, nothing behind it.
        archive: Folder of the archive.
        schema: Columns that are needed, as Spark's SQL writes them. Default: all.

    Raises:
        ArchiveRefused: It is no archive of the log, or a damaged one.
        InvalidSchema: There is no such column, or it is of another type.
        ReadRefused: The archive ends where the log cannot be read from.
    """
    options = log if isinstance(log, Options) else Options.of(log)
    whole = replace(options, archive=archive)
    if not _has_file_system(session, archive):
        logger.info("archive=%s is read in Python: Spark has no file system for it", archive)
        return frame(session, whole, schema)
    plan = planned(whole)
    table = plan.archive
    assert table is not None
    behind = replace(
        options,
        archive="",
        start=table.mark.end,
        end=plan.end.text,
        lowest=str(plan.lowest or ""),
    )
    rest, columns = frame(session, behind, schema), columns_of(options)
    arrow_schema(rest.schema, columns)  # Spark would read nulls
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
    """Return what the data source reads with these options."""
    reader = session.read.format("outbox").options(**options.texts())
    return (reader.schema(schema) if schema else reader).load()


@dataclass(frozen=True)
class Part(InputPartition):
    """What one task reads: files of an archive, or ranges of a log."""

    files: Sequence[File] = ()
    #: Conditions in SQL, of which no row meets two.
    conditions: Sequence[str] = ()
    #: A position that the log has to have when all are read; 0: none has to be there.
    lowest: int = 0


class Planned(NamedTuple):
    parts: list[Part]
    end: Offset
    #: The lowest position that is read from the log behind an archive; 0: there is none.
    lowest: int
    archive: Archive | None


def planned(options: Options) -> Planned:
    """Plan the reading of a log, or of its archive and the log behind it. Raises as ``read``."""
    given = Offset.load(options.end) if options.end else None
    archive = None
    if options.archive:
        from .table import Archive  # not where tasks read the files

        archive = Archive.load(options.archive, options.log, given)
    with closing(connect(options)) as database:
        offsets = Offsets(database)
        if archive is None:
            start = Offset.load(options.start) if options.start else offsets.beginning()
            return _planned_from(start, offsets, given)
        for _ in range(PLANS):
            start = archive.end
            plan = _planned_from(start, offsets, given, archive)
            if given:
                return plan
            archive.refresh()
            # What is not archived is not pruned: nothing has gone behind an end that has not moved.
            if archive.end == start:
                return plan
    raise ReadRefused(
        f"The archive {options.archive} has got on {PLANS} times while its reading was planned. "
        "Read it again, or let the archiver catch up before."
    )


def _planned_from(
    start: Offset, offsets: Offsets, end: Offset | None, archive: Archive | None = None
) -> Planned:
    """Plan for what the log has from an offset on, and for the files of what is before."""
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
    parts = [Part(files=share) for share in shares if share]
    parts += [Part(conditions=each, lowest=lowest) for each in ranges]
    return Planned(parts, end, lowest, archive)


def file_batches(
    files: Sequence[File], schema: pa.Schema, options: Options, only: EventFilter = ALL
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files that are wanted. Raises ``ArchiveRefused``."""
    store = Store(options.archive)
    needed = schema.names if only == ALL else [*schema.names, "topic", "type"]
    for file in files:
        for batch in read_batches(store, file, needed):
            rows = batch if only == ALL else batch.filter(_wanted(batch, only))
            if rows.num_rows:
                yield conformed(_all(rows, schema), schema)


def check_files(session: SparkSession, archive: Archive) -> None:
    """See that every file is as it was written, each in a task. Raises ``PySparkException``."""
    folder, files = archive.store.folder, archive.files()
    if files:
        tasks = session.sparkContext.parallelize(files, len(files))
        tasks.foreach(lambda file: read_checked(Store(folder), file))


def _has_file_system(session: SparkSession, folder: str) -> bool:
    if re.search(r"[*?{}\[\]\\]", folder):
        return False  # Spark would look for a pattern
    scheme = _address(folder).partition("://")[0]
    classes = session._jvm.org.apache.hadoop.fs.FileSystem  # type: ignore[union-attr]
    try:
        classes.getFileSystemClass(scheme, session._jsc.hadoopConfiguration())
    except Exception:
        return False
    return True


def _address(folder: str) -> str:
    """Return a folder as Spark takes it: a path alone would lie where the cluster keeps its files.

    Its own S3 is called s3a.
    """
    return (folder if "://" in folder else f"file://{folder}").replace("s3://", "s3a://", 1)


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
