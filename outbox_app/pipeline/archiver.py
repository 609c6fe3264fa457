"""The log as Parquet, exactly once: batch after batch, from one cursor to the next.

Spark's tasks copy the parts of a batch, each over a connection of its own, straight from the
database's Arrow batches into files. Other tasks then read these files again, and the log once more,
and compare them row by row; only then the batch gets its entry in the manifest. That entry is the
commit: until it is there the batch has not happened, and the next process begins where the last
entry ends. A batch whose process was killed is made anew, from the same rows: those between two
cursors never change. There is no second truth: no checkpoint beside the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from ..exceptions import ArchiveRefused, ReadRefused, TooManyGaps, Unreachable
from ..failpoints import failpoint
from ..text import Write, get_logger, one_line
from .compaction import compact
from .database import connect
from .manifest import Entry, File, Manifest
from .offset import Offset, Offsets
from .options import Options
from .parquet import ARROW, first_difference, read_all, write_days
from .session import reason
from .source import batches
from .store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = get_logger("outbox_app.pipeline")

#: Most rows of a batch.
MAX_ROWS = 500_000
#: Longest pause before what failed is tried again, in seconds.
MAX_PAUSE = 60.0


@dataclass(frozen=True, slots=True)
class BatchPart:
    options: Options
    conditions: Sequence[str]
    folder: str
    prefix: str
    #: Once it is written.
    files: Sequence[File] = ()


class Archiver:
    """Archives one log into one folder.

    Args:
        session: Where the tasks run. They have to see the folder under the same name.
        options: The log.
        folder: A path or a URI. See ``Store``.
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
        self.options = replace(options, archive="", start="", end="", topics="", types="")
        self.store = Store(folder)
        self.max_rows = max_rows
        self.write = write

    def run(self, stopped: Callable[[], bool] = bool) -> int:
        """Archive what is committed by now.

        Args:
            stopped: Says whether to end before. Asked between batches.

        Returns:
            How many events that was.

        Raises:
            ArchiveRefused: The folder is no archive of this log, or a damaged one.
            ReadRefused: The archive ends where the log cannot be read from.
            Unreachable: The database is away.
        """
        with self._lock():
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
        with self._lock():
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

    @contextmanager
    def _lock(self) -> Iterator[None]:
        Manifest.is_made(self.store)  # in a folder that is not ours, not even a lock is made
        with self.store.lock():
            yield

    def _is_running(self) -> bool:
        try:
            return not self.context._jsc.sc().isStopped()
        except Exception:
            return False

    def _run(self, stopped: Callable[[], bool], again: Callable[[], bool] | None = None) -> int:
        manifest = Manifest.make(self.store, self.options.log)
        manifest.tidy()
        with closing(connect(self.options)) as database:
            try:
                offsets = Offsets(database)
                offsets.verify(manifest.end or offsets.beginning())
                total = self._batches(manifest, offsets, stopped)
                while again is not None and not again():
                    total += self._batches(manifest, offsets, stopped)
                return total
            except database.errors as error:
                raise Unreachable(
                    f"{self.options.url} has not answered as it should: {one_line(error, 1000)}. "
                    "What is in the manifest is archived; run it again."
                ) from error

    def _batches(self, manifest: Manifest, offsets: Offsets, stopped: Callable[[], bool]) -> int:
        start = manifest.end or offsets.beginning()
        bound = offsets.latest()
        began, total = time.monotonic(), 0
        while not stopped():
            end = offsets.end(start, self.max_rows, bound=bound)
            if end == start:
                break
            failpoint("archive_planned")
            entry = self._batch(manifest.next, start, end, offsets)
            manifest.commit(entry)
            failpoint("archive_moved")
            start, total = end, total + entry.rows
            rate = total / (time.monotonic() - began)
            self.write(
                f"archived log={self.options.log} batch={entry.last} rows={entry.rows} "
                f"total={manifest.rows} rate={rate:.0f}/s"
            )
            for merged in compact(manifest):
                self.write(f"compacted batches={merged.first}-{merged.last} rows={merged.rows}")
        return total

    def _batch(self, number: int, start: Offset, end: Offset, offsets: Offsets) -> Entry:
        parts = [
            BatchPart(self.options, conditions, self.store.folder, f"{number:08d}")
            for conditions in offsets.parts(start, end, self.context.defaultParallelism)
        ]
        copied = self._spread(_copy, parts)
        failpoint("archive_copied")
        self._spread(_compare, copied)
        failpoint("archive_compared")
        files = [file for part in copied for file in part.files]
        files.sort(key=lambda file: file.first)
        return Entry(number, number, start, end, files, verified=time.time())

    def _spread(
        self, function: Callable[[BatchPart], BatchPart], parts: list[BatchPart]
    ) -> list[BatchPart]:
        if not parts:
            return []
        return self.context.parallelize(parts, len(parts)).map(function).collect()


def _copy(part: BatchPart) -> BatchPart:
    """Write the rows of a part. Each attempt has files of its own, and one attempt counts."""
    rows = batches(part.options, part.conditions, ARROW)
    return replace(part, files=write_days(rows, Store(part.folder), part.prefix))


def _compare(part: BatchPart) -> BatchPart:
    archived = read_all(Store(part.folder), part.files)
    logged = pa.Table.from_batches(batches(part.options, part.conditions, ARROW), schema=ARROW)
    position = first_difference(archived, logged)
    if position is not None:
        raise ArchiveRefused(
            f"What was just archived of {part.options.log} is not what the log holds, first at "
            f"position {position}: rows were changed or deleted meanwhile, or the disk is broken. "
            "Nothing of this batch was kept."
        )
    return part
