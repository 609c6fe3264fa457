"""Archives the log as a Delta table, exactly once: batch after batch, from cursor to cursor.

Spark's tasks copy the parts of a batch into Parquet files. The database then counts the rows of the
batch once more: so many have to be in the files. Only then is the batch committed: before that it
has no effect, and a killed process's batch is made anew from the same rows, because the rows
between two cursors never change. If two processes make the same batch, one commits, and the other
fails. Who deletes rows compares them with the archive first: see ``driver.comparison``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from ..events.exceptions import ReadRefused, TooManyGaps
from ..failpoints import failpoint
from ..text import Write, get_logger, one_line
from .archive_reader import ReadPartition
from .compaction import compact
from .database import connect
from .exceptions import ArchiveRefused, Unreachable
from .offset import Offset, Offsets
from .options import Options
from .parquet import File, write_days
from .schema import arrow_types, some
from .session import reason
from .source import batches
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .table import Archive

logger = get_logger("outbox_app.pipeline")

#: The most rows of a batch.
MAX_ROWS = 500_000
#: The longest pause before a retry, in seconds.
MAX_PAUSE = 60.0
#: Seconds between two searches for files that the table does not name.
VACUUM_SECONDS = 24 * 3600

_FIRST = arrow_types(some("id", "recorded_at"))


class Archiver:
    """Archives one log into one folder.

    Args:
        session: Runs the tasks. They must see the folder under the same name.
        options: The log.
        folder: A path or an address, such as ``s3://bucket/folder``.
        max_rows: The most rows of a batch.
        write: Called with lines of progress.
    """

    def __init__(
        self,
        session: SparkSession,
        options: Options,
        folder: str,
        *,
        max_rows: int = MAX_ROWS,
        write: Write = logger.info,
    ) -> None:
        self.context = session.sparkContext
        self.options = options
        self.store = Store(folder)
        self.max_rows = max_rows
        self.write = write
        self._vacuumed = -float(VACUUM_SECONDS)

    def run(self, stopped: Callable[[], bool] = bool) -> int:
        """Archive the events that are committed by now, and return their number.

        Args:
            stopped: Called between batches; returns whether to stop before the end.

        Raises:
            ArchiveRefused: The folder is not an archive of this log, or a damaged one.
            ReadRefused: The log cannot be read from the end of the archive on.
            Unreachable: The database is unavailable.
        """
        with self._opened() as (archive, offsets):
            return self._batches(archive, offsets, stopped)

    def follow(self, interval: float, wait: Callable[[float], bool]) -> None:
        """Archive committed events, again and again.

        Transient failures are retried: the database restarts, an executor is lost, the disk is
        full. If Spark itself ends, an error is raised.

        Args:
            interval: Seconds between two looks at the log.
            wait: Waits for so many seconds, maybe 0, and returns whether to end.

        Raises:
            ArchiveRefused, ReadRefused: As ``run``.
        """
        pause = 0.0
        while not wait(pause):
            began = time.monotonic()
            try:
                with self._opened() as (archive, offsets):
                    self._batches(archive, offsets, lambda: wait(0))
                    while not wait(interval):
                        archive.refresh()
                        offsets.verify(archive.end)  # the log may have been emptied
                        self._batches(archive, offsets, lambda: wait(0))
                return
            except Exception as error:
                lasting = isinstance(error, ArchiveRefused | ReadRefused)
                if not self._is_running() or (lasting and not isinstance(error, TooManyGaps)):
                    raise
                failing = time.monotonic() - began < MAX_PAUSE
                pause = min(max(pause * 2, 1.0), MAX_PAUSE) if failing else 1.0
                self.write(f"archive is tried again in={pause:.0f}s error={reason(error)}")

    def _is_running(self) -> bool:
        try:
            return not self.context._jsc.sc().isStopped()
        except Exception:
            return False

    @contextmanager
    def _opened(self) -> Iterator[tuple[Archive, Offsets]]:
        from .table import Archive

        with closing(connect(self.options)) as database:
            try:
                offsets, schema = Offsets(database), arrow_types(database.schema())
                start = offsets.beginning()
                archive = Archive.make(self.store.folder, self.options.log, start, schema)
                offsets.verify(archive.end)
                archive.verify(database.has)
                yield archive, offsets
            except database.errors as error:
                raise Unreachable(
                    f"The database {self.options.url} failed: {one_line(error, 1000)}. The rows in "
                    "the archive's table are archived; run the archiver again."
                ) from error

    def _batches(self, archive: Archive, offsets: Offsets, stopped: Callable[[], bool]) -> int:
        bound = offsets.latest()
        began, total = time.monotonic(), 0
        while not stopped():
            end = offsets.end(archive.end, self.max_rows, bound=bound)
            if end == archive.end:
                break
            # Read after the end: every column that rows of the batch use exists by now.
            schema = arrow_types(offsets.database.schema())
            archive.add_columns(schema)
            failpoint("archive_planned")
            files = self._copied(archive, end, offsets, schema)
            archive.commit(files, end, since=_first_day(offsets))
            failpoint("archive_done")
            rows = sum(file.rows for file in files)
            total += rows
            rate = total / (time.monotonic() - began)
            self.write(
                f"archived log={self.options.log} batch={archive.mark.batches - 1} rows={rows} "
                f"total={archive.rows} rate={rate:.0f}/s"
            )
            for merged in compact(archive):
                self.write(f"compacted day={merged.day} rows={merged.rows}")
        if not stopped() and time.monotonic() - self._vacuumed > VACUUM_SECONDS:
            self._vacuumed = time.monotonic()
            if count := archive.vacuum():
                self.write(f"vacuumed files={count}")
        return total

    def _copied(
        self, archive: Archive, end: Offset, offsets: Offsets, schema: pa.Schema
    ) -> list[File]:
        """Write the files of the next batch, all its rows. Raises ``ArchiveRefused``."""
        prefix = f"{archive.mark.batches:08d}-{uuid4().hex[:8]}"
        ranges = offsets.parts(archive.end, end, self.context.defaultParallelism)
        parts = [ReadPartition(conditions=each) for each in ranges]
        copy = partial(_copy, self.options, self.store.folder, schema, prefix)
        try:
            files = [file for each in self._spread(copy, parts) for file in each]
            failpoint("archive_copied")
            read, there = sum(file.rows for file in files), offsets.count(archive.end, end)
            if read != there:
                raise ArchiveRefused(
                    f"{read} rows of {self.options.log} were read for this batch, but the database "
                    f"counts {there}: rows were deleted meanwhile, or were lost on their way. "
                    "Nothing of this batch was kept. Run the archiver again."
                )
            failpoint("archive_counted")
        except Exception:
            # Retries would fill the disk with such files within the retention of the table.
            with suppress(OSError, Unreachable):
                for name in self.store.list():
                    if f"/{prefix}-" in name:
                        self.store.delete(name)
            raise
        return files

    def _spread(self, function: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
        """Call a function once for each part, each time in a task."""
        if not parts:
            return []
        return self.context.parallelize(parts, len(parts)).map(function).collect()


def _copy(
    options: Options, folder: str, schema: pa.Schema, prefix: str, part: ReadPartition
) -> list[File]:
    """Write the rows of a part. Each attempt writes its own files, and one attempt counts."""
    return write_days(batches(options, part, schema), Store(folder), prefix, schema)


def _first_day(offsets: Offsets) -> str:
    """Return the day before that of the log's first row, if it has one.

    Times are nearly in the order of positions.
    """
    database = offsets.database
    columns = ", ".join(map(database.column, _FIRST.names))
    sql = f"SELECT {columns} FROM {offsets.scan.source} ORDER BY id LIMIT 1"
    try:
        days = [day for each in database.batches(sql, _FIRST) for day in each[1].cast(pa.date32())]
        return str(days[0].as_py() - timedelta(days=1)) if days and days[0].is_valid else ""
    except (pa.ArrowInvalid, OverflowError, ValueError):  # no moment, written by hand
        return ""
