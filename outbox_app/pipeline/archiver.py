"""The log as a Delta table, exactly once: batch after batch, from one cursor to the next.

Spark's tasks copy the parts of a batch, each over a connection of its own, straight from the
database's Arrow batches into Parquet files. Other tasks then read these files again, and the log
once more, and compare them row by row; only then the batch is committed. Until then it has not
happened, and the next process begins where the newest commit ends. A batch whose process was killed
is made anew, from the same rows: those between two cursors never change. There is no second truth:
no checkpoint beside the table. Of two processes that make one batch one commits, and the other
fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from ..exceptions import ArchiveRefused, ReadRefused, TooManyGaps, Unreachable
from ..failpoints import failpoint
from ..text import Write, get_logger, one_line
from .compaction import compact
from .database import Database, connect
from .offset import Offset, Offsets
from .options import Options
from .parquet import File, first_difference, read_all, write_days
from .schema import arrow_types
from .session import reason
from .source import batches
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .table import Archive

logger = get_logger("outbox_app.pipeline")

#: Most rows of a batch.
MAX_ROWS = 500_000
#: Longest pause before what failed is tried again, in seconds.
MAX_PAUSE = 60.0
#: Seconds between two looks for files that the table does not name.
VACUUM_SECONDS = 24 * 3600


class Archiver:
    """Archives one log into one folder.

    Args:
        session: Where the tasks run. They have to see the folder under the same name.
        options: The log.
        folder: A path or an address, such as ``s3://bucket/folder``.
        max_rows: Most rows of a batch.
        write: Takes progress lines.
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
        """Archive what is committed by now. Returns how many events that was.

        Args:
            stopped: Says whether to end before. Asked between batches.

        Raises:
            ArchiveRefused: The folder is no archive of this log, or a damaged one.
            ReadRefused: The archive ends where the log cannot be read from.
            Unreachable: The database is away.
        """
        return self._run(stopped)

    def follow(self, interval: float, wait: Callable[[float], bool]) -> None:
        """Archive what is committed, again and again.

        Transient failures are retried: the database restarts, an executor is lost, the disk is
        full. The end of Spark itself is an error.

        Args:
            interval: Seconds between two looks.
            wait: Waits so many seconds, 0: not at all. Says whether to end.

        Raises:
            ArchiveRefused, ReadRefused: As ``run``.
        """
        pause = 0.0
        while not wait(pause):
            began = time.monotonic()
            try:
                self._run(lambda: wait(0), again=lambda: wait(interval))
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

    def _run(self, stopped: Callable[[], bool], again: Callable[[], bool] | None = None) -> int:
        from .table import Archive

        with closing(connect(self.options)) as database:
            try:
                offsets = Offsets(database)
                schema = arrow_types(database.schema())
                start = offsets.beginning()
                archive = Archive.make(self.store.folder, self.options.log, start, schema)
                offsets.verify(archive.end)
                self._verify(archive, database)
                total = self._batches(archive, offsets, stopped)
                while again is not None and not again():
                    archive.refresh()
                    total += self._batches(archive, offsets, stopped)
                return total
            except database.errors as error:
                raise Unreachable(
                    f"{self.options.url} has not answered as it should: {one_line(error, 1000)}. "
                    "What is in the table is archived; run it again."
                ) from error

    def _verify(self, archive: Archive, database: Database) -> None:
        """See that all files are there, and that no commit is missing whose rows were pruned."""
        for file in archive.verify():
            first = pc.min(archive.read(file).column("id")).as_py()
            if not database.has(first):
                raise ArchiveRefused(
                    f"The archive {self.store.folder} is damaged: no commit names {file.name}, and "
                    f"the log has no position {first}, which is in it. Put _delta_log back from a "
                    "copy; if the log was pruned without --archived, delete the file."
                )

    def _batches(self, archive: Archive, offsets: Offsets, stopped: Callable[[], bool]) -> int:
        bound = offsets.latest()
        began, total = time.monotonic(), 0
        while not stopped():
            end = offsets.end(archive.end, self.max_rows, bound=bound)
            if end == archive.end:
                break
            # After the end: a column of a row of the batch is there by now.
            schema = arrow_types(offsets.database.schema())
            archive.add_columns(schema)
            failpoint("archive_planned")
            files = self._batch(archive, end, offsets, schema)
            archive.commit(files, end)
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

    def _batch(
        self, archive: Archive, end: Offset, offsets: Offsets, schema: pa.Schema
    ) -> list[File]:
        prefix = f"{archive.mark.batches:08d}-{uuid4().hex[:8]}"
        parts = offsets.parts(archive.end, end, self.context.defaultParallelism)
        of_all = (self.options, self.store.folder, schema)
        try:
            copied = self._spread(partial(_copy, *of_all, prefix), parts)
            failpoint("archive_copied")
            self._spread(partial(_compare, *of_all), list(zip(parts, copied, strict=True)))
            failpoint("archive_compared")
        except Exception:
            # Again and again, they would fill the disk before the table's retention is over.
            with suppress(OSError):
                for name in self.store.list():
                    if f"/{prefix}-" in name:
                        self.store.delete(name)
            raise
        return [file for files in copied for file in files]

    def _spread(self, function: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
        """Have tasks call a function, each with one of the parts."""
        if not parts:
            return []
        return self.context.parallelize(parts, len(parts)).map(function).collect()


def _copy(
    options: Options, folder: str, schema: pa.Schema, prefix: str, conditions: Sequence[str]
) -> list[File]:
    """Write the rows of a part. Each attempt has files of its own, and one attempt counts."""
    return write_days(batches(options, conditions, schema), Store(folder), prefix, schema)


def _compare(
    options: Options,
    folder: str,
    schema: pa.Schema,
    part: tuple[Sequence[str], Sequence[File]],
) -> None:
    conditions, files = part
    archived = read_all(Store(folder), files, schema)
    logged = pa.Table.from_batches(batches(options, conditions, schema), schema=schema)
    position = first_difference(archived, logged)
    if position is not None:
        raise ArchiveRefused(
            f"What was just archived of {options.log} is not what the log holds, first at "
            f"position {position}: rows were changed or deleted meanwhile, or the disk is broken. "
            "Nothing of this batch was kept."
        )
