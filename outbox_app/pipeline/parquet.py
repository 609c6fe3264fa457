"""Parquet files of an archive: writes them by day, and reads them with checks.

The name of a file ends with the hash of its bytes, so a file can be checked as long as the table
names it. A reader that bases decisions on rows reads the whole file and compares the hash; other
readers, of any engine, have the checksum of each page.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from .exceptions import ArchiveRefused, InvalidSchema
from .schema import COLUMNS
from .store import Store

#: The column by which the table is partitioned: the day of ``recorded_at`` in UTC.
DAY = "recorded_date"
#: Rows of a row group, which a reader skips or reads as a whole …
ROW_GROUP = 100_000
#: … and its size in memory, in bytes.
ROW_GROUP_BYTES = 64 * 2**20
#: Columns in which almost no value occurs twice: a dictionary would be useless.
_UNIQUE = ("id", "data", "message_id")


@dataclass(frozen=True, slots=True)
class File:
    name: str
    rows: int
    bytes: int
    #: The first and last position in the file.
    first: int
    last: int
    #: The least and greatest values of columns, by which other readers skip files.
    ends: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    #: The ``content_sum`` of the rows, in a file that has just been written.
    sum: int = field(default=0, compare=False, repr=False)

    @property
    def day(self) -> str:
        return self.name.partition("/")[0].removeprefix(f"{DAY}=")

    @property
    def digest(self) -> str:
        return self.name.removesuffix(".parquet").rpartition("-")[2]

    @property
    def statistics(self) -> str:
        """The statistics of the file in the form of a Delta log, as JSON."""
        statistics = {
            "numRecords": self.rows,
            "minValues": {name: ends[0] for name, ends in self.ends.items()},
            "maxValues": {name: ends[1] for name, ends in self.ends.items()},
            "nullCount": dict.fromkeys(self.ends, 0),
        }
        return json.dumps(statistics, default=lambda time: time.isoformat(timespec="microseconds"))


def write_days(
    batches: Iterable[pa.RecordBatch], store: Store, prefix: str, schema: pa.Schema
) -> list[File]:
    table, files = pa.Table.from_batches(batches, schema), []
    years = pc.year(table["recorded_at"])
    has_day = pc.and_(pc.greater(years, 0), pc.less(years, 10_000)).fill_null(False)
    if (odd := pc.index(has_day, False).as_py()) >= 0:
        raise InvalidSchema(
            "Column recorded_at has a value that is not a time in years 1 to 9999, at position "
            f"{table['id'][odd]}. Correct it."
        )
    days = table["recorded_at"].cast(pa.date32())
    found = pc.unique(days)
    for day in found:
        rows = table if len(found) == 1 else table.filter(pc.equal(days, day))
        files.append(_written(rows, store, f"{DAY}={day.as_py()}/{prefix}"))
    return files


def _written(rows: pa.Table, store: Store, prefix: str) -> File:
    """Write a file as a whole, under a name that ends with the hash of its bytes."""
    buffer = io.BytesIO()
    parquet.write_table(
        rows,
        buffer,
        row_group_size=min(ROW_GROUP, ROW_GROUP_BYTES * rows.num_rows // rows.nbytes + 1),
        compression="zstd",
        write_page_checksum=True,
        use_dictionary=[name for name in rows.schema.names if name not in _UNIQUE],
    )
    content = buffer.getvalue()
    name = f"{prefix}-{hashlib.sha256(content).hexdigest()[:32]}.parquet"
    store.write(name, content)
    found = {each: pc.min_max(rows[each]).as_py() for each in ("id", "recorded_at", "stream")}
    ends = {each: (found[each]["min"], found[each]["max"]) for each in found}
    return File(name, rows.num_rows, len(content), *ends["id"], ends, content_sum(rows))


def content_sum(rows: pa.Table) -> int:
    """Return the sum of a SHA-256 of each row, modulo 2**128: it does not depend on their order.

    A NULL adds nothing to its row: a column that was added later is missing in older files.
    """
    total = 0
    for batch in rows.to_batches(max_chunksize=10_000):
        columns = [_as_bytes(batch[name], name) for name in batch.schema.names]
        joined = pc.binary_join_element_wise(*columns, b"\x1f", null_handling="skip")
        total += sum([int.from_bytes(hashlib.sha256(row).digest()) for row in joined.to_pylist()])
    return total % 2**128


def _as_bytes(column: pa.Array, name: str) -> pa.Array:
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    if not pa.types.is_binary(kind):
        column = column.cast(pa.string()).cast(pa.binary())
    if name in COLUMNS:
        return column
    return pc.binary_join_element_wise(pa.scalar(f"{name}=".encode()), column, b"")


def check(store: Store, file: File) -> None:
    """Read a file, a piece at a time. Raises ``ArchiveRefused`` if its bytes have changed."""
    try:
        with store.open(file.name) as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except FileNotFoundError:
        found = ""
    if not found.startswith(file.digest):
        raise damaged(store, file)


def read_checked(store: Store, file: File, schema: pa.Schema | None = None) -> pa.Table:
    """Return the rows of a file, by default in its own columns. Raises as ``check``."""
    try:
        content = store.read(file.name)
    except FileNotFoundError:
        content = b""
    if not hashlib.sha256(content).hexdigest().startswith(file.digest):
        raise damaged(store, file)
    return parquet.read_table(io.BytesIO(content), schema=schema)


@contextmanager
def opened(store: Store, file: File) -> Iterator[parquet.ParquetFile]:
    """Open a file. Each page that is read is checked. Raises ``ArchiveRefused``."""
    try:
        with store.open(file.name) as content:
            yield parquet.ParquetFile(content, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError):
        check(store, file)
        raise  # the file is intact, so its transfer failed


def read_batches(store: Store, file: File, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the position and the columns, if the file has them. Raises ``ArchiveRefused``."""
    with opened(store, file) as reader:
        there = set(reader.schema_arrow.names)
        names = [name for name in dict.fromkeys([*columns, "id"]) if name in there]
        for group in range(reader.num_row_groups):  # else a batch may span groups
            yield from reader.iter_batches(row_groups=[group], columns=names)


def read_stream(
    store: Store, files: Iterable[File], columns: Sequence[str], name: str
) -> list[dict[str, Any]]:
    """Return the rows of a stream, by position. Files that cannot have any are not opened.

    Raises ``ArchiveRefused``.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        first, last = file.ends["stream"]
        if first <= name <= last:
            for batch in read_batches(store, file, columns):
                rows += batch.filter(pc.equal(batch["stream"], name)).to_pylist()
    return sorted(rows, key=itemgetter("id"))


def damaged(store: Store, file: File) -> ArchiveRefused:
    return ArchiveRefused(
        f"The archive {store.folder} is damaged: {file.name} is missing, or not as it was written "
        f"({file.bytes} bytes, sha256 {file.digest}…). Put it back from a copy. The file has "
        f"positions {file.first} to {file.last}: as long as the log has them, you can archive to "
        "a new folder instead."
    )
