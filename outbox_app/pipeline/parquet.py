"""Parquet files of an archive: written by day, read back as they were written, compared.

A file is hashed while it is written. A reader that decides by its rows reads all of it and
compares the hash first.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from ..exceptions import ArchiveRefused
from .manifest import DATA, INCOMING, File, Manifest
from .schema import SCHEMAS, arrow_types
from .store import Store

#: The columns of an archive, as Arrow sees them.
ARROW = arrow_types(SCHEMAS["events"])
# What is put in order is copied, and a column of strings has at most 2 GiB.
_LARGE = pa.schema(
    [(each.name, pa.large_string() if each.type == pa.string() else each.type) for each in ARROW]
)
#: Rows of a row group: what a reader skips or takes as a whole …
ROW_GROUP = 100_000
#: … and its size in memory, in bytes.
ROW_GROUP_BYTES = 64 * 2**20
#: Files that are open at once. A log of years has more days in a batch than a process may open.
OPEN_FILES = 50


def write_days(batches: Iterable[pa.RecordBatch], store: Store, prefix: str) -> list[File]:
    """Write rows into files by day, one where they are in order; they are left in ``_incoming``."""
    files: list[File] = []
    writers: dict[str, _Writer] = {}
    try:
        for batch in batches:
            for day, rows in _days(batch):
                if day not in writers:
                    if len(writers) == OPEN_FILES:
                        files.append(writers[next(iter(writers))].finish())
                        del writers[next(iter(writers))]
                    name = f"{DATA}/date={day}/{prefix}-{uuid4().hex[:12]}.parquet"
                    writers[day] = _Writer(store, name)
                writers[day].write(rows)
        return files + [writer.finish() for writer in writers.values()]
    except BaseException:
        for writer in writers.values():
            writer.remove()
        raise


def read_checked(store: Store, file: File) -> pa.Table:
    """Return the rows of a file, which has to be as it was written.

    Raises:
        ArchiveRefused: It is not, or it is not there.
    """
    content = b""
    for name in Manifest(store).places(file):
        with contextlib.suppress(FileNotFoundError):
            content = store.read(name)
            break
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ArchiveRefused(
            f"The archive {store.folder} is damaged: {file.name} is not as it was written. Put it "
            "back from a copy."
        )
    return parquet.read_table(io.BytesIO(content), schema=ARROW)


def read_all(store: Store, files: Iterable[File]) -> pa.Table:
    """Return the rows of several files, as ``read_checked`` does."""
    return pa.concat_tables([ARROW.empty_table(), *(read_checked(store, each) for each in files)])


def read_batches(store: Store, file: File, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a file, at least the position. Raises ``ArchiveRefused``."""
    names = list(dict.fromkeys([*columns, "id"]))
    for name in Manifest(store).places(file):
        try:
            opened = store.open(name)
        except FileNotFoundError:
            continue
        with opened:
            yield from parquet.ParquetFile(opened).iter_batches(columns=names)
        return
    raise Manifest(store).missing(file)


def first_difference(one: pa.Table, other: pa.Table) -> int | None:
    """Return the lowest position at which two sets of rows differ; None where they are the same."""
    if not (_is_sorted(one) and _is_sorted(other)):
        one, other = (table.cast(_LARGE).sort_by("id") for table in (one, other))
    if one.equals(other):
        return None
    for left, right in zip_longest(_rows(one), _rows(other)):
        if left != right:
            return min(int(row["id"]) for row in (left, right) if row)
    raise AssertionError("Tables with the same rows are equal.")


def _is_sorted(table: pa.Table) -> bool:
    ids = table.column("id")
    return bool(pc.all(pc.less(ids.slice(0, max(len(ids) - 1, 0)), ids.slice(1))).as_py())


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


@dataclass(slots=True)
class _Writer:
    store: Store
    name: str
    rows: int = 0
    first: int = 0
    last: int = 0
    _pending: list[pa.RecordBatch] = field(default_factory=list)
    _held: int = 0
    _bytes: int = 0
    _sink: Any = None
    _parquet: Any = None

    def __post_init__(self) -> None:
        self._sink = _Hashed(self.store, f"{INCOMING}/{self.name.rpartition('/')[2]}")
        self._parquet = parquet.ParquetWriter(self._sink, ARROW, compression="zstd")

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; they are written a row group at a time."""
        ends = pc.min_max(batch.column("id")).as_py()
        self.first = min(self.first or ends["min"], ends["min"])
        self.last = max(self.last, ends["max"])
        self.rows += batch.num_rows
        self._held += batch.num_rows
        self._bytes += batch.nbytes
        self._pending.append(batch)
        if self._held >= ROW_GROUP or self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> File:
        self._flush()
        self._parquet.close()
        self._sink.finish()
        size, digest = self._sink.size, self._sink.hash.hexdigest()
        return File(self.name, self.rows, size, digest, self.first, self.last)

    def remove(self) -> None:
        with contextlib.suppress(Exception):
            self._parquet.close()
        self._sink.remove()

    def _flush(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending, schema=ARROW)
            self._parquet.write_table(table, row_group_size=ROW_GROUP)
            self._pending, self._held, self._bytes = [], 0, 0


class _Hashed(io.RawIOBase):
    """A new file, hashed while it is written from front to back."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.hash, self.size = hashlib.sha256(), 0
        self._stream = store.create(name)

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        written = memoryview(content)
        self._stream.write(written)
        self.hash.update(written)
        self.size += written.nbytes
        return written.nbytes

    def finish(self) -> None:
        self.store.sync(self._stream)
        self._stream.close()

    def remove(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.close()
        with contextlib.suppress(OSError):
            self.store.delete(self.name)


def _days(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    days = pc.strftime(batch.column("recorded_at"), "%Y-%m-%d")
    for day in pc.unique(days).to_pylist():
        yield day, batch.filter(pc.equal(days, day))
